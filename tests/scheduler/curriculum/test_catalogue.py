"""The hub's catalogue, read from a real HTTP server."""

from collections.abc import Iterator

import pytest
from fastapi import FastAPI, Header, HTTPException

from common.config.tasks import TaskSection
from common.errors import ConfigError, EnvError
from common.wire.access.bounds import ID_CHARS
from scheduler.curriculum.catalogue import (
    MAX_SUBSET_CHARS,
    HubCatalogue,
    SubsetEntry,
    fetch_catalogue,
    parse_catalogue,
    validate_tasks,
)
from tests.actor.toy_servers import serve

BODY: dict[str, object] = {
    "babyai": {
        "subsets": {"PickupLoc": {"num_train": 9, "num_test": 2, "max_turns": 20}},
        "instruction": {"compact": "", "agentgym": ""},
    }
}
PARSED = HubCatalogue(
    envs={"babyai": {"PickupLoc": SubsetEntry(num_train=9, num_test=2, max_turns=20)}}
)


@pytest.fixture
def hub_url() -> Iterator[str]:
    """One route, for the bearer of one token."""
    app = FastAPI()

    @app.get("/v1/envs")
    async def envs(authorization: str = Header("")) -> dict[str, object]:
        if authorization != "Bearer secret":
            raise HTTPException(401)
        return BODY

    with serve(app) as url:
        yield url


def test_fetch_returns_typed_catalogue_for_token(hub_url: str) -> None:
    assert fetch_catalogue(hub_url, token="secret", timeout_s=60.0) == PARSED


def test_fetch_fails_at_once_for_a_refused_token(hub_url: str) -> None:
    with pytest.raises(ConfigError, match=r"/v1/envs refused the token. Set envhub\.token"):
        fetch_catalogue(hub_url, token="wrong", timeout_s=60.0)


def test_fetch_timeout_names_the_address() -> None:
    with pytest.raises(EnvError, match=r"http://127\.0\.0\.1:9/v1/envs sent no catalogue within"):
        fetch_catalogue("http://127.0.0.1:9", token="", timeout_s=0.1)


@pytest.mark.parametrize(
    "body", [[], {"a": {}}, {"a": {"subsets": {"s": {"num_train": 1, "num_test": "x"}}}}]
)
def test_parse_refuses_malformed_catalogues(body: object) -> None:
    with pytest.raises(EnvError):
        parse_catalogue(body)


def test_validate_names_key_value_and_nearest_subset() -> None:
    tasks = [
        TaskSection(env="babyai", subset="PickupLoc"),
        TaskSection(env="babyai", subset="Pick"),
    ]
    with pytest.raises(ConfigError, match=r"tasks\[1\].subset='Pick'.*nearest is 'PickupLoc'"):
        validate_tasks(tasks, PARSED)


def test_validate_names_key_value_and_nearest_env() -> None:
    with pytest.raises(ConfigError, match=r"tasks\[0\].env='babyia'.*nearest is 'babyai'"):
        validate_tasks([TaskSection(env="babyia", subset="PickupLoc")], PARSED)


def test_validate_refuses_duplicate_and_missing_tasks() -> None:
    task = TaskSection(env="babyai", subset="PickupLoc")
    with pytest.raises(ConfigError, match="another task has the same subset"):
        validate_tasks([task, task], PARSED)
    with pytest.raises(ConfigError, match=r"tasks=\[\]"):
        validate_tasks([], PARSED)


def test_task_with_too_long_item_ids_is_refused() -> None:
    longest = "x" * MAX_SUBSET_CHARS
    entry = SubsetEntry(num_train=10**9, num_test=1, max_turns=5)
    catalogue = HubCatalogue(envs={"maze": {longest: entry, f"{longest}y": entry}})
    validate_tasks([TaskSection(env="maze", subset=longest)], catalogue)
    assert len(f"{longest}-train-{10**9}") <= ID_CHARS
    with pytest.raises(ConfigError, match=r"tasks\[0\].*room for 300 and 270 characters"):
        validate_tasks([TaskSection(env="maze", subset=f"{longest}y")], catalogue)
