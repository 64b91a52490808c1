"""The table of live sessions: leases, sequence numbers and answers kept for a retry."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from common.errors import EnvError, EnvTimeout
from envhub.catalogue.registry import Registry
from envhub.env import StepResult, Style
from envhub.errors import (
    CapacityFull,
    EnvRaised,
    HubDraining,
    SessionConflict,
    SessionUnknown,
    WorkerLost,
)
from envhub.hosting.episodes import Episode
from envhub.hosting.placement import Placement
from envhub.hosting.process_memory import give_back_memory
from envhub.hosting.workers import Worker
from envhub.http.metrics import HubMetrics

logger = logging.getLogger(__name__)

MAX_REAP_INTERVAL_S = 5.0
SESSIONS_PER_TRIM = 200  # ended sessions after which free memory goes back to the system
STOP_TIMEOUT_S = 1.0


@dataclass(slots=True, kw_only=True)
class Session:
    """One live episode. `seq` counts executed steps; `answer` is the last one's result.

    `lock` is None where a step is atomic by itself.
    """

    session_id: str
    env_name: str
    episode: Episode
    lock: asyncio.Lock | None
    expires_at_s: float
    seq: int = 0
    answer: StepResult | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Why a session ended without its client being told yet."""

    failure: str
    expires_at_s: float


