"""The table of live sessions: leases, sequence numbers and answers kept for a retry."""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from envhub.env import Env, StepResult, Style, UnknownItem
from envhub.registry import Registry

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_REAP_INTERVAL_S = 5.0


class SessionUnknown(LookupError):
    """No such session: never made, deleted, dropped after a failure, or its lease ran out."""


class SessionConflict(RuntimeError):
    """The step does not follow the last one, or the episode has already ended."""


class CapacityFull(RuntimeError):
    """The environment already has as many sessions as it may have."""


class EnvRaised(RuntimeError):
    """The environment's own code failed; the session is gone."""


class EnvTimeout(RuntimeError):
    """A call took longer than its deadline; the session is gone."""


@dataclass(slots=True, kw_only=True)
class Session:
    """One live episode. `seq` counts executed steps; `answer` is the last one's result."""

    env_name: str
    env: Env
    expires_at_s: float
    seq: int = 0
    answer: StepResult | None = None


class Sessions:
    """Sessions by random token.

    Environments run in the caller's thread, one call at a time, so a step is atomic and needs no
    lock. A call that overruns `step_timeout_s` cannot be interrupted: it is noticed when it
    returns, and its session is dropped. Only environments that are quick belong here.

    Example: step seq 1 runs the environment. Its answer is lost on the way; the client sends seq 1
    again and gets the kept answer, nothing runs. Seq 2 runs the next step; 1 or 9 now conflicts.
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
        self._lease_s = lease_s
        self._capacity = capacity
        self._step_timeout_s = step_timeout_s
        self._now_s = now_s
        self._sessions: dict[str, Session] = {}
        self._num_live: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._sessions)

    def create(self, env_name: str, item_id: str, *, seed: int, style: Style) -> tuple[str, str]:
        """Starts an episode and returns its session id and first observation.

        Raises:
            UnknownEnv, UnknownItem: the name or the item does not exist.
            CapacityFull: try again later.
            EnvRaised, EnvTimeout: the environment failed.
        """
        spec = self._registry.spec(env_name)
        if self._num_live[env_name] >= self._capacity:
            self.counts["refused"] += 1
            raise CapacityFull(f"{env_name} has all its {self._capacity} sessions in use")
        env = self._guard(lambda: spec.make(style))
        observation = self._guard(lambda: env.reset(item_id, seed))
        session_id = secrets.token_urlsafe(18)
        expires_at_s = self._now_s() + self._lease_s
        self._sessions[session_id] = Session(env_name=env_name, env=env, expires_at_s=expires_at_s)
        self._num_live[env_name] += 1
        self.counts["created"] += 1
        return session_id, observation

    def step(self, session_id: str, action: str, seq: int) -> StepResult:
        """Performs step `seq`, or returns its kept answer when it was the last one performed.

        Raises:
            SessionUnknown, SessionConflict, EnvRaised, EnvTimeout.
        """
        session = self._find(session_id)
        if session.answer is not None and seq == session.seq:
            self.counts["repeated"] += 1
            return session.answer
        if seq != session.seq + 1:
            raise SessionConflict(f"seq {seq} does not follow {session.seq}")
        if session.answer is not None and session.answer.done:
            raise SessionConflict(f"the episode ended at seq {session.seq}")
        session.answer = self._call(session_id, lambda: session.env.step(action))
        session.seq = seq
        self.counts["steps"] += 1
        return session.answer

    def hint(self, session_id: str) -> tuple[list[str], str | None]:
        """Returns the valid actions and the expert's action (None when it knows none)."""
        env = self._find(session_id).env
        return self._call(session_id, lambda: (env.valid_actions(), env.expert_action()))

    def render(self, session_id: str) -> tuple[str, str]:
        """Returns the state for people and the fingerprint of the initial state."""
        env = self._find(session_id).env
        return self._call(session_id, lambda: (env.render(), env.fingerprint()))

    def delete(self, session_id: str) -> None:
        """Ends a session.

        Raises:
            SessionUnknown: it does not exist (any more).
        """
        self._find(session_id)
        self._drop(session_id)
        self.counts["deleted"] += 1

    def expire(self) -> int:
        """Drops the sessions whose lease has run out and returns how many there were."""
        now_s = self._now_s()
        gone = [i for i, s in self._sessions.items() if s.expires_at_s <= now_s]
        for session_id in gone:
            self._drop(session_id)
        self.counts["expired"] += len(gone)
        return len(gone)

    async def reap(self) -> None:
        """Drops expired sessions for ever; ends only by cancellation."""
        while True:
            await asyncio.sleep(min(self._lease_s / 4, MAX_REAP_INTERVAL_S))
            num_expired = self.expire()
            if num_expired:
                logger.info("sessions expired num=%d left=%d", num_expired, len(self))

    def _find(self, session_id: str) -> Session:
        """Returns a live session and renews its lease."""
        session = self._sessions.get(session_id)
        now_s = self._now_s()
        if session is None or session.expires_at_s <= now_s:
            raise SessionUnknown("no such session, or its lease has expired")
        session.expires_at_s = now_s + self._lease_s
        return session

    def _drop(self, session_id: str) -> None:
        session = self._sessions.pop(session_id)
        self._num_live[session.env_name] -= 1

    def _call(self, session_id: str, work: Callable[[], T]) -> T:
        """Runs an environment call of a session, which is dropped when the call fails."""
        try:
            return self._guard(work)
        except (EnvRaised, EnvTimeout):
            self._drop(session_id)
            raise

    def _guard(self, work: Callable[[], T]) -> T:
        """Runs environment code, which may raise anything and take any time."""
        began_s = time.perf_counter()
        try:
            result = work()
        except UnknownItem:
            raise
        except Exception as error:  # one session's failure never touches another
            self.counts["failed"] += 1
            logger.exception("environment raised")
            raise EnvRaised(f"the environment raised {type(error).__name__}: {error}") from error
        took_s = time.perf_counter() - began_s
        if took_s > self._step_timeout_s:
            self.counts["timed_out"] += 1
            raise EnvTimeout(f"took {took_s:.2f} s of at most {self._step_timeout_s:g} s")
        return result
