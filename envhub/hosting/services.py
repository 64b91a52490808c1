"""Services outside of a hub that environments need: probes, and pauses of their environments."""

import asyncio
import logging

from common.errors import EnvError
from envhub.catalogue.registry import Registry
from envhub.errors import ServicePaused
from envhub.hosting.env_calls import call_environment

logger = logging.getLogger(__name__)

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
