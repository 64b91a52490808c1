"""The catalogue of the environments of a hub, and the check of the configured tasks."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlencode

from pydantic import BaseModel, StrictInt, TypeAdapter, ValidationError

from common.config.curriculum import CurriculumSection, subsets_in_use
from common.config.tasks import TaskSection, why_not_far
from common.errors import ConfigError, EnvError
from common.http.blocking import json_when_up
from common.text import near_hint
from common.wire.access.bounds import ID_CHARS

logger = logging.getLogger(__name__)

MAX_SUBSET_CHARS = ID_CHARS - 30  # An item's split and number follow its subset.


@dataclass(frozen=True, slots=True, kw_only=True)
class SubsetEntry:
    """One subset of an environment."""

    num_train: StrictInt
    num_test: StrictInt
    max_turns: StrictInt  # Most turns of an episode, at any horizon stage.
    num_validation: StrictInt = 0  # Hubs of earlier versions have none.


# Environment -> subset -> split -> turns of the expert -> number of items.
Distances = dict[str, dict[str, dict[str, dict[int, int]]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HubCatalogue:
    """Subsets and distances of all environments of a hub."""

    envs: dict[str, dict[str, SubsetEntry]]
    # Distances of the requested subsets only.
    distances: Distances = field(default_factory=Distances)

    def entry(self, env: str, subset: str) -> SubsetEntry:
        """Return the entry of a validated task."""
        return self.envs[env][subset]


class _Environment(BaseModel):
    """The fields of one environment in the hub's answer that the scheduler uses."""

    subsets: dict[str, SubsetEntry]
    distances: dict[str, dict[str, dict[int, int]]] = {}


_BODY = TypeAdapter(dict[str, _Environment])


def parse_catalogue(body: object) -> HubCatalogue:
    """Return the typed catalogue of a `GET /v1/envs` body.

    Raises: EnvError: the body has another form; names the place.
    """
    try:
        envs = _BODY.validate_python(body)
    except ValidationError as error:
        raise EnvError(f"/v1/envs: not a catalogue of a hub: {error}") from error
    return HubCatalogue(
        envs={name: env.subsets for name, env in envs.items()},
        distances={name: env.distances for name, env in envs.items() if env.distances},
    )


def fetch_catalogue(
    url: str, *, token: str, timeout_s: float, subsets: Sequence[str] = ()
) -> HubCatalogue:
    """Return the catalogue of the hub at `url`; wait until the hub is up.

    Args:
        subsets: subsets with a bound on the distance, each as "env/items", that the catalogue must
            include, see `subsets_in_use`.

    Raises:
        EnvError: no valid answer in time; names the address and the last reason.
        ConfigError: the hub refused the token; this is not retried.
    """
    query = urlencode([("subset", name) for name in subsets])
    address = f"{url.rstrip('/')}/v1/envs{'?' if query else ''}{query}"
    if not address.startswith(("http://", "https://")):
        raise ConfigError(
            f"envhub.url={address!r}: the address must begin with http:// or https://"
        )
    logger.info("waiting for envhub address=%s timeout_s=%g", address, timeout_s)
    try:
        answer, body = json_when_up(address, token=token, timeout_s=timeout_s)
    except TimeoutError as error:
        raise EnvError(f"{address} sent no catalogue within {timeout_s:g} s: {error}") from error
    if answer.status in (401, 403):
        raise ConfigError(f"{address} refused the token. Set envhub.token to the token of the hub.")
    if not answer.is_ok:
        raise EnvError(f"{address} answered {answer.shown}")
    return parse_catalogue(body)


def validate_tasks(
    tasks: list[TaskSection], catalogue: HubCatalogue, curriculum: CurriculumSection | None = None
) -> None:
    """Check that every task exists, is named once, and has training items at each distance stage.

    Raises: ConfigError: names the key, the value and the nearest valid name.
    """
    if not tasks:
        names = list(catalogue.envs)
        raise ConfigError(f"tasks=[] is empty. Name at least one environment out of {names}.")
    named: set[tuple[str, str]] = set()
    for i, task in enumerate(tasks):
        if task.env not in catalogue.envs:
            raise ConfigError(_unknown(f"tasks[{i}].env", task.env, catalogue.envs))
        subsets = catalogue.envs[task.env]
        if task.subset not in subsets:
            raise ConfigError(_unknown(f"tasks[{i}].subset", task.subset, subsets))
        if task.weight > 0 and subsets[task.subset].num_train == 0:
            raise ConfigError(
                f"tasks[{i}].subset={task.subset!r}: it has no training items; choose another one"
            )
        if len(task.env) > ID_CHARS or len(task.items()) > MAX_SUBSET_CHARS:
            law = f"a lease has room for {ID_CHARS} and {MAX_SUBSET_CHARS} characters"
            raise ConfigError(f"tasks[{i}]: env={task.env!r:.80} subset={task.subset!r:.80}: {law}")
        if (task.env, task.items()) in named:
            raise ConfigError(
                f"tasks[{i}].subset={task.subset!r}: another task has the same subset of"
                f" {task.env}; name each subset once and set its weight"
            )
        named.add((task.env, task.items()))
        lengths = catalogue.distances.get(task.env, {}).get(task.subset, {})
        for name in subsets_in_use(curriculum or CurriculumSection(), [task]):
            if why := why_not_far(task, lengths, name.removeprefix(f"{task.env}/")):
                raise ConfigError(f"tasks[{i}].distance={task.distance}: {why}")


def _unknown(key: str, value: str, valid: Iterable[str]) -> str:
    """Return the text about a name that the hub does not have, with the nearest one."""
    names = sorted(valid)
    return f"{key}={value!r}: the hub has no such name{near_hint(value, names)}. It has {names}."
