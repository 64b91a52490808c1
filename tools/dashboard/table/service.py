"""Runs commands of the product as services of the table: started on demand, stopped when idle."""

import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import EnvError
from common.host.child_process import ChildFailed, ChildProcess
from common.host.guardian import Guardian

START_S = 60.0
STOP_S = 3.0
# In the environment, because all users can read command lines with `ps`.
TOKEN = "LONGSTRIDE_TABLE_TOKEN"


def options_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the overrides that give a hub the environment settings of a run."""
    envs = config.get("envs")
    sections: dict[str, Any] = envs if isinstance(envs, dict) else {}
    return tuple(f"envs.{name}={json.dumps(value)}" for name, value in sorted(sections.items()))


class ServiceCommand:
    """A command that prints its address. Its log is in a temporary folder, outside of any run.

    Example: address = await Service(root, ["envhub", "port=0"], token="t").address()
    """

    def __init__(
        self,
        root: Path,
        words: Sequence[str],
        *,
        token: str,
        prefix: str = "hub: ",
        start_s: float = START_S,
    ) -> None:
        """Create the service without starting it.

        Args:
            root: folder of `run.py`.
            words: arguments of the command; ${oc.env:LONGSTRIDE_TABLE_TOKEN} is the token.
            prefix: beginning of the printed line that holds the address.
        """
        self._mark = prefix
        self._start_s = start_s
        self._argv = [sys.executable, str(root / "run.py"), *words]
        self._env = {TOKEN: token}
        self._starting = asyncio.Lock()
        self._running: tuple[ChildProcess, str] | None = None
        self._stack = contextlib.ExitStack()
        self.used_at = time.monotonic()

    async def address(self) -> str:
        """Return the address of the running command; start it if it does not run.

        Raises: EnvError: it did not start; the message has its last lines.
        """
        async with self._starting:
            if self._running is None or self._running[0].poll() is not None:
                await asyncio.to_thread(self._stop)
                self._running = await asyncio.to_thread(self._start)
            self.used_at = time.monotonic()
            return self._running[1]

    async def stop(self, *, unused_s: float = 0.0) -> None:
        """Stop the command if it was unused for `unused_s`; it can be started again."""
        async with self._starting:
            if time.monotonic() - self.used_at >= unused_s:
                await asyncio.to_thread(self._stop)

    def _start(self) -> tuple[ChildProcess, str]:
        """Start the command, and wait until it prints its address; return both."""
        folder = Path(tempfile.mkdtemp(prefix="longstride-"))
        log = folder / "log"
        name = self._argv[2]
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        guardian = Guardian()
        self._stack.callback(guardian.close)
        child = ChildProcess(name, self._argv, log_path=log, env=self._env, guardian=guardian)
        self._stack.callback(child.stop, timeout_s=STOP_S)
        try:
            child.wait_until(lambda: _announcement(log, self._mark) != "", timeout_s=self._start_s)
        except ChildFailed as error:
            last = " / ".join(child.log_tail(max_lines=3))
            self._stop()
            raise EnvError(f"{name} did not start: {last or error}") from error
        return child, _announcement(log, self._mark)

    def _stop(self) -> None:
        self._running = None
        self._stack.close()


def _announcement(log: Path, before: str) -> str:
    """Return the address that a command has printed, "" before that."""
    lines = log.read_text(errors="replace", encoding="utf-8").splitlines() if log.exists() else []
    return next((line.split()[1] for line in lines if line.startswith(before)), "")
