"""What the scheduler does while its disk is full: nothing new, and nobody takes it for dead."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.store.disk import POLL_S, DiskFull, RoomWait
from common.wire.messages import Heartbeat, LeaseGrant, LeaseRequest, Progress
from common.wire.sockets import Received, Router

ASK_AGAIN_S = 2.0


class DiskWait:
    """Writes what must be on disk before it is answered, and waits for room if need be.

    Meanwhile a heartbeat is answered with what was answered last, who asks for work gets none, and
    whatever else comes is kept until it can be logged: no answer tells of what a kill would undo.

    Example: write(log.flush, path) -> the messages that came meanwhile, most often none.
    """

    def __init__(
        self, router: Router, stop: threading.Event, *, on_round: Callable[[], None]
    ) -> None:
        self._router = router
        self._stop = stop
        self._on_round = on_round
        self._progress: dict[bytes, Progress] = {}  # the last one, by receiver

    def sent(self, receiver: bytes, answer: Any) -> None:
        """Note what somebody was answered."""
        if isinstance(answer, Progress):
            self._progress[receiver] = answer

    def write(self, write: Callable[[], object], path: Path) -> list[Received]:
        """Call `write` until it works; return what came meanwhile and is to be handled now.

        Raises: DiskFull: told to stop first.
        """
        wait, kept = RoomWait(path), list[Received]()
        while True:
            try:
                write()
            except OSError as error:
                wait.met(error)
            else:
                wait.over()
                return kept
            if self._stop.is_set():
                raise DiskFull(f"stopped while the disk is full: {path} is not written")
            self._on_round()
            for each in self._router.receive_all(timeout_s=POLL_S):
                answer = self._idle_answer(each)
                if answer is None:
                    kept.append(each)
                else:
                    self._router.send(each.sender, answer)

    def _idle_answer(self, received: Received) -> Any:
        """Return an answer that promises nothing; None if there is none."""
        match received.message:
            case Heartbeat():
                return self._progress.get(received.sender)
            case LeaseRequest():
                return LeaseGrant(leases=[], retry_after_s=ASK_AGAIN_S, reason="disk full")
        return None
