"""What the members of the running transfer have answered."""

import threading
import time
from collections import deque

from common.wire.weight_messages import WeightsJoin, WeightsLoaded, WeightsOffer, WeightsReady
from learner.weights.membership import Member

NUM_REMEMBERED = 1_000  # epochs of transfers that were given up


class Answers:
    """The answers to one offer. For the publisher's thread.

    An answer that is lost with a connection that broke is learnt from the next heartbeat.

    Example: begin(epoch 7, version 3); offered(a); note(a is ready) -> is_ready(a). Its report is
    lost, and it says hello, free and with version 3 -> loaded(a).is_ok.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._version = -1
        self._offers: dict[Member, tuple[WeightsOffer, float]] = {}  # and when
        self._ready: set[Member] = set()
        self._loaded: dict[Member, WeightsLoaded] = {}
        self._given_up: deque[int] = deque(maxlen=NUM_REMEMBERED)

    def begin(self, epoch: int, version: int) -> None:
        """Forget the transfer before."""
        self.epoch, self._version = epoch, version
        self._offers, self._ready, self._loaded = {}, set(), {}

    def offered(self, member: Member, offer: WeightsOffer) -> None:
        """Note what a member was sent."""
        self._offers[member] = (offer, time.monotonic())

    def unanswered(self, member: Member) -> WeightsOffer | None:
        """Return what a member was offered if it has not even said that it is ready."""
        found = self._offers.get(member)
        has_answered = member in self._ready or member in self._loaded
        return None if found is None or has_answered else found[0]

    def waited_s(self, member: Member) -> float:
        """Return the seconds since a member was offered the version."""
        found = self._offers.get(member)
        return 0.0 if found is None else time.monotonic() - found[1]

    def note(self, member: Member, answer: WeightsReady | WeightsLoaded) -> bool:
        """Take an answer in; True if it is to this offer and new."""
        if answer.group_epoch != self.epoch or answer.version != self._version:
            return False
        if isinstance(answer, WeightsReady):
            is_new = member not in self._ready
            self._ready.add(member)
            return is_new
        is_new = member not in self._loaded
        self._loaded[member] = answer
        return is_new

    def hear(self, member: Member, join: WeightsJoin) -> None:
        """Conclude from a sign of life what became of an answer that is lost."""
        is_over = not join.busy_epoch and member in self._ready and member not in self._loaded
        if is_over:
            is_ok = join.version == self._version
            self._loaded[member] = WeightsLoaded(
                actor=member.actor,
                incarnation=member.incarnation,
                version=self._version,
                group_epoch=self.epoch,
                is_ok=is_ok,
                error="" if is_ok else f"it is free and holds version {join.version}",
                stage_s=0.0,
                pause_s=0.0,
            )

    def is_ready(self, member: Member) -> bool:
        """Return whether it receives."""
        return member in self._ready

    def loaded(self, member: Member) -> WeightsLoaded | None:
        """Return what it says of the version in the end."""
        return self._loaded.get(member)

    def give_up(self) -> None:
        """Remember that nobody need wait for this transfer any more."""
        self._given_up.append(self.epoch)

    def is_given_up(self, epoch: int) -> bool:
        """Return whether a transfer was given up that some engine is still at."""
        return epoch in self._given_up


class Measures:
    """Seconds of transfers until somebody asks for them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metrics: dict[str, float] = {}

    def note(self, name: str, seconds: float, *, size_gb: float, is_sum: bool) -> None:
        """Count seconds, the sum or the longest since the last `drain`, also per GB."""
        with self._lock:
            for key, value in ((name, seconds), (f"{name}_per_gb", seconds / size_gb)):
                before = self._metrics.get(key, 0.0)
                self._metrics[key] = before + value if is_sum else max(before, value)

    def drain(self) -> dict[str, float]:
        """Return what was measured since the last call."""
        with self._lock:
            metrics, self._metrics = self._metrics, {}
        return metrics
