"""A table of entries that expire unless they are used."""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key")
Entry = TypeVar("Entry")


class ExpiringTable(Generic[Key, Entry]):
    """Entries by key, each of which expires after a time without use.

    Example: with an idle limit of 10 s, an entry that is put at 0 s and found at 8 s lives until
    18 s. Then `find` returns None, and the next `pop_expired` returns the entry to be closed.
    """

    def __init__(self, idle_s: float, now_s: Callable[[], float]) -> None:
        """`now_s` is a monotonic clock. Entries are ordered by last use."""
        self._idle_s = idle_s
        self._now_s = now_s
        # Expiry time and entry; the earliest expiry comes first.
        self._held: dict[Key, tuple[float, Entry]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def __iter__(self) -> Iterator[Entry]:
        return iter([entry for _, entry in self._held.values()])

    def put(self, key: Key, entry: Entry) -> None:
        """Store an entry; it replaces the key's previous entry."""
        self._held.pop(key, None)
        self._held[key] = (self._now_s() + self._idle_s, entry)

    def find(self, key: Key) -> Entry | None:
        """Return an entry and restart its idle time; None if it is missing or expired."""
        if key not in self._held:
            return None
        expires_at_s, entry = self._held[key]
        if self._now_s() >= expires_at_s:
            return None
        self.put(key, entry)
        return entry

    def renew(self, key: Key) -> None:
        """Restart the idle time of an entry if the table still contains it."""
        if key in self._held:
            self.put(key, self._held[key][-1])

    def pop(self, key: Key) -> Entry | None:
        """Remove and return an entry, even if it has expired; None if missing."""
        return self._held.pop(key, (None,))[-1]

    def pop_expired(self, *, keeps: Callable[[Entry], bool] = lambda _: False) -> list[Entry]:
        """Remove and return the expired entries, except those for which `keeps` is true."""
        now_s = self._now_s()
        gone: list[Key] = []
        for key, (expires_at_s, entry) in self._held.items():
            if expires_at_s > now_s:
                break
            if not keeps(entry):
                gone.append(key)
        return [self._held.pop(key)[-1] for key in gone]
