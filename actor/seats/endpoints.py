"""Opponents behind chat endpoints: the model at `actor.seats.url`, or an engine of the run."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from actor.policy import PolicySection
from actor.rollout.episode import PolicyFailed
from actor.seats.endpoint import Endpoint, Reply
from actor.seats.engines import KEY_VARIABLE, RUN_VARIABLE
from common.config.actor import ActorSection
from common.errors import ConfigError
from common.store.run_dir import RunDir

logger = logging.getLogger(__name__)

SECTION = "actor.seats"  # Errors name its keys.
POLL_S = 0.5  # Seconds between two searches for an engine's address.
WARN_EVERY_S = 30.0
MAX_BACKOFF_S = 30.0  # Longest wait after a failed request to an engine of the run.


@dataclass(slots=True)
class OpponentEndpoint:
    """A chat endpoint whose address may change: an engine of the run gets one at each start."""

    settings: PolicySection  # Without the URL.
    key: str
    name: str  # The opponent as the configuration names it.
    find_url: Callable[[], str]  # Base URL with /v1; "" while there is none.
    start_timeout_s: float
    num_rounds: int = 1  # Times that the address is searched again after a failure.
    _by_url: dict[str, Endpoint] = field(default_factory=dict[str, Endpoint])

    async def complete(self, messages: list[dict[str, str]]) -> Reply:
        """Return the next message. Raises: ContextFull, PolicyFailed, ConfigError."""
        for number in range(1, self.num_rounds + 1):
            endpoint = await self._at(await self._wait_for_url())
            try:
                return await endpoint.complete(messages)
            except PolicyFailed:
                if number == self.num_rounds:
                    raise
                await asyncio.sleep(min(MAX_BACKOFF_S, 2.0 ** (number - 1)))
        raise AssertionError("num_rounds is at least 1")

    async def _at(self, url: str) -> Endpoint:
        """Return the connections to an address."""
        if url not in self._by_url:
            settings = replace(self.settings, url=url)
            self._by_url[url] = Endpoint(settings, key=self.key, section=SECTION)
        return self._by_url[url]

    async def _wait_for_url(self) -> str:
        """Return the address once there is one. Raises: PolicyFailed: there is none in time."""
        started = time.monotonic()
        warned_at = started
        while not (url := self.find_url()):
            now = time.monotonic()
            if now - started > self.start_timeout_s:
                raise PolicyFailed(
                    f"the engine of the opponent {self.name} did not start within"
                    f" actor.start_timeout_s={self.start_timeout_s:g}"
                )
            if now - warned_at > WARN_EVERY_S:
                warned_at = now
                logger.warning("still waiting for the engine of opponent=%s", self.name)
            await asyncio.sleep(POLL_S)
        return url

    async def close(self) -> None:
        """Close the connections."""
        endpoints = list(self._by_url.values())
        self._by_url.clear()
        for endpoint in endpoints:
            await endpoint.close()


def _settings(cfg: ActorSection, *, model: str, max_tries: int) -> PolicySection:
    """Return the settings of requests to an opponent."""
    return PolicySection(
        model=model,
        temperature=cfg.temperature,
        max_turn_tokens=cfg.max_turn_tokens,
        timeout_s=cfg.seats.timeout_s,
        max_tries=max_tries,
    )


def endpoint_of_url(cfg: ActorSection) -> OpponentEndpoint:
    """Return the endpoint at `actor.seats.url`. Raises: ConfigError: its key is not set."""
    seats = cfg.seats
    key = os.environ.get(seats.api_key_env, "").strip() if seats.api_key_env else ""
    if seats.api_key_env and not key:
        raise ConfigError(
            f"{SECTION}.api_key_env={seats.api_key_env}: the environment of the actor has no"
            " variable of this name. Set it to the key of the endpoint"
        )
    settings = _settings(cfg, model=seats.model, max_tries=seats.max_tries)
    return OpponentEndpoint(settings, key, "url", lambda: seats.url, cfg.start_timeout_s)


def endpoint_of_engine(cfg: ActorSection, role: str, name: str) -> OpponentEndpoint:
    """Return the endpoint of an engine that the run starts for an opponent.

    Raises: ConfigError: this process does not belong to a run that started the engine.
    """
    root = os.environ.get(RUN_VARIABLE, "")
    key = os.environ.get(KEY_VARIABLE, "")
    if not root or not key:
        raise ConfigError(
            f"{SECTION}: the opponent {name} has an engine that only `python run.py train` and"
            " `python run.py eval` start, for actors on the same machine. For other actors serve"
            f" its folder with `python run.py serve` and set {SECTION}.url"
        )
    run_dir = RunDir(root=Path(root))
    return OpponentEndpoint(
        _settings(cfg, model="", max_tries=1),
        key,
        name,
        lambda: run_dir.find_address(role) or "",
        cfg.start_timeout_s,
        num_rounds=cfg.seats.max_tries,
    )
