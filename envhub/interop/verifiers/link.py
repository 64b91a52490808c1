"""The process that plays tasks of verifiers, with its own Python interpreter."""

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common.host.loopback import direct_loopback
from common.text import json_bytes
from envhub.env import EnvFailure

PLAYER = Path(__file__).parent / "theirs" / "player.py"
CLOSE_S = 5.0  # Time limit for the process to end.
MAX_LINE_BYTES = 64 << 20


class VerifiersFailure(EnvFailure):
    """verifiers, the taskset or its scoring failed; the text names the taskset."""


@dataclass(kw_only=True)
class TasksetOptions:
    """Options in the YAML file of a taskset of verifiers."""

    python: str = "python"  # Interpreter of a Python environment with verifiers.
    path: str = ""  # Additional folder for modules, relative to this file.
    # Id and options of the taskset.
    taskset: dict[str, Any] = field(default_factory=dict[str, Any])
    test: dict[str, Any] = field(default_factory=dict[str, Any])  # Options of the test items.
    # Id of the environment, and the agent of each seat.
    env: dict[str, Any] = field(default_factory=dict[str, Any])
    seat: str = ""  # The policy's seat, if it has several.
    success: str = ""  # Metric or reward that means success if it is 1; "": the whole reward.
    num_test: int = -1  # Number of last items for testing, without `test`; -1: a tenth.
    max_items: int = 10_000  # Maximum items of each split.
    min_reward: float = 0.0
    max_reward: float = 1.0
    max_turns: int = 10
    max_chars: int = 8_000  # Maximum characters of one observation.
    max_sessions: int = 32  # Maximum number of live episodes.
    timeout_s: float = 120.0  # Seconds from an answer to the next request.
    start_timeout_s: float = 120.0  # Seconds to load the taskset.

    @property
    def shown(self) -> str:
        """Name of the taskset in texts for people."""
        return f"verifiers taskset {self.taskset.get('id', '')!r}"


class PlayerProcess:
    """One process and its episodes.

    Example: an episode waits for the result of its answer and the process dies. This and all other
    episodes get VerifiersFailure immediately, and the next episode starts another process.
    """

    def __init__(self, options: TasksetOptions, process: asyncio.subprocess.Process) -> None:
        self._options = options
        self._process = process
        self._lines: dict[str, asyncio.Queue[dict[str, Any] | None]] = {"": asyncio.Queue()}
        self._reader = asyncio.create_task(self._read())
        self.num_items: tuple[int, int] = (0, 0)  # Numbers of training and test items.
        self.is_lost = False

    @classmethod
    async def start(cls, options: TasksetOptions, folder: Path) -> "PlayerProcess":
        """Return a process that is ready. Raises: VerifiersFailure: it does not start."""
        # Variables of this process that the player must not inherit.
        hidden = ("PYTHONPATH", "VIRTUAL_ENV")
        environment = {k: v for k, v in os.environ.items() if k not in hidden}
        if options.path:
            environment["PYTHONPATH"] = str((folder / options.path).resolve())
        environment |= direct_loopback(environment)
        try:
            process = await asyncio.create_subprocess_exec(
                options.python,
                str(PLAYER),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=environment,
                limit=MAX_LINE_BYTES,
            )
        except OSError as error:
            raise VerifiersFailure(
                f"{options.shown}: python={options.python}: {error.strerror}"
            ) from error
        player = cls(options, process)
        player._send(asdict(options))
        try:
            ready = await player._next("", "the start", timeout_s=options.start_timeout_s)
        except VerifiersFailure:
            await player.close()
            raise
        player.num_items = (ready["ready"][0], ready["ready"][1])
        return player

    async def begin(self, episode: str, split: str, index: int) -> dict[str, Any]:
        """Return the first line of an episode. Raises: VerifiersFailure."""
        self._lines[episode] = asyncio.Queue()
        self._send({"start": episode, "split": split, "index": index})
        return await self._next(episode, f"the start of {split} item {index}")

    async def answer(self, episode: str, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the line that follows the policy's answer. Raises: VerifiersFailure."""
        self._send({"answer": episode, "message": message})
        return await self._next(episode, "a turn")

    def end(self, episode: str) -> None:
        """Abort an episode."""
        if self._lines.pop(episode, None) is not None:
            self._send({"end": episode})

    async def close(self) -> None:
        """End the process."""
        self.is_lost = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._process.wait()
        if self._process.returncode is None:
            self._process.kill()
        await asyncio.wait([self._reader], timeout=CLOSE_S)
        self._reader.cancel()

    def _send(self, line: Mapping[str, Any]) -> None:
        """Send a line to the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError, RuntimeError):  # `_next` reports a lost process.
            self._process.stdin.write(json_bytes(line) + b"\n")

    async def _next(self, episode: str, what: str, *, timeout_s: float = 0.0) -> dict[str, Any]:
        """Return the next line of an episode; "" is the process itself."""
        timeout_s = timeout_s or self._options.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._lines[episode].get() if not self.is_lost else None
        except TimeoutError as error:
            raise VerifiersFailure(
                f"{self._options.shown}: {what} took longer than {timeout_s:g} s"
            ) from error
        if line is None:
            code = self._process.returncode
            raise VerifiersFailure(
                f"{self._options.shown}: its process has ended"
                f"{'' if code is None else f' with exit code {code}'}; the log has its output"
            )
        if "error" in line:
            raise VerifiersFailure(f"{self._options.shown}: {line['error']:.1500}")
        return line

    async def _read(self) -> None:
        """Queue each line for its episode until the output ends."""
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # A line that is too long or not JSON.
            while text := await self._process.stdout.readline():
                line = json.loads(text)
                if (queue := self._lines.get(line.get("episode", ""))) is not None:
                    queue.put_nowait(line)
        self.is_lost = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._process.wait()
        for queue in self._lines.values():
            queue.put_nowait(None)
