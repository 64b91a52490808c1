"""One live session, and the lock that serializes its calls."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from envhub.env import StepResult, Style
from envhub.hosting.episodes import HostedEpisode

# Bucket bounds of the histogram of step durations.
STEP_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


def empty_histogram() -> list[float]:
    """Return an empty histogram: total seconds, a count per bucket and the overflow count."""
    return [0.0] + [0] * (len(STEP_BUCKETS_S) + 1)


@dataclass(slots=True, kw_only=True)
class Session:
    """One live episode. `seq` counts executed steps; `answer` is the result of the last step.

    `lock` is None while a step is atomic without it.
    """

    session_id: str
    env_name: str
    item_id: str = ""
    seed: int = 0
    style: Style = Style.COMPACT
    answer: StepResult | None = None
    seq: int = 0
    episode: HostedEpisode
    lock: asyncio.Lock | None
    owner: str = ""

    @property
    def identity(self) -> dict[str, Any]:
        """The values that this session has in common with one that loads its saved state."""
        return {
            "env": self.env_name,
            "item_id": self.item_id,
            "seed": self.seed,
            "style": self.style.value,
        }

    @property
    def is_busy(self) -> bool:
        return self.lock is not None and self.lock.locked()


class SessionLock:
    """Exclusive access to a session; a class, since a generator costs several times as much."""

    __slots__ = ("_find", "_lock", "_renew", "_session_id")

    def __init__(
        self, find: Callable[[str], Session], renew: Callable[[str], None], session_id: str
    ) -> None:
        self._find = find
        self._renew = renew
        self._session_id = session_id

    async def __aenter__(self) -> Session:
        session = self._find(self._session_id)
        if (
            session.lock is None and not session.episode.is_instant
        ):  # Its environment was moved to a worker.
            session.lock = asyncio.Lock()
        self._lock = session.lock
        if self._lock is None:
            return session
        await self._lock.acquire()
        try:
            return self._find(self._session_id)
        except BaseException:
            self._lock.release()
            raise

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._lock is None:
            return
        if kind is None:
            self._renew(self._session_id)
        self._lock.release()
