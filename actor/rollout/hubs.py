"""All hubs of a run as one: sessions are spread over those that serve an environment."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from actor.rollout.env_client import Environments, HubClient, HubSession
from common.config.run_config import ActorSection
from common.errors import EnvError, HubLost
from common.wire.join_messages import HubPlace

logger = logging.getLogger(__name__)

PROBE_EVERY_S = 0.5  # while a hub does not answer
SAY_EVERY_S = 10.0  # that nobody serves an environment
AVOID_S = 5.0  # for which a hub that did not open a session is asked last


class Hubs:
    """The hubs that the scheduler tells of. A session stays with the hub that opened it.

    Example: a and b serve babyai -> episodes are opened at one and the other in turn. b dies: what
    runs there is opened again at a. a dies, too: it is asked twice a second whether it is back, and
    until it is nothing is opened, and no work asked for. Both stay away for longer than an
    episode may take: what is opened from then on fails.
    """

    def __init__(
        self,
        places: Callable[[], list[HubPlace]],
        cfg: ActorSection,
        *,
        style: str,
        owner: str = "",
    ) -> None:
        """Make one without connections.

        Args:
            places: says where hubs are now.
            cfg: how long an answer is waited for, and an environment that nobody serves any more:
                as long as an episode may take.
            owner: names this process; what it has open ends with it, however it ends.
        """
        self._patience_s = cfg.episode_timeout_s
        self._away_since: dict[str, float] = {}  # environment -> when nobody was seen to serve it
        self._places = places
        self._owner = owner
        self._lost: dict[str, str] = {}  # url -> why; they are being asked
        self._tasks: set[asyncio.Task[None]] = set()
        self._style = style
        self._timeout_s = cfg.env_timeout_s
        self._known: dict[tuple[str, str], Environments] = {}  # by url and token
        self._instructions: dict[str, dict[str, str]] = {}  # environment -> style -> text
        self._answers: dict[str, dict[str, str]] = {}  # the agent's to these
        self._tools: dict[str, list[Any]] = {}  # environment -> what its actions call
        self._failed_at: dict[str, float] = {}  # by url
        self._num_opened: Counter[str] = Counter()  # by url
        self._connecting = asyncio.Lock()

    async def start(self, *, patience_s: float = 0.0) -> None:
        """Connect to the hubs that are told of.

        Raises: EnvError: none of them answers within `patience_s`.
        """
        try:
            await self._connect_all()
        except HubLost:
            if not patience_s:
                raise
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self.wait_for()
            await self._connect_all()

    async def _connect_all(self) -> None:
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
        """Return the text that goes before the first observation, "" if there is none."""
        return self._instructions.get(env, {}).get(self._style, "")

    def acknowledgement(self, env: str) -> str:
        """Return the agent's canned answer to the instruction, "" where both are one message."""
        return self._answers.get(env, {}).get(self._style, "")

    def tools(self, env: str) -> list[Any]:
        """Return what an environment's actions call, [] where they are texts."""
        return self._tools.get(env, [])

    async def open(self, env: str, item_id: str, *, seed: int) -> HubSession:
        """Start an episode at a hub that serves it; at the next one if that does not answer.

        Raises:
            HubLost: nobody who serves the environment answers; see `wait_for`.
            EnvError, EnvTimeout: of the last hub; or nobody serves the environment.
        """
        failure = EnvError(f"no hub serves {env}")
        for place in self._in_order(env):
            try:
                environments = await self._connect(place)
                self._num_opened[place.url] += 1
                return await environments.open(env, item_id, seed=seed)
            except HubLost as error:
                failure = error
                self.lose(place, error)
            except EnvError as error:
                failure = error
                self._failed_at[place.url] = time.monotonic()
                logger.warning("no session url=%s env=%s reason=%s", place.url, env, error)
        raise failure

    @property
    def waiting_for(self) -> str:
        """Who does not answer, if none of the hubs does; else ""."""
        places = self._places()
        if any(place.url not in self._lost for place in places):
            return ""
        return f"envhub: {places[0].url} does not answer" if places else "envhub: there is none"

    async def wait_for(self, env: str | None = None) -> None:
        """Wait until a hub that serves an environment answers, or any; return if it `is_gone`.

        Logs who is waited for.
        """
        said_at = time.monotonic()
        while not self._is_served(env):
            if all(map(self.is_gone, [env] if env else self._instructions or [""])):
                return
            if time.monotonic() - said_at > SAY_EVERY_S:
                said_at = time.monotonic()
                logger.warning("still waiting for a hub env=%s reasons=%s", env, self._lost)
            await asyncio.sleep(PROBE_EVERY_S)

    def _is_served(self, env: str | None) -> bool:
        """Return whether a hub that serves an environment answers, or any does."""
        return any(
            place.url not in self._lost and (not env or env in place.envs)
            for place in self._places()
        )

    def is_gone(self, env: str) -> bool:
        """Return whether nobody has served an environment for so long that nobody will."""
        if self._is_served(env):
            self._away_since.pop(env, None)
            return False
        since = self._away_since.setdefault(env, time.monotonic())
        return time.monotonic() - since > self._patience_s

    def absent(self) -> list[str]:
        """Return the environments that are waited for: nobody serves them now."""
        known = sorted(self._instructions)
        return [env for env in known if not self._is_served(env) and not self.is_gone(env)]

    def is_lost(self, env: str) -> bool:
        """Return whether nobody serves the environment now, or who does it does not answer."""
        serving = [place for place in self._places() if env in place.envs]
        return not serving or any(place.url in self._lost for place in serving)

    def lose(self, place: HubPlace, reason: HubLost) -> None:
        """Send nobody to a hub any more until it answers."""
        if place.url in self._lost:
            return
        self._lost[place.url] = str(reason)
        self._keep(self._ask_again(place))

    async def _ask_again(self, place: HubPlace) -> None:
        """Ask a hub until it answers, or is no hub of the run any more."""
        since = time.monotonic()
        hub = HubClient(place.url, token=place.token or None, timeout_s=self._timeout_s)
        try:
            while not await hub.answers():
                if place.url not in [each.url for each in self._places()]:
                    break
                await asyncio.sleep(PROBE_EVERY_S)
        finally:
            await hub.close()
        for (url, _), known in list(self._known.items()):
            if url == place.url:
                await known.hub.close_left()
        reason, lost_s = self._lost.pop(place.url), time.monotonic() - since
        logger.warning("hub was gone url=%s for_s=%.1f reason=%s", place.url, lost_s, reason)

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Close the connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for environments in self._known.values():
            await environments.hub.close()

    def _in_order(self, env: str) -> list[HubPlace]:
        """Return who serves an environment: the least used first, those that just failed last."""
        since = time.monotonic() - AVOID_S
        serving = [place for place in self._places() if env in place.envs]
        is_known = bool(serving) or env in self._instructions
        if is_known and all(place.url in self._lost for place in serving):
            raise HubLost(f"no hub that serves {env} answers: {self._lost or 'there is none'}")
        serving = [place for place in serving if place.url not in self._lost]
        return sorted(
            serving,
            key=lambda p: (self._failed_at.get(p.url, since) > since, self._num_opened[p.url]),
        )

    async def _connect(self, place: HubPlace) -> Environments:
        """Return the connection to a hub; a hub that is new says how it words its tasks."""
        key = (place.url, place.token)
        async with self._connecting:
            if key not in self._known:
                hub = HubClient(
                    place.url,
                    token=place.token or None,
                    timeout_s=self._timeout_s,
                    owner=self._owner,
                )
                try:
                    environments = await Environments.of(hub, style=self._style)
                except BaseException:
                    await hub.close()
                    raise
                self._known[key] = environments
                hub.on_lost = partial(self.lose, place)
                if self._owner:
                    self._keep(hub.stay())
                self._instructions = environments.instructions | self._instructions
                self._answers = environments.answers | self._answers
                self._tools = environments.tools | self._tools
        return self._known[key]
