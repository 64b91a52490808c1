"""A command of the command line as a child process, for the Python interface.

The Python interface has no second path: each function runs the command of its name, with the same
checks and files. A process of its own also keeps its signals, its event loop and its folder, which
a notebook needs for itself.
"""

import atexit
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.errors import ConfigError, LongstrideError
from common.host.child_process import ERROR, ChildProcess, describe_exit
from common.repository import CODE, IS_CHECKOUT, ROOT
from tools.api.references import Overrides, import_roots, overrides_of
from tools.cli.command_line import ParsedCommand, parse
from tools.launch.base import EXIT_CONFIG_ERROR, EXIT_FINISHED

POLL_S = 0.2
STOP_S = 3600.0  # The launcher has its own deadlines for the roles, so this one is not reached.


class ProgramFailed(LongstrideError):
    """A command ended with an error; the text is the command's."""


class CommandProcess:
    """A running command. It ends with this process, also if this process is killed."""

    def __init__(
        self,
        command: str,
        *,
        config: str | Path | None = None,
        overrides: Overrides,
        flags: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare a command without starting it.

        Args:
            config: a name, or a YAML file.
            flags: further words, such as --json FILE.
            environ: additional variables of the process.

        Raises: ConfigError: an override has no form on the command line.
        """
        named = [] if config is None else ["--config", str(config)]
        self.words = [command, *named, *flags, *overrides_of(overrides)]
        self.command = command
        roots = [*import_roots(overrides), os.environ.get("PYTHONPATH", "")]
        self._environ = {"PYTHONPATH": os.pathsep.join(filter(None, roots)), **(environ or {})}
        self._child: ChildProcess | None = None
        self._is_stopped = False
        self.started_at = 0.0  # Unix time.

    def parsed(self) -> ParsedCommand:
        """Return the parsed words. Raises: ConfigError."""
        return parse(self.words)

    def start(self) -> None:
        """Start the process; its output goes to a temporary file."""
        self.started_at = time.time()
        self._child = ChildProcess(
            self.command,
            [sys.executable, str(CODE / "run.py"), *self.words],
            log_path=temporary_folder() / "output.log",
            env=self._environ,
            cwd=Path.cwd() if IS_CHECKOUT else ROOT,
        )
        atexit.register(self.stop)  # A script that ends stops its command in order.

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._child is not None and self._child.poll() is None

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._child is not None
        return self._child.pid

    @property
    def output(self) -> str:
        """The output so far."""
        path = self._child.log_path if self._child else None
        return path.read_text(encoding="utf-8", errors="replace") if path else ""

    def wait(self, *, timeout_s: float | None = None) -> None:
        """Wait for the end; an interrupt stops the process.

        Raises:
            TimeoutError: the process still runs after `timeout_s`.
            ConfigError, ProgramFailed: the command ended with an error.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while self.is_running:
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"{self.command} has not ended within {timeout_s:g} s")
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            self.stop()
            raise
        self.check()

    def wait_for(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """Wait until the output matches.

        Raises: ConfigError, ProgramFailed: the command ended first.
        """
        try:
            while (match := pattern.search(self.output)) is None:
                if not self.is_running:
                    self.check()
                    raise ProgramFailed(f"{self.command} ended: {self.output[-2000:]}")
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            self.stop()
            raise
        return match

    def check(self) -> None:
        """Raise the error of an ended command; one that `stop` ended has none."""
        code = self._child.poll() if self._child else None
        if code in (None, EXIT_FINISHED) or self._is_stopped:
            return
        assert self._child is not None
        text = self._child.last_error().removeprefix(ERROR)
        if code == EXIT_CONFIG_ERROR:
            raise ConfigError(text)
        raise ProgramFailed(f"{self.command} ended with {describe_exit(code or 0)}: {text}")

    def stop(self) -> None:
        """End the process in order, with all processes that it started."""
        atexit.unregister(self.stop)
        if self._child is None:
            return
        self._is_stopped = self._is_stopped or self.is_running
        self._child.stop(timeout_s=STOP_S)


def temporary_folder() -> Path:
    """Return a new folder that is removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="longstride-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
