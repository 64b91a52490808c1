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
        self._lease_s, self._grain_s = lease_s, grain_s
        self._now_s = now_s
        # Until when it need not be renewed, and when it expires; the earliest first.
        self._held: dict[Key, tuple[float, float, Entry]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def __iter__(self) -> Iterator[Entry]:
        return iter([entry for _, _, entry in self._held.values()])

    def put(self, key: Key, entry: Entry) -> None:
        """Hold an entry from now on, instead of one that this key may have had."""
        self._put(key, entry, self._now_s())

    def _put(self, key: Key, entry: Entry, now_s: float) -> None:
        self._held.pop(key, None)
        self._held[key] = (now_s + self._grain_s, now_s + self._lease_s, entry)

    def find(self, key: Key, now_s: float | None = None) -> Entry | None:
        """Return an entry and renew its lease; None if there is none, or it has expired.

        `now_s` is what the clock says, where somebody has just looked.
        """
        held = self._held.get(key)
        if held is None:
            return None
        if now_s is None:
            now_s = self._now_s()
        renew_at_s, expires_at_s, entry = held
        if now_s < renew_at_s:
            return entry
        if now_s >= expires_at_s:
            return None
        self._put(key, entry, now_s)
        return entry

    def peek(self, key: Key) -> Entry | None:
        """Return an entry and leave its lease alone, expired or not; None if there is none."""
        return self._held.get(key, (None,))[-1]

    def renew(self, key: Key) -> None:
        """Renew the lease of an entry, if it is still held."""
        if key in self._held:
            self.put(key, self._held[key][-1])

    def pop(self, key: Key) -> Entry | None:
        """Take an entry out, expired or not; None if there is none."""
        return self._held.pop(key, (None,))[-1]

    def pop_expired(self, *, keeps: Callable[[Entry], bool] = lambda _: False) -> list[Entry]:
        """Take out the entries whose lease has run out, but those that `keeps` is true of."""
        now_s = self._now_s()
        gone: list[Key] = []
        for key, (_, expires_at_s, entry) in self._held.items():
            if expires_at_s > now_s:
                break
            if not keeps(entry):
                gone.append(key)
        return [self._held.pop(key)[-1] for key in gone]
