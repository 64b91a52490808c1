"""Pool of all hubs of a run: spreads sessions over the hubs that serve an environment."""

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from actor.rollout.env_client import Environments, HubClient, HubSession, OnFull
from common.config.actor import ActorSection
from common.errors import EnvError, EnvPaused, HubFull, HubLost
from common.wire.messages import HubPlace

logger = logging.getLogger(__name__)

PROBE_EVERY_S = 0.5  # Seconds between two polls of a lost hub.
WARN_EVERY_S = 10.0  # Seconds between two warnings that no hub serves an environment.
FULL_EVERY_S = 60.0  # Seconds between two warnings that an environment has no free session.
PAUSE_S = 2.0  # Seconds between two openings of a paused environment.
PAUSE_GRACE_S = 8.0  # Seconds after a pause in which no new work of the environment is requested.
AVOID_S = 5.0  # Seconds for which a hub that failed to open a session is tried last.


class Hubs:
    """The hubs that the scheduler reports. A session stays with the hub that opened it.

    Example: a and b serve babyai -> episodes are opened at a and b in turn. When b crashes, its
    episodes are opened again at a. When a crashes too, both are polled twice a second. Until one
    answers, no session is opened and no work is requested. If both stay away for longer than an
    episode may take, all later openings fail.
    """

    def __init__(
        self,
        places: Callable[[], list[HubPlace]],
        cfg: ActorSection,
        *,
        style: str,
        owner: str = "",
    ) -> None:
        """Create the pool without connecting.

        Args:
            places: returns the current addresses of the hubs.
            cfg: its `episode_timeout_s` is also the longest wait for an environment that no hub
                serves.
            owner: names this process; the hub closes its sessions when the process ends in any way.
        """
        self._outage_s = cfg.episode_timeout_s
        # environment -> time of the last warning that it has no free session
        self._full_at: dict[str, float] = {}
        # environment -> the time since which no hub serves it
        self._away_since: dict[str, float] = {}
        self._places = places
        self._owner = owner
        self._lost: dict[str, str] = {}  # url -> reason; these hubs are polled
        self._tasks: set[asyncio.Task[None]] = set()
        self._style = style
        self._timeout_s = cfg.env_timeout_s
        self._known: dict[tuple[str, str], Environments] = {}  # (url, token) -> environments
        self._instructions: dict[str, dict[str, str]] = {}  # environment -> style -> text
        # environment -> style -> the agent's answer to the instruction
        self._answers: dict[str, dict[str, str]] = {}
        self._tools: dict[str, list[Any]] = {}  # environment -> its tools
        self._failed_at: dict[str, float] = {}  # url -> time of the last failed opening
        self._num_opened: Counter[str] = Counter()  # url -> number of opened sessions
        # environment -> (end of its pause, reason)
        self._pauses: dict[str, tuple[float, str]] = {}
        self._connecting = asyncio.Lock()

    async def start(self, *, timeout_s: float = 0.0) -> None:
        """Connect to the reported hubs.

        Raises: EnvError: no hub answers within `timeout_s`.
        """
        try:
            await self._connect_all()
        except HubLost:
            if not timeout_s:
                raise
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.wait_for()
            await self._connect_all()

    async def _connect_all(self) -> None:
        """Connect to all reported hubs. Raises: EnvError: no hub could be reached."""
        failure: EnvError | None = None
        for place in self._places():
            try:
                await self._connect(place)
            except HubLost as error:
                failure = error
                self.lose(place, error)
            except EnvError as error:
                failure = error
                logger.warning("hub does not answer url=%s reason=%s", place.url, error)
        if not self._known and failure is not None:
            raise failure

    def instruction(self, env: str) -> str:
        """Return the text before the first observation; "" if there is none."""
        return self._instructions.get(env, {}).get(self._style, "")

    def acknowledgement(self, env: str) -> str:
        """Return the agent's fixed answer to the instruction; "" if both texts are one message."""
        return self._answers.get(env, {}).get(self._style, "")

    def opponent_texts(self, env: str) -> dict[str, str]:
        """Return the instruction of each style; {} if observations have AgentGym's wording."""
        return {} if self._style == "agentgym" else self._instructions.get(env, {})

    def tools(self, env: str) -> list[Any]:
        """Return an environment's tools; [] if its actions are texts."""
        return self._tools.get(env, [])

    def num_places(self, env: str) -> float:
        """Return the maximum number of an environment's sessions at all hubs that serve it.

        It is infinite while a hub has not reported its number.
        """
        return sum(
            known.num_places.get(env, math.inf)
            if (known := self._known.get((place.url, place.token))) is not None
            else math.inf
            for place in self._places()
            if env in place.envs
        )

    async def open(
        self, env: str, item_id: str, *, seed: int, on_full: Callable[[], None] | None = None
    ) -> HubSession:
        """Start an episode at a hub that serves it; try the next hub if that one fails.

        While hubs have no free session, it waits: the episode's own deadline limits the wait.

        Args:
            on_full: called whenever a hub has no free session.

        Raises:
            HubLost: no hub that serves the environment answers; see `wait_for`.
            EnvError, EnvTimeout: the last hub failed, or no hub serves the environment.
        """
        note = partial(self._note_full, env, on_full)
        while True:
            try:
                return await self._open_once(env, item_id, seed=seed, on_full=note)
            except HubFull as error:
                logger.warning("still waiting for a session env=%s reason=%s", env, error)

    def _note_full(self, env: str, on_full: Callable[[], None] | None, reason: str) -> None:
        """Warn that an episode waits for a session, once in a while."""
        now = time.monotonic()
        if now - self._full_at.get(env, -math.inf) > FULL_EVERY_S:
            self._full_at[env] = now
            logger.warning("episodes wait for a free session env=%s reason=%s", env, reason)
        if on_full is not None:
            on_full()

    async def _open_once(self, env: str, item_id: str, *, seed: int, on_full: OnFull) -> HubSession:
        """Try each hub once; see `open`. Raises: HubFull: a hub had no free session."""
        failure = EnvError(f"no hub serves {env}")
        full: HubFull | None = None
        for place in self._in_order(env):
            try:
                environments = await self._connect(place)
                self._num_opened[place.url] += 1
                session = await environments.open(env, item_id, seed=seed, on_full=on_full)
                self._pauses.pop(env, None)
                return session
            except HubFull as error:
                full = error
            except EnvPaused as error:
                failure = error
            except HubLost as error:
                failure = error
                self.lose(place, error)
            except EnvError as error:
                failure = error
                self._failed_at[place.url] = time.monotonic()
                logger.warning(
                    "failed to open session url=%s env=%s reason=%s", place.url, env, error
                )
        if full is not None:  # It works, also if the others do not.
            raise full
        if isinstance(failure, EnvPaused):
            self.pause(env, failure)
        raise failure

    def pause(self, env: str, reason: EnvPaused) -> None:
        """Open no session of an environment for a while, because a service that it needs is down.

        Each failed opening extends the pause. After it, one more opening is tried.
        """
        self._pauses[env] = (time.monotonic() + PAUSE_S, str(reason))

    def _is_paused(self, env: str, *, grace_s: float = 0.0) -> bool:
        """Return whether an environment is paused, or was until `grace_s` ago."""
        return time.monotonic() < self._pauses.get(env, (-math.inf, ""))[0] + grace_s

    @property
    def waiting_for(self) -> str:
        """The reason why no environment is available; "" if at least one is."""
        places = self._places()
        served = {env for place in places for env in place.envs}
        if served and all(self._is_paused(env, grace_s=PAUSE_GRACE_S) for env in served):
            return f"envhub: {self._pauses[min(served)][1]}"
        if any(place.url not in self._lost for place in places):
            return ""
        return (
            f"envhub: {places[0].url} does not answer" if places else "envhub: no hub is registered"
        )

    @property
    def num_in_flight(self) -> int:
        """Number of requests that no hub has answered yet."""
        num_requests = sum(each.hub.num_in_flight for each in self._known.values())
        return num_requests + self._connecting.locked()  # A new hub's catalogue is fetched.

    async def wait_for(self, env: str | None = None) -> None:
        """Wait until a hub that serves `env` answers; None: any hub. Return early if it `is_gone`.

        Logs a warning every `WARN_EVERY_S`.
        """
        warned_at = time.monotonic()
        while not self._is_served(env):
            if all(map(self.is_gone, [env] if env else self._instructions or [""])):
                return
            if time.monotonic() - warned_at > WARN_EVERY_S:
                warned_at = time.monotonic()
                logger.warning("still waiting for a hub env=%s reasons=%s", env, self._lost)
            await asyncio.sleep(PROBE_EVERY_S)

    def _is_served(self, env: str | None) -> bool:
        """Return whether a hub that serves `env` answers; None: any hub."""
        if env and self._is_paused(env):
            return False
        return any(
            place.url not in self._lost and (not env or env in place.envs)
            for place in self._places()
        )

    def is_gone(self, env: str) -> bool:
        """Return whether an environment has had no hub for longer than `episode_timeout_s`."""
        if self._is_served(env) or self._is_paused(env):
            self._away_since.pop(env, None)
            return False
        since = self._away_since.setdefault(env, time.monotonic())
        return time.monotonic() - since > self._outage_s

    def absent(self) -> list[str]:
        """Return the environments that have no hub now and are still waited for."""
        return [env for env in sorted(self._instructions) if self._is_absent(env)]

    def _is_absent(self, env: str) -> bool:
        """Return whether an environment has no hub now, but may have one soon."""
        # The episodes that wait for a paused environment try it before new ones are requested.
        if self._is_paused(env, grace_s=PAUSE_GRACE_S):
            return True
        return not self._is_served(env) and not self.is_gone(env)

    def is_lost(self, env: str) -> bool:
        """Return whether no hub serves the environment, or a hub that serves it does not answer."""
        serving = [place for place in self._places() if env in place.envs]
        return not serving or any(place.url in self._lost for place in serving)

    def lose(self, place: HubPlace, reason: HubLost) -> None:
        """Mark a hub as lost: it gets no sessions until it answers."""
        if place.url in self._lost:
            return
        self._lost[place.url] = str(reason)
        self._start_task(self._poll_lost(place))

    async def _poll_lost(self, place: HubPlace) -> None:
        """Poll a hub until it answers or the scheduler no longer reports it."""
        since = time.monotonic()
        hub = HubClient(place.url, token=place.token or None, timeout_s=self._timeout_s)
        try:
            while not await hub.answers():
                if place.url not in [each.url for each in self._places()]:
                    break
                await asyncio.sleep(PROBE_EVERY_S)
        finally:
            await hub.close()
        for (url, _), environments in list(self._known.items()):
            if url == place.url:
                await environments.hub.close_left()
        reason = self._lost.pop(place.url)
        lost_s = time.monotonic() - since
        logger.warning("hub answers again url=%s lost_s=%.1f reason=%s", place.url, lost_s, reason)

    def _start_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel the polls and close the connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for environments in self._known.values():
            await environments.hub.close()

    def _in_order(self, env: str) -> list[HubPlace]:
        """Return the hubs that serve an environment: least used first, recently failed last."""
        since = time.monotonic() - AVOID_S
        serving = [place for place in self._places() if env in place.envs]
        is_known = bool(serving) or env in self._instructions
        if is_known and all(place.url in self._lost for place in serving):
            why = self._lost or "no hub is registered"
            raise HubLost(f"no hub that serves {env} answers: {why}")
        serving = [place for place in serving if place.url not in self._lost]
        return sorted(
            serving,
            key=lambda p: (self._failed_at.get(p.url, since) > since, self._num_opened[p.url]),
        )

    async def _connect(self, place: HubPlace) -> Environments:
        """Return the connection to a hub. The catalogue of a new hub is fetched first."""
        key = (place.url, place.token)
        async with self._connecting:
            if key not in self._known:
                hub = HubClient(
                    place.url,
                    token=place.token or None,
                    timeout_s=self._timeout_s,
                    owner=self._owner,
                    on_lost=partial(self.lose, place),
                )
                try:
                    environments = await Environments.of(hub, style=self._style)
                except BaseException:
                    await hub.close()
                    raise
                self._known[key] = environments
                if self._owner:
                    self._start_task(hub.stay())
                self._instructions = environments.instructions | self._instructions
                self._answers = environments.answers | self._answers
                self._tools = environments.tools | self._tools
        return self._known[key]
