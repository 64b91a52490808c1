"""The hub's catalogue, read from a real HTTP server."""

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from common.config.curriculum import TaskSection
from common.errors import ConfigError, EnvError
from learner.scheduler.curriculum.catalogue import (
    Catalogue,
    SubsetEntry,
    fetch_catalogue,
    parse_catalogue,
    validate_tasks,
)

BODY = {
    "babyai": {
        "subsets": {"PickupLoc": {"num_train": 9, "num_test": 2, "max_turns": 20}},
        "instruction": {"compact": "", "agentgym": ""},
    }
}
PARSED = Catalogue(
    envs={"babyai": {"PickupLoc": SubsetEntry(num_train=9, num_test=2, max_turns=20)}}
)


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers one route, to the bearer of one token."""

    def do_GET(self) -> None:
        is_known = self.headers["Authorization"] == "Bearer secret"
        self.send_response(200 if is_known and self.path == "/v1/envs" else 401)
        self.end_headers()
        if is_known:
            self.wfile.write(json.dumps(BODY).encode())

    def log_message(self, *_: object) -> None:
        """Stay silent."""


@pytest.fixture
def hub_url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_fetch_returns_the_typed_catalogue_to_the_bearer(hub_url: str) -> None:
    assert fetch_catalogue(hub_url, token="secret", timeout_s=5.0) == PARSED


def test_fetch_does_not_wait_when_the_token_is_refused(hub_url: str) -> None:
    with pytest.raises(EnvError, match="/v1/envs answered 401"):
        fetch_catalogue(hub_url, token="wrong", timeout_s=60.0)


def test_fetch_names_the_address_when_nobody_answers_in_time() -> None:
    with pytest.raises(EnvError, match=r"no catalogue from http://127\.0\.0\.1:9/v1/envs within"):
        fetch_catalogue("http://127.0.0.1:9", token="", timeout_s=0.1)


@pytest.mark.parametrize(
    "body", [[], {"a": {}}, {"a": {"subsets": {"s": {"num_train": 1, "num_test": "x"}}}}]
)
def test_parse_refuses_what_is_no_catalogue(body: object) -> None:
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


def test_validate_refuses_a_task_named_twice_and_none_at_all() -> None:
    task = TaskSection(env="babyai", subset="PickupLoc")
    with pytest.raises(ConfigError, match="named twice"):
        validate_tasks([task, task], PARSED)
    with pytest.raises(ConfigError, match=r"tasks=\[\]"):
        validate_tasks([], PARSED)
