"""The answers of engines to the offer of the current transfer."""

import threading
import time
from collections import deque

from common.weights.messages import WeightsJoin, WeightsLoaded, WeightsOffer, WeightsReady
from learner.weights.receivers import EngineMember

NUM_REMEMBERED = 1_000  # Epochs of abandoned transfers that are kept.


class Answers:
    """The answers to one offer. For the publisher's thread.

    If an answer is lost with a broken connection, the next heartbeat replaces it.

    Example: begin(epoch 7, version 3); offered(a); note(a is ready) -> is_ready(a). The final
    answer of a is lost, but its next hello is not busy and has version 3 -> loaded(a).is_ok.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._version = -1
        # Offer and time of sending, by member.
        self._offers: dict[EngineMember, tuple[WeightsOffer, float]] = {}
        self._ready: set[EngineMember] = set()
        self._loaded: dict[EngineMember, WeightsLoaded] = {}
        self._given_up: deque[int] = deque(maxlen=NUM_REMEMBERED)

    def begin(self, epoch: int, version: int) -> None:
        """Start a transfer and forget the one before."""
        self.epoch = epoch
        self._version = version
        self._offers = {}
        self._ready = set()
        self._loaded = {}

    def offered(self, member: EngineMember, offer: WeightsOffer) -> None:
        """Record the offer sent to a member."""
        self._offers[member] = (offer, time.monotonic())

    def unanswered(self, member: EngineMember) -> WeightsOffer | None:
        """Return the offer to a member that has not answered at all; else None."""
        found = self._offers.get(member)
        has_answered = member in self._ready or member in self._loaded
        return None if found is None or has_answered else found[0]

    def waited_s(self, member: EngineMember) -> float:
        """Return the seconds since a member was offered the version."""
        found = self._offers.get(member)
        return 0.0 if found is None else time.monotonic() - found[1]

    def note(self, member: EngineMember, answer: WeightsReady | WeightsLoaded) -> bool:
        """Record an answer; True if it belongs to this offer and is new."""
        if answer.group_epoch != self.epoch or answer.version != self._version:
            return False
        if isinstance(answer, WeightsReady):
            is_new = member not in self._ready
            self._ready.add(member)
            return is_new
        is_new = member not in self._loaded
        self._loaded[member] = answer
        return is_new

    def derive_from_heartbeat(self, member: EngineMember, join: WeightsJoin) -> None:
        """Derive a lost answer from a member's heartbeat."""
        is_over = not join.busy_epoch and member in self._ready and member not in self._loaded
        if is_over:
            is_ok = join.version == self._version
            self._loaded[member] = WeightsLoaded(
                actor=member.actor,
                incarnation=member.incarnation,
                version=self._version,
                group_epoch=self.epoch,
                is_ok=is_ok,
                error="" if is_ok else f"the engine is idle and has version {join.version}",
                stage_s=0.0,
                pause_s=0.0,
            )

    def is_ready(self, member: EngineMember) -> bool:
        """Return whether the member receives, or has received."""
        return member in self._ready or member in self._loaded

    def loaded(self, member: EngineMember) -> WeightsLoaded | None:
        """Return the member's final answer, None if there is none yet."""
        return self._loaded.get(member)

    def give_up(self) -> None:
        """Record that this transfer is abandoned."""
        self._given_up.append(self.epoch)

    def is_given_up(self, epoch: int) -> bool:
        """Return whether the transfer of this epoch was abandoned."""
        return epoch in self._given_up


class TransferMetrics:
    """Durations and bytes of transfers until the next `drain`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._metrics: dict[str, float] = {}

    def note(self, name: str, seconds: float, *, size_gb: float, is_sum: bool) -> None:
        """Record a duration, also per GB.

        Args:
            is_sum: add the durations since the last `drain`; else keep the longest.
        """
        with self._lock:
            for key, value in ((name, seconds), (f"{name}_per_gb", seconds / size_gb)):
                before = self._metrics.get(key, 0.0)
                self._metrics[key] = before + value if is_sum else max(before, value)

    def add(self, name: str, amount: float) -> None:
        """Add to a count since the last `drain`."""
        with self._lock:
            self._metrics[name] = self._metrics.get(name, 0.0) + amount

    def drain(self) -> dict[str, float]:
        """Return the metrics measured since the last call."""
        with self._lock:
            metrics = self._metrics
            self._metrics = {}
        return metrics
