"""Keeps the scheduler responsive while its disk is full: it grants nothing and stays alive."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.store.disk import POLL_S, DiskFull, RoomWait
from common.wire.messages import Heartbeat, LeaseGrant, LeaseRequest, Progress
from common.wire.sockets import Received, Router

ASK_AGAIN_S = 2.0


class DiskWait:
    """Writes to disk before answers are sent, and waits for free space if the disk is full.

    During the wait a heartbeat gets the answer that its sender received last, and a lease request
    gets an empty grant. Every other message is queued until it can be logged. So no answer depends
    on state that a kill of the process would lose.

    Example: write(log.flush, path) -> the messages queued during the wait, most often none.
    """

    def __init__(
        self, router: Router, stop: threading.Event, *, on_round: Callable[[], None]
    ) -> None:
        self._router = router
        self._stop = stop
        self._on_round = on_round
        self._progress: dict[bytes, Progress] = {}  # Last `Progress` sent, by receiver.

    def sent(self, receiver: bytes, answer: Any) -> None:
        """Remember the last `Progress` that a receiver was sent."""
        if isinstance(answer, Progress):
            self._progress[receiver] = answer

    def write(self, write: Callable[[], object], path: Path) -> list[Received]:
        """Call `write` until it succeeds; return the messages queued during the wait.

        Raises: DiskFull: the scheduler was stopped first.
        """
        wait = RoomWait(path)
        kept = list[Received]()
        while True:
            try:
                write()
            except OSError as error:
                wait.note_failure(error)
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
        """Return an answer that commits the scheduler to nothing; None if there is none."""
        match received.message:
            case Heartbeat():
                return self._progress.get(received.sender)
            case LeaseRequest():
                return LeaseGrant(leases=[], retry_after_s=ASK_AGAIN_S, reason="disk full")
        return None
