"""Chat endpoints of actors on this machine, published in files beside the run's keys."""

import asyncio
import contextlib
import json
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from common.host.loopback import loopback

CONNECT_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatEndpoint:
    """Address and key of an actor's chat endpoint."""

    url: str
    key: str
    host: str  # Name of the actor's machine.
    pid: int = 0  # Process id of the actor; 0: unknown.

    @property
    def is_left(self) -> bool:
        """Whether the actor has ended without removing its file."""
        is_here = self.host == socket.gethostname()
        return is_here and self.pid > 0 and not psutil.pid_exists(self.pid)

    def as_text(self) -> str:
        """Return the content of the endpoint's file."""
        return json.dumps(asdict(self))


def endpoint_path(root: Path, name: str) -> Path:
    """Return the path of an actor's endpoint file, readable by the run's owner alone."""
    return root / "keys" / f"chat-{name}"


def remove_left(root: Path) -> None:
    """Remove the endpoint files of killed actors of this machine."""
    for path in endpoint_path(root, "").parent.glob("chat-*"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            if ChatEndpoint(**json.loads(path.read_text(encoding="utf-8"))).is_left:
                path.unlink()


async def find_endpoint(root: Path) -> ChatEndpoint | None:
    """Return the first reachable chat endpoint of the run at `root`; None if there is none."""
    for path in sorted(endpoint_path(root, "").parent.glob("chat-*")):
        with contextlib.suppress(OSError, ValueError, TypeError, TimeoutError):
            endpoint = ChatEndpoint(**json.loads(path.read_text(encoding="utf-8")))
            if endpoint.host != socket.gethostname():
                continue
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, writer = await asyncio.open_connection(loopback(), urlsplit(endpoint.url).port)
            writer.close()
            return endpoint
    return None
