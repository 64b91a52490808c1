"""Laws of starting and stopping the hub."""

import json
import signal
import subprocess
import sys
import threading
import time

import httpx
import psutil
import pytest

from common.config.env import RemoteOptions
from common.config.envhub import EnvhubSection
from common.config.envs import EnvsSection
from common.config.run_config import RunConfig
from common.config.tasks import TaskSection
from common.repository import ROOT
from envhub.main import build, envs_of_run
from tests.bounds import at_most
from tests.ports import free_port


def built(*, env_names=("textcraft",), token=None, **changes):
    section = EnvhubSection(**changes)
    return build(
        list(env_names), section, token=token, options=EnvsSection(), remote=RemoteOptions()
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_hub_refuses_an_open_host_without_token(host):
    with pytest.raises(ValueError, match=r"Set envhub\.token"):
        built(host=host)
    built(host=host, token="secret")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_hub_accepts_loopback_without_token(host):
    built(host=host)


def test_hub_refuses_an_empty_token():
    with pytest.raises(ValueError, match="token is empty"):
        built(host="0.0.0.0", token=" ")


def test_hub_of_a_run_serves_its_tasks_and_named_environments():
    task = TaskSection(env="babyai", subset="GoToLocal")
    cfg = RunConfig(tasks=[task], envhub=EnvhubSection(envs=["textcraft", "babyai"]))
    assert envs_of_run(cfg) == ["babyai", "textcraft"]


class Served:
    """A hub in a process of its own."""

    def __init__(self, *overrides: str) -> None:
        self.port = free_port()
        argv = [sys.executable, "run.py", "envhub", f"port={self.port}", *overrides]
        self.process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8")
        assert self.process.stdout is not None
        self.said = [self.process.stdout.readline() for _ in range(2)]
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", timeout=60.0, trust_env=False
        )
        self._wait()

    def _wait(self) -> None:
        deadline_s = time.monotonic() + 60
        while True:
            try:
                self.client.get("/healthz")
                return
            except httpx.ConnectError:
                assert time.monotonic() < deadline_s
                time.sleep(0.02)  # nothing to await: another process opens the port

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.communicate(timeout=60)


@pytest.fixture
def serve():
    running = []

    def start(*overrides: str) -> Served:
        running.append(Served(*overrides))
        return running[-1]

    yield start
    for served in running:
        served.close()


@pytest.mark.slow
def test_hub_alone_needs_no_run_and_no_token(serve):
    has_run = (ROOT / "runs" / "envhub").exists()
    served = serve("env=textcraft")
    assert served.said[0] == "environments: textcraft\n"
    assert f"http://127.0.0.1:{served.port}" in served.said[1]
    assert set(served.client.get("/v1/envs").json()) == {"textcraft"}
    assert (ROOT / "runs" / "envhub").exists() is has_run


@pytest.mark.long
@pytest.mark.slow
def test_hub_alone_requires_its_given_token(serve):
    served = serve("env=textcraft", "token=secret")
    assert served.client.get("/v1/envs").status_code == 401
    headers = {"Authorization": "Bearer secret"}
    assert served.client.get("/v1/envs", headers=headers).status_code == 200


@pytest.mark.slow
@pytest.mark.timed
def test_sigterm_stops_hub_and_workers_within_three_seconds(serve):
    served = serve("env=tests.envhub.outside:make_worker")
    body = {"env": "fragile", "item_id": "any-train-0"}
    assert served.client.post("/v1/sessions", json=body).status_code == 201
    offspring = psutil.Process(served.process.pid).children(recursive=True)
    assert len(offspring) == 2  # a worker, and the guardian of the workers
    served.process.send_signal(signal.SIGTERM)  # the client's open connection must not delay it
    assert served.process.wait(timeout=at_most(3.0)) == 0
    assert psutil.wait_procs(offspring, timeout=at_most(1.0))[1] == []


@pytest.mark.slow
def test_hub_answers_a_running_step_before_it_stops(serve, tmp_path):
    served = serve("env=tests.envhub.outside:make_async_worker")
    body = {"env": "async", "item_id": "any-train-0"}
    session_id = served.client.post("/v1/sessions", json=body).json()["session_id"]
    answers, has_begun = [], tmp_path / "has-begun"

    def step() -> None:
        step = {"action": f"pause after {has_begun}", "seq": 1}
        answers.append(served.client.post(f"/v1/sessions/{session_id}/step", json=step))

    thread = threading.Thread(target=step)
    thread.start()
    deadline_s = time.monotonic() + 60
    while not has_begun.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    served.process.send_signal(signal.SIGTERM)
    thread.join(timeout=60)
    assert answers[0].status_code == 200
    assert served.process.wait(timeout=60) == 0


@pytest.mark.slow
def test_metrics_count_a_killed_worker(serve):
    served = serve("env=tests.envhub.outside:make_worker")
    body = {"env": "fragile", "item_id": "any-train-0"}
    served.client.post("/v1/sessions", content=json.dumps(body))
    (worker,) = [
        each
        for each in psutil.Process(served.process.pid).children()
        if "envhub.hosting.worker_main" in each.cmdline()
    ]
    worker.kill()
    deadline_s = time.monotonic() + 60
    wanted = 'envhub_worker_restarts_total{cause="died",env="fragile"} 1.0'
    while wanted not in served.client.get("/metrics").text:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)  # nothing to await: another process notices
    assert served.client.get("/healthz").json()["num_sessions"] == 0
