"""All hubs of a run as one: sessions are spread over those that serve an environment."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

from actor.rollout.env_client import Environments, HubClient, HubSession
from common.errors import EnvError
from common.wire.join_messages import HubPlace

logger = logging.getLogger(__name__)

AVOID_S = 5.0  # for which a hub that did not open a session is asked last


class Hubs:
    """The hubs that the scheduler tells of. A session stays with the hub that opened it.

    Example: a and b serve babyai -> episodes are opened at one and the other in turn. b dies: what
    runs there ends as env_error, the next ones are opened at a.
    """

    def __init__(
        self, places: Callable[[], list[HubPlace]], *, style: str, timeout_s: float
    ) -> None:
        """Make one without connections; `places` says where hubs are now."""
        self._places = places
        self._style = style
        self._timeout_s = timeout_s
        self._known: dict[tuple[str, str], Environments] = {}  # by url and token
        self._instructions: dict[str, dict[str, str]] = {}  # environment -> style -> text
        self._failed_at: dict[str, float] = {}  # by url
        self._num_opened: Counter[str] = Counter()  # by url
        self._connecting = asyncio.Lock()

    async def start(self) -> None:
        """Connect to the hubs that are told of. Raises: EnvError: none of them answers."""
        failure: EnvError | None = None
        for place in self._places():
            try:
                await self._connect(place)
            except EnvError as error:
                failure = error
                logger.warning("hub does not answer url=%s reason=%s", place.url, error)
        if not self._known and failure is not None:
            raise failure

    def instruction(self, env: str) -> str:
        """Return the text that goes before the first observation, "" if there is none."""
        return self._instructions.get(env, {}).get(self._style, "")

    async def open(self, env: str, item_id: str, *, seed: int) -> HubSession:
        """Start an episode at a hub that serves it; at the next one if that does not answer.

        Raises: EnvError, EnvTimeout: of the last hub; or nobody serves the environment.
        """
        failure = EnvError(f"no hub serves {env}")
        for place in self._in_order(env):
            try:
                environments = await self._connect(place)
                self._num_opened[place.url] += 1
                return await environments.open(env, item_id, seed=seed)
            except EnvError as error:
                failure = error
                self._failed_at[place.url] = time.monotonic()
                logger.warning("no session url=%s env=%s reason=%s", place.url, env, error)
        raise failure

    async def close(self) -> None:
        """Close the connections."""
        for environments in self._known.values():
            await environments.hub.close()

    def _in_order(self, env: str) -> list[HubPlace]:
        """Return who serves an environment: the least used first, those that just failed last."""
        since = time.monotonic() - AVOID_S
        serving = [place for place in self._places() if env in place.envs]
        return sorted(
            serving,
            key=lambda p: (self._failed_at.get(p.url, since) > since, self._num_opened[p.url]),
        )

    async def _connect(self, place: HubPlace) -> Environments:
        """Return the connection to a hub; a hub that is new says how it words its tasks."""
        key = (place.url, place.token)
        async with self._connecting:
            if key not in self._known:
                hub = HubClient(place.url, token=place.token or None, timeout_s=self._timeout_s)
                try:
                    environments = await Environments.of(hub, style=self._style)
                except BaseException:
                    await hub.close()
                    raise
                self._known[key] = environments
                self._instructions = environments.instructions | self._instructions
        return self._known[key]
