"""Entries that live as long as somebody asks for them."""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key")
Entry = TypeVar("Entry")


MAX_GRAIN_S = 1.0


def grain_of(lease_s: float) -> float:
    """Return to within what time a lease may be renewed where every use should be cheap."""
    return min(MAX_GRAIN_S, lease_s / 100)


class LeaseTable(Generic[Key, Entry]):
    """Entries by key, each with a lease that every use renews.

    Example: with leases of 10 s an entry put at 0 s and found at 8 s is there until 18 s. At 18 s
    `find` gives None, and the next `pop_expired` hands it out to be closed.
    """

    def __init__(self, lease_s: float, now_s: Callable[[], float], *, grain_s: float = 0.0) -> None:
        """`now_s` is a monotonic clock.

        `grain_s`: a lease that was renewed less than so long ago is left as it is, since renewing
        it costs more than all else of a look; entries are in the order of their use to within it.
        """
        self._lease_s = lease_s
        self._fresh_s = lease_s - grain_s  # what is left of a lease that need not be renewed
        self._now_s = now_s
        self._held: dict[Key, tuple[float, Entry]] = {}  # when it expires; the earliest first

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def __iter__(self) -> Iterator[Entry]:
        return iter([entry for _, entry in self._held.values()])

    def put(self, key: Key, entry: Entry) -> None:
        """Hold an entry from now on, instead of one that this key may have had."""
        self._held.pop(key, None)
        self._held[key] = (self._now_s() + self._lease_s, entry)

    def find(self, key: Key, now_s: float | None = None) -> Entry | None:
        """Return an entry and renew its lease; None if there is none, or it has expired.

        `now_s` is what the clock says, where somebody has just looked.
        """
        held = self._held.get(key)
        if held is None:
            return None
        expires_at_s, entry = held
        if now_s is None:
            now_s = self._now_s()
        left_s = expires_at_s - now_s
        if left_s > self._fresh_s:
            return entry
        if left_s <= 0:
            return None
        del self._held[key]
        self._held[key] = (now_s + self._lease_s, entry)
        return entry

    def peek(self, key: Key) -> Entry | None:
        """Return an entry and leave its lease alone, expired or not; None if there is none."""
        return self._held.get(key, (0.0, None))[1]

    def renew(self, key: Key) -> None:
        """Renew the lease of an entry, if it is still held."""
        if key in self._held:
            self.put(key, self._held[key][1])

    def pop(self, key: Key) -> Entry | None:
        """Take an entry out, expired or not; None if there is none."""
        return self._held.pop(key, (0.0, None))[1]

    def pop_expired(self, *, keeps: Callable[[Entry], bool] = lambda _: False) -> list[Entry]:
        """Take out the entries whose lease has run out, but those that `keeps` is true of."""
        now_s = self._now_s()
        gone: list[Key] = []
        for key, (expires_at_s, entry) in self._held.items():
            if expires_at_s > now_s:
                break
            if not keeps(entry):
                gone.append(key)
        return [self._held.pop(key)[1] for key in gone]
