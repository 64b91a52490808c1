"""Start of a run: wait until hubs serve all tasks, and answer joining nodes during the wait."""

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.config.curriculum import subsets_in_use
from common.config.run_config import RunConfig
from common.errors import ConfigError, EnvError
from common.host.loopback import loopback
from common.wire.addresses import SAME_MACHINE, host_of, with_host
from common.wire.messages import HubHello, HubPlace, RanksPlace
from common.wire.sockets import Received, Router
from scheduler.curriculum.catalogue import (
    Distances,
    HubCatalogue,
    SubsetEntry,
    fetch_catalogue,
    validate_tasks,
)
from scheduler.members.enrolment import Enrolments
from scheduler.members.registry import AddressRegistry

POLL_S = 0.1
ANSWER_S = 0.5  # Seconds for a hub of the previous scheduler to answer.
logger = logging.getLogger(__name__)


class StoppedEarly(Exception):
    """The scheduler was stopped before the run could begin."""


@dataclass(slots=True, kw_only=True)
class StartMessages:
    """Handles messages that arrive before the run can begin.

    consumes:   hellos of hubs and requests of joining nodes; other messages are queued
    waits for:  hubs that serve every task, `actor.start_timeout_s` at most
    unblocked by: a hub's hello, or `stop`
    """

    cfg: RunConfig
    router: Router
    registry: AddressRegistry
    enrolments: Enrolments
    # Messages for the run, in order of arrival.
    early: list[Received] = field(default_factory=list[Received])

    def wait_for_catalogue(self, *, token: str, stop: threading.Event) -> HubCatalogue:
        """Return the catalogue of all hubs together.

        Args:
            token: token of the hub at `envhub.url`.

        Raises:
            ConfigError: no hub serves one of the tasks, or a hub refused the token.
            EnvError: no hub that serves the tasks connected in time; names the missing
                environments.
            StoppedEarly: `stop` was set.
        """
        timeout_s = self.cfg.actor.start_timeout_s
        deadline = time.monotonic() + timeout_s
        catalogues: dict[str, HubCatalogue] = {}
        subsets = subsets_in_use(self.cfg.curriculum, self.cfg.tasks)
        if url := self.cfg.envhub.url:
            catalogues[url] = fetch_catalogue(
                url, token=token, timeout_s=timeout_s, subsets=subsets
            )
            self.registry.add_fixed(HubPlace(url=url, token=token, envs=list(catalogues[url].envs)))
        while not self._is_served(catalogues):
            if stop.is_set():
                raise StoppedEarly
            if time.monotonic() > deadline:
                served = sorted({env for each in catalogues.values() for env in each.envs})
                wanted = sorted({task.env for task in self.cfg.tasks})
                raise EnvError(
                    f"the tasks need {wanted}, but the hubs serve only {served} after"
                    f" {timeout_s:g} s; start a hub with the rest, or change tasks"
                )
            self._receive()
            for place in self.registry.directory.hubs:
                if place.url not in catalogues:
                    left_s = max(1.0, deadline - time.monotonic())
                    catalogues[place.url] = _catalogue_of(place, left_s, subsets)
        catalogue = _union(catalogues.values())
        validate_tasks(self.cfg.tasks, catalogue, self.cfg.curriculum)
        return catalogue

    def _is_served(self, catalogues: dict[str, HubCatalogue]) -> bool:
        """Return whether the run can begin.

        A hub that the run starts, or that `envhub.url` names, must serve all tasks by itself.
        Otherwise the joined hubs must serve them together.
        """
        is_only_joined = not self.cfg.envhub.is_started and not self.cfg.envhub.url
        envs = _union(catalogues.values()).envs
        return bool(catalogues) and (
            not is_only_joined or all(task.env in envs for task in self.cfg.tasks)
        )

    def _receive(self) -> None:
        """Answer joining nodes and hubs; keep other messages for the core."""
        for received in self.router.receive_all(timeout_s=POLL_S):
            answer = (
                self.enrolments.answer(received.message)
                or self.registry.hear_ranks(received.message)
                or self.registry.hear_hub(received.message, received.sender, time.monotonic())
            )
            if answer is not None:
                self.router.send(received.sender, answer)
            elif not isinstance(received.message, RanksPlace):
                self.early.append(received)


def greet_known(registry: AddressRegistry, saved: list[dict[str, Any]], *, token: str) -> None:
    """Register the hubs of the previous scheduler that answer at once.

    The scheduler waits for the remaining hubs as at the start of a run. Each hub sends a hello
    about once a second.

    Args:
        saved: `AddressRegistry.saved_hubs` of that scheduler.
    """
    for hub in saved:
        place = HubPlace(url=hub["url"], token=token, envs=hub["envs"])
        try:
            _catalogue_of(place, ANSWER_S)
        except (EnvError, ConfigError) as error:
            logger.info(
                "a hub of the earlier scheduler does not answer yet name=%s: %s", hub["name"], error
            )
            continue
        hello = HubHello(name=hub["name"], incarnation=hub["incarnation"], place=place)
        registry.hear_hub(hello, b"", time.monotonic())


def _catalogue_of(place: HubPlace, timeout_s: float, subsets: Sequence[str] = ()) -> HubCatalogue:
    """Return the catalogue of a hub; the host "*" in its URL means this machine."""
    url = with_host(place.url, loopback()) if host_of(place.url) == SAME_MACHINE else place.url
    return fetch_catalogue(url, token=place.token, timeout_s=timeout_s, subsets=subsets)


def _union(catalogues: Iterable[HubCatalogue]) -> HubCatalogue:
    """Return the union of the catalogues; for an environment in several, the first entry counts."""
    envs: dict[str, dict[str, SubsetEntry]] = {}
    distances = Distances()
    for catalogue in catalogues:
        envs = catalogue.envs | envs
        distances = catalogue.distances | distances
    return HubCatalogue(envs=envs, distances=distances)
