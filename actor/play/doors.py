"""Where actors on this machine answer chat completions: files beside the run's keys tell it."""

import asyncio
import contextlib
import json
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from common.host.loopback import loopback

KNOCK_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """The address of one, and what lets in."""

    url: str
    key: str
    host: str  # the machine that it is on
    pid: int = 0  # of the actor; 0: not told

    @property
    def is_left(self) -> bool:
        """Whether the actor behind it has ended without taking it away."""
        is_here = self.host == socket.gethostname()
        return is_here and self.pid > 0 and not psutil.pid_exists(self.pid)

    def as_text(self) -> str:
        """Return what its file holds."""
        return json.dumps(asdict(self))


def door_path(root: Path, name: str) -> Path:
    """Return where an actor tells it, readable by the run's owner alone."""
    return root / "keys" / f"chat-{name}"


def remove_left(root: Path) -> None:
    """Remove the doors of actors of this machine that were killed."""
    for path in door_path(root, "").parent.glob("chat-*"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            if Door(**json.loads(path.read_text(encoding="utf-8"))).is_left:
                path.unlink()


async def open_door(root: Path) -> Door | None:
    """Return a door of the run below `root` that somebody is behind, None if there is none."""
    for path in sorted(door_path(root, "").parent.glob("chat-*")):
        with contextlib.suppress(OSError, ValueError, TypeError, TimeoutError):
            door = Door(**json.loads(path.read_text(encoding="utf-8")))
            if door.host != socket.gethostname():
                continue
            async with asyncio.timeout(KNOCK_S):
                _, writer = await asyncio.open_connection(loopback(), urlsplit(door.url).port)
            writer.close()
            return door
    return None
