"""The process of a user's agent and its children: start, output, termination."""

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, STDOUT, Process
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil

from actor.rollout.episode import PolicyFailed
from common.host.guardian import Guardian
from common.host.loopback import direct_loopback

LEFT_S = 1.0  # Seconds to read the last output of a killed process.
POLL_S = 0.2
NUM_LINES = 20  # Last lines of output that an error contains.
MAX_OUTPUT_CHARS = 600  # Maximum number of characters of these lines.


class AgentProcess:
    """A running agent. Its starter must end it.

    If this process is killed, the guardian ends the agent.

    Example:
        variables = {"OPENAI_API_KEY": key}
        process = await AgentProcess.start(["python", "agent.py"], variables, guardian)
        try:
            await asyncio.wait([process.exits], timeout=9.0)
        finally:
            await process.end()
    """

    def __init__(self, process: Process, guardian: Guardian) -> None:
        """Read the output continuously, so that the process never blocks on a full pipe."""
        self._process = process
        self._guardian = guardian
        guardian.add(process.pid)
        self._lines: deque[bytes] = deque(maxlen=NUM_LINES)
        self._reading = asyncio.create_task(self._read())
        self.exits = asyncio.create_task(self._exit())

    @classmethod
    async def start(
        cls, command: Sequence[str], variables: Mapping[str, str], guardian: Guardian
    ) -> "AgentProcess":
        """Start a command with these variables added to our environment. Raises: PolicyFailed."""
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env={**os.environ, **direct_loopback(os.environ), **variables},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise PolicyFailed(f"actor.agent={list(command)}: {error}") from error
        return cls(process, guardian)

    @property
    def code(self) -> int | None:
        """Exit code; None while the process runs."""
        return self._process.returncode

    @property
    def death(self) -> str:
        """Exit code and last output of the process."""
        output = b"\n".join(self._lines).decode(errors="replace")[-MAX_OUTPUT_CHARS:]
        return f"actor.agent: the process exited with code {self.code}: {output}"

    async def end(self) -> None:
        """Kill the process and its children, including those outside of its process group."""
        self.kill()
        self._guardian.remove(self._process.pid)
        tasks = [self._reading, self.exits]
        await asyncio.wait(tasks, timeout=LEFT_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._process._transport.close()  # type: ignore[attr-defined] # A child may hold the pipe.

    def kill(self) -> None:
        """Kill the process and its children without waiting; `end` waits."""
        family: list[psutil.Process] = []
        with suppress(psutil.Error):
            family = psutil.Process(self._process.pid).children(recursive=True)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for child in family:
            with suppress(psutil.Error):
                child.kill()

    async def _exit(self) -> None:
        """Return when the process has ended, even if a child still holds its output.

        `Process.wait` would wait for the end of the output.
        """
        waiting = asyncio.ensure_future(self._process.wait())
        try:
            while self._process.returncode is None:
                await asyncio.wait([waiting], timeout=POLL_S)
        finally:
            waiting.cancel()

    async def _read(self) -> None:
        """Keep the last lines of the output."""
        stream = self._process.stdout
        while stream is not None and (chunk := await stream.read(1 << 16)):
            self._lines.extend(chunk[-4096:].splitlines())
