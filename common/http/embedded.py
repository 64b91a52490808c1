"""An HTTP server inside a process that has signal handlers of its own."""

from collections.abc import Generator
from contextlib import contextmanager

import uvicorn


class EmbeddedServer(uvicorn.Server):
    """A server that does not install signal handlers."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield
