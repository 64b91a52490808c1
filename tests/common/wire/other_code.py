"""A peer whose code has another schema version of the wire."""

import threading
from typing import Any

from common.wire.codec import decode, encode
from common.wire.messages import Ack, Rejected
from common.wire.security import RunKeys
from common.wire.sockets import Router
from common.wire.versions import version_of

HOST = "127.0.0.1"
ACK = Ack(episode_id="g/0", is_accepted=True, reason="")


class OtherCode(threading.Thread):
    """A peer whose code understands one schema version only: it refuses all others."""

    def __init__(self, keys: RunKeys, version: int, *, answer: Any = ACK) -> None:
        super().__init__(daemon=True)
        self.version = version
        self._answer = answer
        self.received: list[Any] = []  # The accepted messages.
        self._router = Router(keys, host=HOST, port=0)
        self.address = f"tcp://{HOST}:{self._router.port}"
        self._stop_requested = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._stop_requested.is_set():
            for sender, *frames in self._router.receive_frames(timeout_s=0.5):
                if (found := version_of(frames)) == self.version:
                    self.received.append(decode(frames))
                    answer = self._answer
                else:
                    reason = f"schema version {found}, but this process uses {self.version}"
                    answer = Rejected(reason=reason)
                self._router.send_frames(sender, encode(answer, self.version))

    def stop(self) -> None:
        self._stop_requested.set()
        self._router.wake()
        self.join()
        self._router.close()
