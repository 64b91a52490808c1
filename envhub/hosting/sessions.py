"""The table of live sessions: idle limits, sequence numbers and stored answers for retries."""

import asyncio
import contextlib
import gc
import logging
import secrets
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from common.errors import EnvError, EnvTimeout
from common.formats.action_size import DEFAULT_ACTION_MIB, MIB
from common.host.cgroups import num_cores
from common.host.guardian import Guardian
from common.memory import resident_bytes, trim_heap
from common.text import valid_text
from envhub.catalogue.distances import Distances
from envhub.catalogue.registry import Registry
from envhub.env import EnvSpec, Isolation, StepResult, Style, check_finite
from envhub.errors import (
    CapacityFull,
    EnvRaised,
    HubDraining,
    ServicePaused,
    SessionConflict,
    SessionUnknown,
    StateUnsaved,
    WorkerLost,
)
from envhub.hosting.env_calls import call_environment
from envhub.hosting.episodes import HostedEpisode, LocalEpisode, WorkerEpisode
from envhub.hosting.expiry import ExpiringTable
from envhub.hosting.inline import INLINE_STEP_S, InlineBudget
from envhub.hosting.saved import read_saved, saved_text
from envhub.hosting.session import STEP_BUCKETS_S, Session, SessionLock, empty_histogram
from envhub.hosting.worker import Worker
from envhub.hosting.worker_pool import WorkerPool

logger = logging.getLogger(__name__)


MEMORY_INTERVAL_S = 5.0
MAX_MOVED_WORKERS = 8  # Worker limit of a moved environment, which has no limit of its own.


