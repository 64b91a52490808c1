"""How well something is solved lately, and how much there is to learn from it."""

from collections import OrderedDict
from typing import Any


def worth(success: float, *, floor: float) -> float:
    """Return 4 p (1 - p), at least `floor`: 1 where every second episode succeeds.

    The variance of a 0/1 reward is p (1 - p); where all members of a group agree, it has no
    signal for a group-relative advantage.
    """
    return max(floor, 4 * success * (1 - success))


class SuccessPool:
    """Moving averages of success by key. Keys not heard of for longest are forgotten."""

    def __init__(self, *, memory_episodes: int, max_keys: int) -> None:
        """Start empty.

        Args:
            memory_episodes: a new episode weighs 1 / this, once there are so many.
            max_keys: bound of what is remembered.
        """
        self._weight = 1 / memory_episodes
        self._max_keys = max_keys
        self._known: OrderedDict[str, list[float]] = OrderedDict()  # key -> [episodes, success]

    def add(self, key: str, *, is_success: bool) -> None:
        """Count one episode."""
        entry = self._known.setdefault(key, [0, 0.0])
        entry[0] += 1
        entry[1] += max(self._weight, 1 / entry[0]) * (is_success - entry[1])
        self._known.move_to_end(key)
        if len(self._known) > self._max_keys:
            self._known.popitem(last=False)

    def success(self, key: str, *, min_episodes: int = 1) -> float | None:
        """Return the average; None if there were fewer episodes than `min_episodes`."""
        num, mean = self._known.get(key, (0, 0.0))
        return mean if num >= min_episodes else None

    def forget(self, prefix: str) -> None:
        """Drop every key that begins so."""
        for key in [key for key in self._known if key.startswith(prefix)]:
            del self._known[key]

    def snapshot(self) -> list[list[Any]]:
        """Return the exact state as JSON, those forgotten next first."""
        return [[key, num, mean] for key, (num, mean) in self._known.items()]

    def restore(self, state: list[list[Any]]) -> None:
        """Take over the state of `snapshot`."""
        self._known = OrderedDict((key, [num, mean]) for key, num, mean in state)
