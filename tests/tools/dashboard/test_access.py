"""Laws of access to the dashboard and of the data in its answers."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from common.config.model import ModelSection
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.store.run_dir import RunDir
from tests.tools.dashboard.runs import make_run
from tools.cli.command_line import parse
from tools.dashboard.reading.sources import SourceRefresher, Sources
from tools.dashboard.run_state import details
from tools.dashboard.run_view import view_run
from tools.dashboard.web.app import PLAY_PATH, STATIC, AccessMiddleware, EpisodeReply, make_app
from tools.dashboard.web.server import dashboard, listen
from tools.dashboard.web.views import flat_config, pools, slots
from tools.dashboard.words import status_line

MAX_PAGE_BYTES = 300_000


class Echo:
    """Echoes the requests to play."""

    async def environments(self) -> EpisodeReply:
        return {"maze": {"subsets": {}}}

    async def open(self, env: str, item: str, *, style: str, format: str) -> EpisodeReply:
        return {"id": "1", "env": env, "item": item, "style": style, "format": format}

    async def step(self, episode_id: str, action: str) -> EpisodeReply:
        return {"id": episode_id, "action": action}

    async def ask(self, episode_id: str, *, url: str, model: str, key: str) -> EpisodeReply:
        raise ConfigError(f"{url}: no answer")

    async def ask_run(self, episode_id: str, run: str) -> EpisodeReply:
        return {"id": episode_id, "run": run}

    async def close(self, episode_id: str) -> None: ...

    async def redo(self, recorded: Any, config: EpisodeReply) -> Any:
        return recorded

    async def shut_down(self) -> None: ...


@pytest.fixture
def watch(tmp_path: Path) -> Generator[SourceRefresher]:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", 12)
    watch = SourceRefresher(Sources([], runs=tmp_path))
    watch.start()
    yield watch
    watch.stop()


def client(watch: SourceRefresher, *, host: str = "127.0.0.1", token: str = "") -> TestClient:
    table: Any = Echo()
    app = make_app(watch, AccessMiddleware(host=host, token=token, writable=PLAY_PATH), table)
    return TestClient(app, base_url="http://127.0.0.1:8600", follow_redirects=False)


def test_loopback_dashboard_accepts_only_its_host_name(watch: SourceRefresher) -> None:
    page = client(watch)
    assert page.get("/api/runs").status_code == 200
    assert page.get("/api/runs", headers={"host": "evil.example:8600"}).status_code == 403
    assert page.post("/api/runs").status_code == 405
    policy = page.get("/").headers["content-security-policy"]
    assert policy.startswith("default-src 'self'")


def test_only_the_dashboard_page_may_play(watch: SourceRefresher) -> None:
    page = client(watch)
    body, own = {"id": "1", "action": "go"}, {"origin": "http://127.0.0.1:8600"}
    assert page.post("/api/play/step", json=body, headers=own).json() == body
    for origin in ("http://evil.example", "null", "http://127.0.0.1:9999"):
        assert page.post("/api/play/step", json=body, headers={"origin": origin}).status_code == 403
    assert page.post("/api/play/step", json=body).status_code == 403
    assert page.post("/api/runs", json=body, headers=own).status_code == 405
    assert page.post("/api/play/step", json={"id": 1}, headers=own).status_code == 422
    asked = page.post(
        "/api/play/ask", json={"id": "1", "url": "http://x", "model": "m"}, headers=own
    )
    assert (asked.status_code, asked.json()["error"]) == (400, "http://x: no answer")
    config = watch.sources.get("b").path / "config.yaml"
    config.write_text(
        config.read_text(encoding="utf-8").replace("envhub:", "envhub:\n  style: agentgym"),
        encoding="utf-8",
    )
    for run, style in (("", "compact"), ("a", "compact"), ("b", "agentgym")):
        begun = page.post(
            "/api/play/open", json={"env": "maze", "item": "x", "run": run}, headers=own
        )
        assert (begun.json()["style"], begun.json()["format"]) == (style, "plain")
    own_policy = page.post("/api/play/ask", json={"id": "1", "run": "a"}, headers=own)
    assert own_policy.json()["run"].endswith("/a")
    gone = page.post("/api/play/ask", json={"id": "1", "run": "../../etc"}, headers=own)
    assert gone.status_code == 404
    for site, status in (
        ("same-origin", 200),
        ("none", 200),
        ("same-site", 403),
        ("cross-site", 403),
    ):
        asked = page.get("/api/play/environments", headers={"sec-fetch-site": site})
        assert asked.status_code == status  # it starts a hub: no other site's picture may
    guarded = client(watch, host="0.0.0.0", token="swordfish")
    assert guarded.post("/api/play/step", json=body, headers=own).status_code == 401


def test_recorded_episode_is_served_with_its_actions(watch: SourceRefresher) -> None:
    page = client(watch)
    page.get("/api/run/a")
    found = page.get("/api/run/a/pictures", params={"id": "g0000000/0"}).json()
    assert (found["env"], len(found["actions"]), len(found["shown"])) == ("maze", 2, 2)
    assert page.get("/api/run/a/pictures", params={"id": "none"}).status_code == 404


def test_public_dashboard_requires_the_token(watch: SourceRefresher) -> None:
    page = client(watch, host="0.0.0.0", token="swordfish")
    for path in ("/", "/api/runs", "/static/main.js", "/api/events"):
        assert page.get(path).status_code == 401
        assert page.get(f"{path}?token=wrong").status_code == 401
    led = page.get("/?token=swordfish")
    assert (led.status_code, led.headers["location"]) == (303, "/")
    assert "HttpOnly" in led.headers["set-cookie"]
    assert page.get("/api/runs").status_code == 200  # by the cookie


def test_answers_contain_the_data_of_every_view(watch: SourceRefresher) -> None:
    page = client(watch)
    found = page.get("/api/run/a").json()
    assert found["ledger"]["issued"] == 41
    assert found["marks"] == [{"step": 1, "horizon": 10.0}, {"step": 6, "horizon": 20.0}]
    assert found["lags"] == {"0": 480.0, "1": 1440.0}
    assert found["verdict"]["sentence"]
    series = page.get("/api/run/a/metrics", params={"names": "reward/success"}).json()
    assert series["step"] == [float(step) for step in range(1, 13)]
    assert page.get("/api/run/a/episodes", params={"env": "maze"}).json()["total"] == 20
    assert page.get("/api/run/a/group", params={"id": "g0000001"}).json()["members"][3]["id"]
    compared = page.get("/api/compare", params={"runs": "a,b"}).json()
    assert compared["series"]["b"]["step"]
    assert "run.name" not in compared["config"]


STRANGE = (
    '{"actors": [1, {"last_seen_s": "x"}], "learner": [], "groups": 7, "gain": 3, "lines": 3}',
    '[[1]]\n{"step": "x"}\n{"step": 1, "time_s": null, "reward/success": "a"}\n[null, null]\n7',
    "run: 3\ntasks: [1]\nalgorithm: x\nlearner: {num_ranks: w}\nscheduler: {max_ahead_steps: z}\n",
)
WRITTEN = (
    *("config.yaml", "status.json", "ledger.json", "metrics.jsonl", "outcomes.jsonl", "cpu.json"),
    *("journal/steps.jsonl", "report.json", "launch.json", "alive/scheduler.json", "eval.jsonl"),
)


@pytest.mark.parametrize("name", WRITTEN)
def test_malformed_run_file_hides_nothing_else(tmp_path: Path, name: str) -> None:
    for i, text in enumerate(STRANGE):
        path = make_run(tmp_path / f"a{i}").root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        run_dir, cfg = RunDir(root=tmp_path / f"a{i}"), RunConfig(model=ModelSection(path="m"))
        assert status_line(view_run(run_dir, cfg.train, cfg.horizon))
        assert details(cfg, run_dir)
    watch = SourceRefresher(Sources([], runs=tmp_path))
    watch.start()
    page = client(watch)
    found = {
        f"a{i}{what}": page.get(f"/api/run/a{i}{what}").status_code
        for i in range(len(STRANGE))
        for what in ("", "/metrics", "/fleet", "/episodes", "/episode?id=g0000000/0")
    }
    watch.stop()
    assert set(found.values()) == {200}, found


def test_invalid_request_is_refused_by_name(watch: SourceRefresher) -> None:
    page = client(watch)
    assert "colour" in page.get("/api/run/a/episodes", params={"colour": "red"}).json()["error"]
    assert page.get("/api/run/none").status_code == 404
    assert page.get("/api/run/a/episode", params={"id": "none"}).status_code == 404
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/api/run/..%2f..%2fetc"):
        assert page.get(path).status_code == 404


def test_empty_page_is_small_and_self_contained() -> None:
    files = [path for path in STATIC.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MAX_PAGE_BYTES
    assert (STATIC / "vendor" / "uPlot-LICENSE.txt").exists()
    own = [path for path in files if path.suffix in (".js", ".html", ".css")]
    for path in own:
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert path.parent.name == "vendor" or "://" not in text, path
        assert path.parent.name == "vendor" or "innerHTML" not in text, path


def test_compared_configurations_hide_secrets_and_pool_seeds() -> None:
    told = flat_config({"envhub": {"token": "swordfish", "url": "http://me:pw@host"}, "a": [1]})
    assert told == {"envhub.token": "hidden", "envhub.url": "http://hidden@host", "a": "[1]"}
    flat = {
        "a": {"run.seed": "1", "x": "1"},
        "b": {"run.seed": "2", "x": "1"},
        "c": {"run.seed": "1", "x": "2"},
    }
    assert pools(flat) == [["a", "b"], ["c"]]


@pytest.mark.parametrize("word", ["port=x", "port=70000", "colour=red", "no-such-run"])
def test_dashboard_reports_bad_arguments_before_serving(tmp_path: Path, word: str) -> None:
    request = parse(["dashboard", word, f"run.dir={tmp_path}"])
    with pytest.raises(ConfigError, match=word.partition("=")[0]):
        dashboard(request)


def test_taken_port_is_named_or_skipped() -> None:
    first = listen("127.0.0.1", "0")
    try:
        with pytest.raises(ConfigError, match="port="):
            listen("127.0.0.1", str(first.getsockname()[1]))
    finally:
        first.close()


def test_slot_times_add_up_to_the_total() -> None:
    line = {"actor/concurrency": 8.0, "episodes/arrived": 10.0, "episodes/generate_s_mean": 1.0}
    line |= {"episodes/env_s_mean": 0.5, "episodes/wall_s_mean": 2.0}
    found = slots([{**line, "time_s": 0.0}, {**line, "time_s": 5.0}])
    assert [each[0] for each in found.values()] == [0.0] * 4  # nothing came before it
    # 8 slots for 5 s are 40 s: 10 in the engine, 5 in the environment, 5 between, 20 empty
    assert [each[1] for each in found.values()] == [0.25, 0.125, 0.125, 0.5]