class EpisodeFactory:
    """Creates episodes by an environment's isolation. Worker pools are created at first use."""

    def __init__(
        self,
        registry: Registry,
        *,
        capacity: int,
        step_timeout_s: float,
        inline_step_s: float = INLINE_STEP_S,
        on_lost: Callable[[Worker], None] = lambda _: None,
    ) -> None:
        """`capacity` is per environment; `on_lost` is called for each lost worker."""
        self.inline = InlineBudget(inline_step_s)
        self._registry = registry
        self._capacity = capacity
        self._step_timeout_s = step_timeout_s
        self._on_lost = on_lost
        self._pools: dict[str, WorkerPool] = {}
        self._guardian: Guardian | None = None
        # Lost workers, by environment and cause.
        self.num_lost: Counter[tuple[str, str]] = Counter()

    def capacity(self, spec: EnvSpec) -> int:
        """Return the maximum number of concurrent sessions of an environment."""
        if spec.isolation is Isolation.INLINE:
            return self._capacity
        return min(self._capacity, spec.max_workers * spec.sessions_per_worker)

    def limiting_key(self, spec: EnvSpec) -> str:
        """Return the key that limits an environment's sessions; "": its code does."""
        is_own = self.capacity(spec) < self._capacity
        return spec.sessions_key if is_own else "envhub.capacity"

    def make(self, spec: EnvSpec, style: Style) -> HostedEpisode:
        """Return a new episode that is not open yet."""
        timeout_s = spec.step_timeout_s or self._step_timeout_s
        if spec.isolation is Isolation.WORKER or not self.inline.is_kept(spec.name):
            return WorkerEpisode(self._pool(spec), style, timeout_s=timeout_s)
        return LocalEpisode(spec, style, self.inline, timeout_s=timeout_s)

    def workers(self) -> list[Worker]:
        return [worker for pool in self._pools.values() for worker in pool.workers]

    def _pool(self, spec: EnvSpec) -> WorkerPool:
        """Return the worker pool of an environment, created at the first use."""
        pool = self._pools.get(spec.name)
        if pool is None:
            self._guardian = self._guardian or Guardian()
            order = self._registry.load_order(spec.name)
            if spec.isolation is Isolation.INLINE:
                num = min(MAX_MOVED_WORKERS, num_cores())
                places = -(-self._capacity // num)
                spec = replace(spec, max_workers=num, sessions_per_worker=places)
            pool = WorkerPool(spec, order, guardian=self._guardian, on_lost=self._count_loss)
            self._pools[spec.name] = pool
        return pool

    def _count_loss(self, worker: Worker) -> None:
        """Count a lost worker and report it."""
        if worker.cause != "stop":
            self.num_lost[worker.env_name, worker.cause] += 1
        self._on_lost(worker)

    async def watch_memory(self) -> None:
        """Replace workers that exceed their memory limit; only cancellation ends this loop."""
        while True:
            await asyncio.sleep(MEMORY_INTERVAL_S)
            await self.check_memory()

    async def check_memory(self) -> None:
        """Measure all workers, and replace those above their limit."""
        workers = self.workers()
        if not workers:
            return
        resident = await asyncio.to_thread(resident_bytes, [each.pid for each in workers])
        for pool in self._pools.values():
            pool.check_memory(resident)

    async def stop(self) -> None:
        """Stop the workers, and the resources that environments share in this process."""
        stops = [pool.stop() for pool in self._pools.values()]
        for spec in self._registry.loaded():
            if spec.isolation is not Isolation.WORKER and spec.stop is not None:
                stops.append(_stop_environment(spec, spec.stop))
        self.inline.stop()
        await asyncio.gather(*stops)
        if self._guardian is not None:
            self._guardian.close()
            self._guardian = None


async def _stop_environment(spec: EnvSpec, stop: Callable[[], Awaitable[None]]) -> None:
    """Release the resources that an environment shares. A failure is only logged."""
    try:
        await call_environment(spec.name, stop, timeout_s=spec.stop_timeout_s)
    except EnvError as error:
        logger.warning("environment did not stop reason=%s", error)


PROBE_S = 2.0  # Seconds between two probes of a service that does not answer.
PROBE_TIMEOUT_S = 60.0
REASON_CHARS = 300


class Services:
    """The environments that are paused, with the reasons.

    consumes:   `pause`, after an episode failed because its service did not answer
    waits for:  the probes of the paused environments, `PROBE_TIMEOUT_S` at most
    Example: an episode fails because its judge is down. Its environment is paused, so `check`
    raises. The judge is probed every `PROBE_S`. Once it answers, sessions are opened again. Other
    environments are not affected.
    """

    def __init__(self, registry: Registry, *, probe_every_s: float = PROBE_S) -> None:
        self._registry = registry
        self._probe_every_s = probe_every_s
        self.paused: dict[str, str] = {}  # Environment -> reason.

    @property
    def names(self) -> list[str]:
        """The environments that need a service."""
        return [
            name for name in self._registry.names if self._registry.spec(name).service is not None
        ]

    def check(self, env_name: str) -> None:
        """Raise ServicePaused if the environment is paused."""
        if (reason := self.paused.get(env_name)) is not None:
            raise ServicePaused(reason)

    def pause(self, env_name: str, reason: str) -> None:
        """Pause an environment until its service answers; no effect without `EnvSpec.service`."""
        if self._registry.spec(env_name).service is None:
            return
        if env_name not in self.paused:
            logger.warning("environment paused env=%s reason=%s", env_name, reason)
        self.paused[env_name] = reason[:REASON_CHARS]

    async def watch(self) -> None:
        """Probe all services once, then those of paused environments; cancellation ends this."""
        await asyncio.gather(*(self._probe(name) for name in self.names))
        while True:
            await asyncio.sleep(self._probe_every_s)
            await asyncio.gather(*(self._probe(name) for name in list(self.paused)))

    async def _probe(self, env_name: str) -> None:
        """Pause or resume an environment by a probe of its service."""
        service = self._registry.spec(env_name).service
        assert service is not None
        try:
            reason = str(await call_environment(env_name, service, timeout_s=PROBE_TIMEOUT_S))
        except EnvError as error:
            reason = str(error)
        if reason:
            self.pause(env_name, reason)
        elif self.paused.pop(env_name, None) is not None:
            logger.warning("environment resumed env=%s", env_name)


ASLEEP_S = 3.0  # A longer gap between two readings, due every second, is a suspension.


class AwakeClock:
    """Monotonic seconds without the time in which this process was suspended.

    A suspension is detected as a gap between two readings. Read the clock at least once a second.

    Example: readings at 1 s and 2 s, then SIGSTOP for a minute and SIGCONT. The next reading is
    still 2 s, so a deadline that was a minute away is still a minute away.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        """Start the clock at the current value of `now_s`."""
        self._now_s = now_s
        self._read_at = now_s()
        self._slept_s = 0.0

    def __call__(self) -> float:
        """Return the seconds without suspensions."""
        now_s = self._now_s()
        rest_s = now_s - self._read_at
        self._read_at = now_s
        if rest_s > ASLEEP_S:
            self._slept_s += rest_s
        return now_s - self._slept_s


T = TypeVar("T")

# Upper bound of the interval, since `AwakeClock` must be read once a second.
MAX_WATCH_INTERVAL_S = 1.0
# Ended sessions after which free memory is returned to the operating system.
SESSIONS_PER_TRIM = 200
STOP_TIMEOUT_S = 1.0
MAX_SESSIONS = 16_384
MOST_CHARACTER_BYTES = 4  # Maximum bytes of a character in UTF-8.
GONE_S = 1.0  # Time in which an owner may reconnect after its connection broke.


class Sessions:
    """Sessions by random token. All methods belong to one event loop.

    Only this class changes the state of a session. A place is reserved, and the session is live
    once its episode is open. It ends by `delete`, by a call that fails or times out, by its idle
    limit, or with its worker process; in the last case the next request gets the reason. Calls of
    one session are serialized; calls of different sessions run concurrently.

    Example: step seq 1 runs the environment. Its answer is lost in transit. The client sends seq 1
    again and gets the stored answer; no step runs. If both requests overlap, the second waits for
    the first and gets the same answer. Seq 2 runs the next step; then seq 1 or 9 is a conflict.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        idle_s: float,
        capacity: int,
        step_timeout_s: float,
        now_s: Callable[[], float] | None = None,
        max_sessions: int = MAX_SESSIONS,
        inline_step_s: float = INLINE_STEP_S,
        max_action_bytes: int = DEFAULT_ACTION_MIB * MIB,
    ) -> None:
        """`capacity` is per environment, `max_sessions` over all; larger actions are invalid.

        `now_s` is a monotonic clock; None: a clock that excludes suspension of this process.
        """
        # A bound method is faster to call than an object.
        now_s = self.now_s = now_s or AwakeClock().__call__
        self._max_sessions = max_sessions
        self._max_action_bytes = max_action_bytes
        self.idle_s = idle_s
        self.is_draining = False
        # Reserved places by environment, including sessions that are opening.
        self.num_live: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()  # Sessions and calls by outcome.
        self.steps = defaultdict[str, list[float]](
            empty_histogram
        )  # Step durations by environment.
        self.placement = EpisodeFactory(
            registry,
            capacity=capacity,
            step_timeout_s=step_timeout_s,
            inline_step_s=inline_step_s,
            on_lost=self._end_sessions_of,
        )
        self.registry, self.distances = registry, Distances(registry)
        self.services = Services(registry)
        self._live: ExpiringTable[str, Session] = ExpiringTable(idle_s, now_s)
        # Reasons of lost workers that clients have not received yet.
        self._unreported: ExpiringTable[str, str] = ExpiringTable(idle_s, now_s)
        self._unsaved: set[str] = set()  # Environments with a state that could not be saved.
        self._num_running = 0
        self._owners: Counter[str] = Counter()  # Open connections by owner.
        # Timers that end the sessions of owners without a connection.
        self._leaving: dict[str, asyncio.TimerHandle] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def __len__(self) -> int:
        return len(self._live)

    @property
    def num_steps(self) -> int:
        """Number of steps that were performed."""
        return sum(int(sum(nums)) for _, *nums in self.steps.values())

    @property
    def env_names(self) -> list[str]:
        """The names of the environments on offer, as tasks use them."""
        return [*self.registry.names]

    @property
    def num_places(self) -> int:
        """Maximum number of concurrent sessions, over all environments."""
        specs = (self.registry.spec(name) for name in self.env_names)
        return min(self._max_sessions, sum(self.placement.capacity(spec) for spec in specs))

    async def create(
        self,
        env_name: str,
        item_id: str,
        *,
        seed: int = 0,
        style: Style = Style.COMPACT,
        owner: str = "",
    ) -> tuple[str, str]:
        """Start an episode and return its session id and first observation.

        Raises: UnknownEnv, UnknownItem, CapacityFull, HubDraining, EnvRaised, EnvTimeout.
        """
        if self.is_draining:
            raise HubDraining("the hub is stopping and accepts no new sessions")
        spec = self.registry.spec(env_name)
        self.services.check(env_name)
        item_id = await self.distances.plain(env_name, item_id)
        async with contextlib.AsyncExitStack() as undo:
            self._reserve(spec)
            undo.callback(self._release, env_name)
            episode = self.placement.make(spec, style)
            undo.push_async_callback(episode.close)
            with self._running(env_name):
                observation = await episode.open(item_id, seed)
                try:
                    check_finite("first_messages", episode.first_messages)
                    check_finite("item_tools", episode.item_tools)
                except ValueError as error:
                    raise EnvRaised(f"{env_name}: {error}") from error
            undo.pop_all()
        session_id = secrets.token_urlsafe(18)
        lock = None if episode.is_instant else asyncio.Lock()
        session = Session(
            session_id=session_id,
            env_name=env_name,
            item_id=item_id,
            seed=seed,
            style=style,
            episode=episode,
            lock=lock,
            owner=owner,
        )
        self._live.put(session_id, session)
        self.counts["created"] += 1
        return session_id, self._valid(env_name, observation)

    async def step(
        self, session_id: str, action: str, seq: int | None = None, *, num_bytes: int = 0
    ) -> StepResult:
        """Perform step `seq`, or return its stored answer if it was the last one performed.

        Args:
            action: any text; an oversized action is invalid and does not reach the environment.
            seq: counts from 1; None: the next number.
            num_bytes: size of an action that was too large for a request; `action` is then unused.

        Raises: SessionUnknown, SessionConflict, EnvRaised, EnvTimeout.
        """
        async with self._exclusive(session_id) as session:
            if (stored := self._kept(session, seq)) is not None:
                return stored
            if not num_bytes and len(action) * MOST_CHARACTER_BYTES > self._max_action_bytes:
                size = len(action.encode(errors="replace"))
                num_bytes = size if size > self._max_action_bytes else 0
            if num_bytes:
                return self._stepped(session, self._refusal(session, num_bytes), 0.0)
            began_s = time.perf_counter()
            result = await self._call(session, session.episode.step(action))
            return self._stepped(session, result, time.perf_counter() - began_s)

    def _refusal(self, session: Session, num_bytes: int) -> StepResult:
        """Return the answer to an oversized action; state and score stay unchanged."""
        before = session.answer
        self.counts["too_large"] += 1
        num_seats = self.registry.spec(session.env_name).seats
        seats: dict[str, Any] = {}
        if num_seats > 1:  # The same seat moves again.
            seats["seat"] = 0 if before is None else before.seat
            seats["seat_rewards"] = [0.0] * num_seats if before is None else before.seat_rewards
        return StepResult(
            observation=f"Invalid action: it has {num_bytes} bytes, more than an action may have.",
            reward=self.start_score(session.env_name) if before is None else before.reward,
            done=False,
            is_valid=False,
            state=session.episode.first_state if before is None else before.state,
            **seats,
        )

    def _kept(self, session: Session, seq: int | None) -> StepResult | None:
        """Return the stored answer if the last step is requested again; None: a new step.

        Raises: SessionConflict: the number does not follow, or the episode has ended.
        """
        if session.answer is not None and seq == session.seq:
            self.counts["repeated"] += 1
            return session.answer
        if seq is not None and seq != session.seq + 1:
            raise SessionConflict(f"seq {seq} does not follow {session.seq}")
        if session.answer is not None and session.answer.done:
            raise SessionConflict(f"the episode ended at seq {session.seq}")
        return None

    def _stepped(self, session: Session, result: StepResult, took_s: float) -> StepResult:
        """Store and count the result of a step."""
        observed = result.observation
        if type(observed) is not str or not observed.isascii():
            result.observation = self._valid(session.env_name, observed)
        session.answer = result
        session.seq += 1
        steps = self.steps[session.env_name]
        steps[0] += took_s
        steps[1 + bisect_left(STEP_BUCKETS_S, took_s)] += 1
        return result

    def first_state(self, session_id: str) -> str:
        """Return the state in which a session began; "" if its environment has no states."""
        session = self._live.find(session_id)
        return session.episode.first_state if session is not None else ""

    def item_tools(self, session_id: str) -> list[dict[str, Any]]:
        """Return the tools of a session's item; [] if all items have the environment's tools."""
        session = self._live.find(session_id)
        return session.episode.item_tools if session is not None else []

    def first_messages(self, session_id: str) -> list[dict[str, Any]]:
        """Return the messages before the first observation of a session; [] if there are none."""
        session = self._live.find(session_id)
        return session.episode.first_messages if session is not None else []

    def can_save(self, session_id: str) -> bool:
        """Return whether the environment of a session can save its episode."""
        session = self._live.find(session_id)
        return session is not None and session.episode.can_save

    async def save(self, session_id: str) -> str:
        """Return the state of a session, for `load` of a new session of the same item and seed.

        Raises:
            StateUnsaved: the environment cannot save it, or it is too large. The session continues.
            SessionUnknown, EnvTimeout, WorkerLost: as for a step.
        """
        async with self._exclusive(session_id) as session:
            if not session.episode.can_save:
                raise StateUnsaved(f"{session.env_name} has no save() and load()")
            if session.answer is not None and session.answer.done:
                raise StateUnsaved("the episode has ended")
            began_s = time.perf_counter()
            self._begin_call()
            try:
                state = await session.episode.save()
            except (WorkerLost, EnvTimeout) as error:
                self._note_failure(session.env_name, error)
                await self._drop(session)
                raise
            except (EnvRaised, StateUnsaved) as error:
                self._note_unsaved(session.env_name, error)
                raise StateUnsaved(str(error)) from error
            finally:
                self._end_call()
            saved = saved_text(session.identity, session.answer, state)
            self.counts["saved"] += 1
            self.counts["saved_bytes"] += len(saved)
            self.counts["saved_us"] += int(1e6 * (time.perf_counter() - began_s))
            return saved

    async def load(self, session_id: str, saved: str) -> None:
        """Bring a session without a step into a saved state; its next step has seq 1.

        Raises:
            BadState: the state is damaged or of another episode. The session continues.
            SessionConflict: a step was performed before.
            StateUnsaved: the environment has no `load`.
            SessionUnknown, EnvRaised, EnvTimeout: the environment could not load the state.
        """
        async with self._exclusive(session_id) as session:
            if session.seq:
                raise SessionConflict(f"seq {session.seq}: a state is loaded before the first step")
            if not session.episode.can_save:
                raise StateUnsaved(f"{session.env_name} has no save() and load()")
            state, answer = read_saved(session.identity, saved)
            await self._call(session, session.episode.load(state))
            session.answer = answer
            self.counts["loaded"] += 1

    def _note_unsaved(self, env_name: str, error: Exception) -> None:
        """Count a state that could not be saved; log the first one of each environment."""
        self.counts["unsaved"] += 1
        if env_name not in self._unsaved:
            self._unsaved.add(env_name)
            logger.warning("state not saved env=%s reason=%s", env_name, error)

    def start_score(self, env_name: str) -> float:
        """Return the score of an episode before its first step. Raises: UnknownEnv."""
        return self.registry.spec(env_name).start_score

    async def hint(self, session_id: str) -> tuple[list[str], str | None]:
        """Return the valid actions and the expert's action (None when the expert has no plan)."""
        async with self._exclusive(session_id) as session:
            return await self._call(session, session.episode.hint())

    async def render(self, session_id: str) -> tuple[str, str]:
        """Return the state as text for people, and the fingerprint of the initial state."""
        async with self._exclusive(session_id) as session:
            return await self._call(session, session.episode.render())

    async def detail(self, session_id: str, what: str) -> Any:
        """Return JSON for AgentGym's pages; None where the environment has none."""
        async with self._exclusive(session_id) as session:
            return await self._call(session, session.episode.detail(what))

    async def delete(self, session_id: str) -> None:
        """End a session. Raises: SessionUnknown: it does not exist, or no longer exists."""
        async with self._exclusive(session_id) as session:
            await self._drop(session)
        self.counts["deleted"] += 1

    @contextlib.contextmanager
    def owned_by(self, owner: str) -> Iterator[None]:
        """End the owner's sessions `GONE_S` after the owner's last context has closed."""
        self._owners[owner] += 1
        if (timer := self._leaving.pop(owner, None)) is not None:
            timer.cancel()
        try:
            yield
        finally:
            self._owners[owner] -= 1
            if not self._owners[owner]:
                del self._owners[owner]
                if not self.is_draining:
                    loop = asyncio.get_running_loop()
                    self._leaving[owner] = loop.call_later(GONE_S, self._end_owned, owner)

    def _end_owned(self, owner: str) -> None:
        """End the sessions of an owner that did not come back within `GONE_S`."""
        del self._leaving[owner]
        owned = [each for each in self._live if each.owner == owner]
        if not owned:
            return
        self.counts["abandoned"] += len(owned)
        logger.warning("closing sessions of a lost owner owner=%s sessions=%d", owner, len(owned))
        for session in owned:
            task = asyncio.get_running_loop().create_task(self._drop(session))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def expire(self) -> int:
        """Drop the sessions that are idle for too long and return their number."""
        gone = self._live.pop_expired(keeps=lambda session: session.is_busy)
        self.counts["expired"] += len(gone)
        await asyncio.gather(*(self._close(session) for session in gone))
        self._unreported.pop_expired()
        return len(gone)

    async def watch_idle(self) -> None:
        """Drop expired sessions periodically; only cancellation ends this loop."""
        num_trimmed = 0
        while True:
            await asyncio.sleep(min(self.idle_s / 4, MAX_WATCH_INTERVAL_S))
            num_expired = await self.expire()
            num_ended = self.counts["expired"] + self.counts["deleted"]
            if num_ended - num_trimmed >= SESSIONS_PER_TRIM:
                num_trimmed = num_ended
                # Levels are full of cycles; collecting them also clears the free lists.
                gc.collect()
                trim_heap()
            if num_expired:
                logger.info("sessions expired num=%d left=%d", num_expired, len(self))

    async def drain(self, timeout_s: float) -> None:
        """Refuse new sessions, and return when no call is running or the timeout has passed."""
        self.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()

    async def stop(self) -> None:
        """End all sessions, then the workers."""
        self.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await asyncio.gather(*(self._drop(each) for each in self._live))
        await self.placement.stop()

    def _valid(self, env_name: str, text: str) -> str:
        """Return an observation that JSON and UTF-8 can encode, and count each repair."""
        valid = valid_text(str(text))
        if valid is not text and valid != text:
            self.counts["repaired"] += 1
            if self.counts["repaired"] == 1:
                logger.warning("repaired unpaired surrogates in an observation env=%s", env_name)
        return valid

    def _reserve(self, spec: EnvSpec) -> None:
        """Reserve a place for a session. Raises CapacityFull."""
        if self.num_live.total() >= self._max_sessions:
            self.counts["refused"] += 1
            text = "all sessions of the hub are in use"
            raise CapacityFull(f"{text} (envhub.max_sessions={self._max_sessions})")
        capacity = self.placement.capacity(spec)
        if self.num_live[spec.name] >= capacity:
            self.counts["refused"] += 1
            key = self.placement.limiting_key(spec)
            text = f"{spec.name}: all sessions are in use, at most {capacity}"
            raise CapacityFull(f"{text} ({key})" if key else text)
        self.num_live[spec.name] += 1

    def _release(self, env_name: str) -> None:
        """Free a session's place."""
        self.num_live[env_name] -= 1

    def _find(self, session_id: str) -> Session:
        """Return a live session and restart its idle time."""
        session = self._live.find(session_id)
        if session is not None:
            return session
        failure = self._unreported.pop(session_id)
        if failure is not None:
            raise WorkerLost(failure)
        raise SessionUnknown("no such session, or it was idle for too long")

    def _exclusive(self, session_id: str) -> SessionLock:
        """Return a lock that waits for other calls; the session may end during the wait."""
        return SessionLock(self._find, self._live.renew, session_id)

    async def _call(self, session: Session, call: Awaitable[T]) -> T:
        """Return the result of an episode's call; a failure or a timeout ends the session."""
        self._begin_call()
        try:
            return await call
        except EnvError as error:
            self._note_failure(session.env_name, error)
            await self._drop(session)
            raise
        finally:
            self._end_call()

    @contextlib.contextmanager
    def _running(self, env_name: str) -> Iterator[None]:
        """Count a call into an environment while it runs, and its failure."""
        self._begin_call()
        try:
            yield
        except EnvError as error:
            self._note_failure(env_name, error)
            raise
        finally:
            self._end_call()

    def _begin_call(self) -> None:
        """Count a running call."""
        self._num_running += 1
        self._is_idle.clear()

    def _end_call(self) -> None:
        """Count the end of a call into an environment."""
        self._num_running -= 1
        if not self._num_running:
            self._is_idle.set()

    def _note_failure(self, env_name: str, error: EnvError) -> None:
        """Count a failure of an environment; pause it if its service is down."""
        if isinstance(error, EnvTimeout):
            self.counts["timed_out"] += 1
        elif isinstance(error, ServicePaused):
            self.counts["paused"] += 1
            self.services.pause(env_name, str(error))
        elif isinstance(error, EnvRaised):
            self.counts["failed"] += 1

    async def _drop(self, session: Session) -> None:
        """End a session whose client is informed; no effect if it has ended already."""
        self._unreported.pop(session.session_id)
        if self._live.pop(session.session_id) is not None:
            await self._close(session)

    async def _close(self, session: Session) -> None:
        """Close the episode of a session that is no longer live, and free its place."""
        try:
            await session.episode.close()
        finally:
            self._release(session.env_name)

    def _end_sessions_of(self, worker: Worker) -> None:
        """End the sessions of a lost worker; each client gets the reason at its next request."""
        for session in [each for each in self._live if each.episode.worker is worker]:
            self._live.pop(session.session_id)
            self._release(session.env_name)
            self._unreported.put(session.session_id, worker.failure)
