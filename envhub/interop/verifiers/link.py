"""The process in which verifiers plays its tasks, with an interpreter of its own."""

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common.http.environment import direct_loopback
from common.text import json_bytes
from envhub.env import EnvFailure

PLAYER = Path(__file__).parent / "theirs" / "player.py"
CLOSE_S = 5.0  # for the process to end
MAX_LINE_BYTES = 64 << 20


class VerifiersFailure(EnvFailure):
    """verifiers, the taskset or its scoring failed; the text names the taskset."""


@dataclass(kw_only=True)
class TasksetOptions:
    """What a file says of a taskset of verifiers."""

    python: str = "python"  # the interpreter of an environment that has verifiers
    path: str = ""  # a folder in which modules are found besides, from where this file is
    taskset: dict[str, Any] = field(default_factory=dict[str, Any])  # its id and its own options
    test: dict[str, Any] = field(default_factory=dict[str, Any])  # options of the test items
    env: dict[str, Any] = field(default_factory=dict[str, Any])  # its id, and who plays whom
    seat: str = ""  # of the policy, where it has several
    success: str = ""  # the metric or reward that says it with 1; "": the whole reward does
    num_test: int = -1  # the last so many, without `test`; -1: a tenth
    max_items: int = 10_000  # of each split
    min_reward: float = 0.0
    max_reward: float = 1.0
    max_turns: int = 10
    max_chars: int = 8_000  # of one observation
    max_sessions: int = 32  # live episodes
    timeout_s: float = 120.0  # from an answer to what comes of it
    start_timeout_s: float = 120.0  # to load the taskset

    @property
    def shown(self) -> str:
        """How texts for people name it."""
        return f"verifiers taskset {self.taskset.get('id', '')!r}"


class Player:
    """One process, and the episodes that it plays.

    Example: an episode waits for what comes of its answer; the process dies. It is told
    VerifiersFailure at once, as are all others, and the next episode has another process.
    """

    def __init__(self, options: TasksetOptions, process: asyncio.subprocess.Process) -> None:
        self._options, self._process = options, process
        self._told: dict[str, asyncio.Queue[dict[str, Any] | None]] = {"": asyncio.Queue()}
        self._reader = asyncio.create_task(self._read())
        self.num_items: tuple[int, int] = (0, 0)  # train, test
        self.is_lost = False

    @classmethod
    async def start(cls, options: TasksetOptions, folder: Path) -> "Player":
        """Return a process that is ready. Raises: VerifiersFailure: it does not come up."""
        hidden = ("PYTHONPATH", "VIRTUAL_ENV")  # what is ours alone
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
            ready = await player._next("", "to come up", timeout_s=options.start_timeout_s)
        except VerifiersFailure:
            await player.close()
            raise
        player.num_items = (ready["ready"][0], ready["ready"][1])
        return player

    async def begin(self, episode: str, split: str, index: int) -> dict[str, Any]:
        """Return the first line of an episode. Raises: VerifiersFailure."""
        self._told[episode] = asyncio.Queue()
        self._send({"start": episode, "split": split, "index": index})
        return await self._next(episode, f"to begin {split} item {index}")

    async def answer(self, episode: str, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return what comes of the policy's answer. Raises: VerifiersFailure."""
        self._send({"answer": episode, "message": message})
        return await self._next(episode, "to go on")

    def end(self, episode: str) -> None:
        """Give up an episode."""
        if self._told.pop(episode, None) is not None:
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
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError, RuntimeError):  # `_next` says that it is gone
            self._process.stdin.write(json_bytes(line) + b"\n")

    async def _next(self, episode: str, what: str, *, timeout_s: float = 0.0) -> dict[str, Any]:
        """Return the next line of an episode; "" is the process itself."""
        timeout_s = timeout_s or self._options.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._told[episode].get() if not self.is_lost else None
        except TimeoutError as error:
            raise VerifiersFailure(
                f"{self._options.shown}: it took longer than {timeout_s:g} s {what}"
            ) from error
        if line is None:
            code = self._process.returncode
            raise VerifiersFailure(
                f"{self._options.shown}: its process has ended"
                f"{'' if code is None else f' with exit code {code}'}; its words are in the log"
            )
        if "error" in line:
            raise VerifiersFailure(f"{self._options.shown}: {line['error']:.1500}")
        return line

    async def _read(self) -> None:
        """Hand lines to their episodes until there are no more."""
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # a line that is too long or none of ours
            while text := await self._process.stdout.readline():
                line = json.loads(text)
                if (queue := self._told.get(line.get("episode", ""))) is not None:
                    queue.put_nowait(line)
        self.is_lost = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._process.wait()
        for queue in self._told.values():
            queue.put_nowait(None)
