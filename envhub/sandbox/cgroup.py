"""Control groups (version 2): the kernel's own limits of memory and processes for one sandbox."""

import asyncio
import contextlib
import logging
import secrets
import time
from pathlib import Path

from envhub.sandbox.interface import SandboxLimits

logger = logging.getLogger(__name__)

ROOT = Path("/sys/fs/cgroup")
PREFIX = "longstride-sandbox-"
# Memory and processes of the agent and of bubblewrap themselves.
OWN_BYTES = 64 << 20
OWN_PROCESSES = 8
REMOVE_S = 10.0  # Seconds in which the killed processes of a group must have ended.
REMOVE_POLL_S = 0.02


class Cgroup:
    """A control group for the processes of one sandbox."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def create(cls, limits: SandboxLimits, parent: Path = ROOT) -> "Cgroup | None":
        """Return a new group with these limits; None if the machine offers none.

        Args:
            parent: folder of a group of version 2 whose children have the controllers `memory` and
                `pids`.
        """
        folder = parent / f"{PREFIX}{secrets.token_hex(8)}"
        if not (parent / "cgroup.controllers").is_file():
            return None  # Version 1, or no control groups.
        try:
            folder.mkdir()
        except OSError:
            return None
        group = cls(folder)
        try:
            group._set("memory.max", limits.memory_bytes + OWN_BYTES)
            group._set("pids.max", limits.processes + OWN_PROCESSES)
        except OSError:
            with contextlib.suppress(OSError):
                folder.rmdir()
            return None
        with contextlib.suppress(OSError):  # A kernel without swap accounting lacks the file.
            group._set("memory.swap.max", 0)
        return group

    def _set(self, name: str, value: int) -> None:
        """Write a limit. Raises: FileNotFoundError: the kernel does not have it."""
        path = self._folder / name
        if not path.exists():
            raise FileNotFoundError(name)
        path.write_text(str(value), encoding="ascii")

    def add(self, pid: int) -> None:
        """Move a process and its descendants into the group, while they wait for requests."""
        (self._folder / "cgroup.procs").write_text(str(pid), encoding="ascii")
        children = Path(f"/proc/{pid}/task/{pid}/children")
        for child in children.read_text(encoding="ascii").split():
            with contextlib.suppress(OSError):
                self.add(int(child))

    def num_killed(self) -> int:
        """Return how many processes the kernel ended because of the memory limit."""
        with contextlib.suppress(OSError):
            lines = (self._folder / "memory.events").read_text(encoding="ascii").splitlines()
            return dict((k, int(v)) for k, v in map(str.split, lines)).get("oom_kill", 0)
        return 0

    def kill(self) -> None:
        """End all processes of the group."""
        with contextlib.suppress(OSError):
            self._set("cgroup.kill", 1)

    async def remove(self) -> None:
        """End all processes of the group, and remove it once they have ended."""
        self.kill()
        deadline_s = time.monotonic() + REMOVE_S
        while True:
            try:
                self._folder.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError as error:  # A process of the group has not ended yet.
                if time.monotonic() > deadline_s:
                    logger.warning("control group remains folder=%s reason=%s", self._folder, error)
                    return
            await asyncio.sleep(REMOVE_POLL_S)
