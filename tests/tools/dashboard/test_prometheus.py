"""Laws of the metrics of a run for Prometheus."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from common.host.lock import hold_run
from common.http import serving as limits
from common.store.run_dir import RunDir
from envhub.http.exposition import MetricsPage
from tests.tools.dashboard.runs import make_run, step_metrics
from tools.dashboard.prometheus import RunMetrics, make_metrics_app
from tools.dashboard.reading.sources import Sources
from tools.dashboard.web.server import server_config

ACTOR = {
    **{"role": "actor", "name": "actor-0", "node": "host-b", "version": 11, "running": 5},
    **{"num_slots": 8, "tokens_per_s": 512.5, "waiting_for": "", "rss_bytes": 2**30},
    **{"cpu_s": 99.5, "num_restarts": 2, "num_finished": 40, "last_seen_s": 0.5},
    **{"unchanged_s": 0.0, "is_dead": False, "is_silent": False},
}
HUB = {
    **{"role": "envhub", "name": "envhub-0", "node": "host-c", "envs": ["maze", "babyai"]},
    **{"paused": {"maze": "judge"}, "num_sessions": 3, "max_sessions": 64, "last_seen_s": 1.0},
}
LEARNER = {"role": "learner", "name": "learner-4711", "node": "host-a", "version": 12}
STATUS = {
    **{"phase": "train", "version": 12, "horizon": 20, "unit": "turns", "gate": "too far ahead"},
    **{"groups": {"open": 3, "ready": 2, "filtered": 1, "opened": 60}, "num_leased": 9},
    **{"success": {"GoTo": 0.25}, "hubs": [HUB], "learner": {**LEARNER, "waiting_for": "actors"}},
    "actors": [ACTOR, {**ACTOR, "name": "actor-1", "is_silent": True}],
    "scheduler": {"role": "scheduler", "name": "scheduler", "node": "host-a", "cpu_s": 1.5},
    "refused": {
        "scheduler": {
            "peers": {"x": {"invalid": 2, "last_reason": "bad"}, "y": {"invalid": 3}},
            "connections": {"refused": {"too_many": 4}},
        },
        "learner": {"10.0.0.1/forbidden": 5},
        "hubs": {"envhub-0/10.0.0.2/slow": 6, "envhub-1/10.0.0.2/slow": 1},
    },
}
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def run_dir(tmp_path: Path) -> Generator[RunDir]:
    """A run with a launcher, and one role of each kind."""
    run_dir = make_run(tmp_path / "a", 4)
    run_dir.status.write_text(json.dumps(STATUS), encoding="utf-8")
    with hold_run(run_dir.root, name="a"):
        yield run_dir


def scrape(*roots: Path, now: float | None = None) -> Samples:
    """Return the samples of a page, which must be valid."""
    page = MetricsPage(RunMetrics(lambda: roots, now=lambda: now or time.time())).text().decode()
    return samples_of(page)


def samples_of(page: str) -> Samples:
    found: Samples = {}
    names: list[str] = []
    for family in text_string_to_metric_families(page):
        names.append(family.name)
        assert family.documentation.endswith(".")
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    assert len(names) == len({*names})
    return found


def value(found: Samples, name: str, /, **labels: str) -> float | None:
    return found.get((f"longstride_{name}", tuple(sorted({"run": "a", **labels}.items()))))


def test_page_has_each_role_with_its_node(run_dir: RunDir) -> None:
    metrics = scrape(run_dir.root)
    actor = {"role": "actor", "name": "actor-0", "node": "host-b"}
    expected = {
        **{"up": 1.0, "version": 11.0, "running": 5.0, "slots": 8.0, "waiting": 0.0},
        **{"tokens_per_second": 512.5, "resident_bytes": 2.0**30, "cpu_seconds_total": 99.5},
        **{"restarts_total": 2.0, "finished_episodes_total": 40.0, "unchanged_seconds": 0.0},
    }
    assert {name: value(metrics, f"member_{name}", **actor) for name in expected} == expected
    assert value(metrics, "member_up", **{**actor, "name": "actor-1"}) == 0.0
    learner = {"role": "learner", "name": "learner", "node": "host-a"}
    assert value(metrics, "member_waiting", **learner) == 1.0
    hub = {"role": "envhub", "name": "envhub-0", "node": "host-c"}
    assert value(metrics, "hub_sessions", **hub) == 3.0
    assert value(metrics, "hub_paused", **hub, env="maze") == 1.0
    assert value(metrics, "hub_paused", **hub, env="babyai") == 0.0
    scheduler = {"role": "scheduler", "name": "scheduler", "node": "host-a"}
    assert value(metrics, "member_up", **scheduler) == 1.0


def test_page_has_the_state_and_the_ledger_of_the_run(run_dir: RunDir) -> None:
    ledger = {"issued": 10, "trained": 4, "filtered": 3, "stale": 0, "failed": 1, "in_flight": 2}
    ledger |= {"reissued": 6, "causes": {"failed:env_error": 1}, "duplicates_discarded": 7}
    ledger |= {"eval": {"issued": 5, "evaluated": 5, "failed": 0, "in_flight": 0}}
    run_dir.ledger.write_text(json.dumps(ledger), encoding="utf-8")
    metrics = scrape(run_dir.root)
    assert value(metrics, "run_up") == 1.0
    assert value(metrics, "run_phase", phase="train") == 1.0
    assert value(metrics, "run_step") == 12.0
    assert value(metrics, "gate_closed") == 1.0
    assert value(metrics, "groups", state="ready") == 2.0
    assert value(metrics, "groups_opened_total") == 60.0
    assert value(metrics, "success_frac", subset="GoTo") == 0.25
    assert value(metrics, "episodes_issued_total", kind="train") == 10.0
    assert value(metrics, "episodes_total", kind="train", outcome="filtered") == 3.0
    assert value(metrics, "episodes_total", kind="eval", outcome="evaluated") == 5.0
    cause = {"kind": "train", "outcome": "failed", "cause": "env_error"}
    assert value(metrics, "episode_causes_total", **cause) == 1.0
    outcomes = [v for (name, _), v in metrics.items() if name == "longstride_episodes_total"]
    in_flight = value(metrics, "episodes_in_flight", kind="train")
    assert sum(outcomes) == 4 + 3 + 1 + 5
    assert in_flight == 2.0
    assert value(metrics, "refused_messages_total", role="scheduler", reason="invalid") == 5.0
    assert value(metrics, "refused_messages_total", role="scheduler", reason="too_many") == 4.0
    assert value(metrics, "refused_messages_total", role="learner", reason="forbidden") == 5.0
    assert value(metrics, "refused_messages_total", role="envhub", reason="slow") == 7.0


def test_page_has_every_metric_of_the_last_step(run_dir: RunDir) -> None:
    metrics = scrape(run_dir.root)
    for key, expected in step_metrics(12).items():
        name = f"step_{key.replace('/', '_')}"
        assert value(metrics, name, key=key) == expected


def test_metrics_with_one_exported_name_keep_both_values(run_dir: RunDir) -> None:
    line = {"step": 13, "time_s": 1.0, "a/b_c": 1.0, "a_b/c": 2.0, "a/none": None}
    with run_dir.metrics.open("a", encoding="utf-8") as handle:
        handle.write(json.dumps(line) + "\n")
    metrics = scrape(run_dir.root)
    assert value(metrics, "step_a_b_c", key="a/b_c") == 1.0
    assert value(metrics, "step_a_b_c", key="a_b/c") == 2.0
    assert value(metrics, "step_a_none", key="a/none") is None


def test_age_of_the_status_counts_as_silence(run_dir: RunDir) -> None:
    os.utime(run_dir.status, (1000.0, 1000.0))
    metrics = scrape(run_dir.root, now=1040.0)
    assert value(metrics, "run_status_age_seconds") == 40.0
    actor = {"role": "actor", "name": "actor-0", "node": "host-b"}
    assert value(metrics, "member_last_seen_seconds", **actor) == 40.5
    scheduler = {"role": "scheduler", "name": "scheduler", "node": "host-a"}
    assert value(metrics, "member_up", **scheduler) == 0.0


def test_stopped_run_exports_only_its_whole_state(tmp_path: Path) -> None:
    running, stopped = make_run(tmp_path / "a", 0), make_run(tmp_path / "b", 0)
    running.finished.write_text("{}", encoding="utf-8")
    os.utime(stopped.status, (1000.0, 1000.0))
    metrics = scrape(running.root, stopped.root)
    names = {name.removeprefix("longstride_") for name, _ in metrics}
    assert names == {"run_up", "run_finished", "run_step"}
    assert value(metrics, "run_finished") == 1.0
    assert value(metrics, "run_finished", run="b") == 0.0
    assert value(metrics, "run_up", run="b") == 0.0


def test_copy_of_the_run_is_exported(run_dir: RunDir) -> None:
    state = {"copied_at": 1000.0, "lag_bytes": 77, "failing_since": 1200.0, "checkpoint": 50}
    (run_dir.root / "copies.json").write_text(json.dumps(state), encoding="utf-8")
    os.utime(run_dir.status, (1300.0, 1300.0))
    metrics = scrape(run_dir.root, now=1300.0)
    names = ("lag_bytes", "age_seconds", "failing_seconds", "checkpoint_version")
    assert [value(metrics, f"copy_{name}") for name in names] == [77.0, 300.0, 100.0, 50.0]


STRANGE = ('{"actors": [1, {"role": "x"}], "groups": 7, "refused": [], "causes": 3}', "[[1]]", "{")


@pytest.mark.parametrize("name", ["status.json", "ledger.json", "cpu.json", "copies.json"])
def test_malformed_file_hides_no_other_metric(run_dir: RunDir, name: str) -> None:
    for text in STRANGE:
        (run_dir.root / name).write_text(text, encoding="utf-8")
        metrics = scrape(run_dir.root)
        assert value(metrics, "run_up") == 1.0
        assert value(metrics, "step_train_step_s", key="train/step_s") == 0.5


def test_label_values_are_escaped(run_dir: RunDir) -> None:
    name = 'a"b\\c\nd'
    status: dict[str, Any] = {**STATUS, "success": {name: 0.5}}
    run_dir.status.write_text(json.dumps(status), encoding="utf-8")
    assert value(scrape(run_dir.root), "success_frac", subset=name) == 0.5


def test_metrics_server_requires_its_token(run_dir: RunDir) -> None:
    sources = Sources(["a"], runs=run_dir.root.parent)
    client = TestClient(make_metrics_app(sources.run_folders, token="swordfish"))
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer "}):
        assert client.get("/metrics", headers=headers).status_code == 401
        assert client.get("/nothing", headers=headers).status_code == 401
    answer = client.get("/metrics", headers={"authorization": "Bearer swordfish"})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert value(samples_of(answer.text), "run_up") == 1.0


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\nx: ", b"GET / HTTP/1.1\r\n\r\n"])
def test_flood_of_strangers_shuts_no_scraper_out(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(limits, "MAX_CONNECTIONS", 50)
    sources = Sources(["a"], runs=run_dir.root.parent)
    app = make_metrics_app(sources.run_folders, token="swordfish")
    server = uvicorn.Server(server_config(app))
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        serving = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        serving.start()
        stack.callback(serving.join)
        stack.callback(setattr, server, "should_exit", True)
        for _ in range(100):
            stranger = socket.create_connection(listener.getsockname(), timeout=5)
            stack.enter_context(stranger).sendall(sent)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
        headers = {"authorization": "Bearer swordfish"}
        assert httpx.get(url, headers=headers, timeout=60.0).status_code == 200