class Sessions:
    """Sessions by random token. All methods belong to one event loop.

    Calls of one session come one at a time; those of others go on meanwhile. A session whose
    call fails or overruns is dropped; so are those of a worker process that is lost, and the
    next request for each of them is told why.

    Example: step seq 1 runs the environment. Its answer is lost on the way; the client sends seq 1
    again and gets the kept answer, nothing runs. Both at the same time: the second waits for the
    first and gets its answer. Seq 2 runs the next step; 1 or 9 now conflicts.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        lease_s: float,
        capacity: int,
        step_timeout_s: float,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`capacity` is per environment; `now_s` is a monotonic clock."""
        self._registry = registry
        self.lease_s = lease_s
        self._now_s = now_s
        self._sessions: dict[str, Session] = {}
        self._ended: dict[str, Ended] = {}
        self._num_running = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.is_draining = False
        self.num_live: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.placement = Placement(registry, capacity=capacity, step_timeout_s=step_timeout_s)
        self.placement.on_lost = self._end_sessions_of
        self.metrics = HubMetrics(self)

    def __len__(self) -> int:
        return len(self._sessions)

    async def create(
        self, env_name: str, item_id: str, *, seed: int = 0, style: Style = Style.COMPACT
    ) -> tuple[str, str]:
        """Start an episode and return its session id and first observation.

        Raises:
            UnknownEnv, UnknownItem: the name or the item does not exist.
            CapacityFull: try again later.
            HubDraining: the hub is about to stop.
            EnvRaised, EnvTimeout: the environment failed.
        """
        if self.is_draining:
            raise HubDraining("the hub is about to stop and takes no new sessions")
        spec = self._registry.spec(env_name)
        capacity = self.placement.capacity(spec)
        if self.num_live[env_name] >= capacity:
            self.counts["refused"] += 1
            raise CapacityFull(f"{env_name} has all its {capacity} sessions in use")
        self.num_live[env_name] += 1
        episode: Episode | None = None
        try:
            with self._running():
                episode = self.placement.make(spec, style)
                observation = await episode.open(item_id, seed)
        except BaseException:
            if episode is not None:
                await episode.close()
            self.num_live[env_name] -= 1
            raise
        session_id = secrets.token_urlsafe(18)
        self._sessions[session_id] = Session(
            session_id=session_id,
            env_name=env_name,
            episode=episode,
            lock=None if episode.is_instant else asyncio.Lock(),
            expires_at_s=self._now_s() + self.lease_s,
        )
        self.counts["created"] += 1
        return session_id, observation

    async def step(self, session_id: str, action: str, seq: int | None = None) -> StepResult:
        """Perform step `seq`, or return its kept answer when it was the last one performed.

        Args:
            session_id: from `create`.
            action: any text.
            seq: counts from 1; None: whatever number is next.

        Raises:
            SessionUnknown, SessionConflict, EnvRaised, EnvTimeout.
        """
        session = self._find(session_id)
        if session.lock is None:
            return await self._step(session, action, seq)
        async with self._alone(session):
            return await self._step(session, action, seq)

    async def _step(self, session: Session, action: str, seq: int | None) -> StepResult:
        if session.answer is not None and seq == session.seq:
            self.counts["repeated"] += 1
            return session.answer
        if seq is not None and seq != session.seq + 1:
            raise SessionConflict(f"seq {seq} does not follow {session.seq}")
        if session.answer is not None and session.answer.done:
            raise SessionConflict(f"the episode ended at seq {session.seq}")
        began_s = time.perf_counter()
        try:
            with self._running():
                session.answer = await session.episode.step(action)
        except EnvError:
            await self._drop(session)
            raise
        session.seq += 1
        self.counts["steps"] += 1
        self.metrics.observe_step(session.env_name, time.perf_counter() - began_s)
        return session.answer

    async def hint(self, session_id: str) -> tuple[list[str], str | None]:
        """Return the valid actions and the expert's action (None when it knows none)."""
        session = self._find(session_id)
        async with self._alone(session):
            try:
                with self._running():
                    return await session.episode.hint()
            except EnvError:
                await self._drop(session)
                raise

    async def render(self, session_id: str) -> tuple[str, str]:
        """Return the state for people and the fingerprint of the initial state."""
        session = self._find(session_id)
        async with self._alone(session):
            try:
                with self._running():
                    return await session.episode.render()
            except EnvError:
                await self._drop(session)
                raise

    async def delete(self, session_id: str) -> None:
        """End a session.

        Raises:
            SessionUnknown: it does not exist (any more).
        """
        session = self._find(session_id)
        async with self._alone(session):
            await self._drop(session)
        self.counts["deleted"] += 1

    async def expire(self) -> int:
        """Drop the sessions whose lease has run out and return how many there were."""
        now_s = self._now_s()
        gone = [
            session
            for session in self._sessions.values()
            if session.expires_at_s <= now_s and not (session.lock and session.lock.locked())
        ]
        self.counts["expired"] += len(gone)
        await asyncio.gather(*(self._drop(session) for session in gone))
        for session_id in [i for i, e in self._ended.items() if e.expires_at_s <= now_s]:
            del self._ended[session_id]
        return len(gone)

    async def watch_leases(self) -> None:
        """Drop expired sessions for ever; end only by cancellation."""
        num_trimmed = 0
        while True:
            await asyncio.sleep(min(self.lease_s / 4, MAX_REAP_INTERVAL_S))
            num_expired = await self.expire()
            num_ended = self.counts["expired"] + self.counts["deleted"]
            if num_ended - num_trimmed >= SESSIONS_PER_TRIM:
                num_trimmed = num_ended
                give_back_memory()
            if num_expired:
                logger.info("sessions expired num=%d left=%d", num_expired, len(self))

    async def drain(self, timeout_s: float) -> None:
        """Refuse new sessions, and return when no call is running or the time is up."""
        self.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()

    async def stop(self) -> None:
        """End all sessions and everything that held them."""
        self.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await asyncio.gather(*(self._drop(each) for each in list(self._sessions.values())))
        await self.placement.stop()

    def _find(self, session_id: str) -> Session:
        """Return a live session and renew its lease."""
        session = self._sessions.get(session_id)
        now_s = self._now_s()
        if session is None or session.expires_at_s <= now_s:
            ended = self._ended.pop(session_id, None)
            if ended is not None:
                raise WorkerLost(ended.failure)
            raise SessionUnknown("no such session, or its lease has expired")
        session.expires_at_s = now_s + self.lease_s
        return session

    @contextlib.asynccontextmanager
    async def _alone(self, session: Session) -> AsyncIterator[None]:
        """Wait for the session's other calls; it may have ended or expired meanwhile."""
        if session.lock is None:
            yield
            return
        async with session.lock:
            self._find(session.session_id)
            yield
            session.expires_at_s = self._now_s() + self.lease_s

    @contextlib.contextmanager
    def _running(self):
        """Count a call into an environment for as long as it runs, and its failure."""
        self._num_running += 1
        self._is_idle.clear()
        try:
            yield
        except EnvTimeout:
            self.counts["timed_out"] += 1
            raise
        except EnvRaised:
            self.counts["failed"] += 1
            raise
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._is_idle.set()

    async def _drop(self, session: Session) -> None:
        """Take a session from the table, then free its place."""
        self._ended.pop(session.session_id, None)
        if self._sessions.pop(session.session_id, None) is None:
            return
        try:
            await session.episode.close()
        finally:
            self.num_live[session.env_name] -= 1

    def _end_sessions_of(self, worker: Worker) -> None:
        """End the sessions of a lost worker; each client learns why at its next request."""
        expires_at_s = self._now_s() + self.lease_s
        for session in [s for s in self._sessions.values() if s.episode.worker is worker]:
            del self._sessions[session.session_id]
            self.num_live[session.env_name] -= 1
            self._ended[session.session_id] = Ended(
                failure=worker.failure, expires_at_s=expires_at_s
            )
