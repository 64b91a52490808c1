"""A real scheduler in a thread for a run with joining hubs, and its clients."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq

from common.config.run_config import RunConfig
from common.store.run_dir import RunDir
from common.wire.codec import decode, encode
from common.wire.messages import Directory, HubHello, HubPlace, Welcome
from common.wire.security import RunKeys, create_keys
from common.wire.sockets import connect_dealer
from envhub.main import Registration
from scheduler.main import serve
from tests.configs import edited
from tests.scheduler.builders import hello_of

WAIT_S = 60.0


class Run:
    """A scheduler in a thread in a run with joining hubs."""

    def __init__(self, root: Path, cfg: RunConfig) -> None:
        self.run_dir = RunDir(root=root)
        self.keys: RunKeys = create_keys(self.run_dir.keys)
        self.cfg = edited(cfg, {"envhub.is_started": False})
        self.error: Exception | None = None
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            serve(self.cfg, self.run_dir, self._stop)
        except Exception as error:  # noqa: BLE001 - the test checks it
            self.error = error

    def hub(self, name: str, url: str, envs: list[str], *, items: str = "") -> Registration:
        """A hub's own registration, as its process starts it; stopped with the run."""
        place = HubPlace(url=url, token="t", envs=envs)
        content = dict.fromkeys(envs, items) if items else {}
        hello = HubHello(name=name, incarnation=name, place=place, content=content)
        hub = Registration(self.run_dir, self.keys, hello, every_s=0.05, silence_s=None)
        hub.start()
        return hub

    def ask_directory(self, name: str = "actor-0", *, known: int = 0) -> Directory:
        """Return the directory that an actor receives after its hello."""
        socket = self.connect(self.keys)
        try:
            assert isinstance(ask(socket, replace(hello_of(name), directory=known)), Welcome)
            return decode(socket.recv_multipart())
        finally:
            socket.close(linger=0)

    def connect(self, keys: RunKeys) -> Any:
        address = self.run_dir.wait_for_address("scheduler", timeout_s=WAIT_S)
        return connect_dealer(self._context, keys, address=address, timeout_s=WAIT_S)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        self._context.term()
        assert not self._thread.is_alive()

    def wait_failed(self) -> Exception | None:
        self._thread.join(WAIT_S)
        return self.error


def ask(socket: Any, message: Any) -> Any:
    socket.send_multipart(encode(message))
    return decode(socket.recv_multipart())


@contextlib.contextmanager
def running(root: Path, cfg: RunConfig) -> Iterator[Run]:
    run = Run(root, cfg)
    try:
        yield run
    finally:
        run.stop()
