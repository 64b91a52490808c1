"""Laws of worker processes: what dies, hangs or grows harms its own sessions only."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from common.repository import ROOT
from envhub.catalogue.registry import Registry
from envhub.hosting.sessions import Sessions
from tests.bounds import at_most
from tests.envhub.conftest import live_session

pytestmark = pytest.mark.slow  # Each test starts processes.


@pytest.fixture
def hub(serve_hub):
    return serve_hub("make_worker", "make_async_worker")


def worker_pids(hub) -> list[int]:
    return [worker.pid for worker in hub.sessions.placement.workers()]


def opened_in(hub, path: str) -> int:
    """Return the process that holds a session."""
    return hub.session(path).episode.worker.pid


async def until(condition, timeout_s: float) -> float:
    """Return how many seconds passed until the condition held."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < timeout_s
        await asyncio.sleep(0.01)
    return time.monotonic() - began_s


def live(hub, name: str) -> int:
    return hub.sessions.num_live[name]


def test_worker_plays_episode_like_hub(hub):
    path = hub.open("fragile")
    assert hub.step(path, "go", 1).json() == {
        "observation": "step 1",
        "reward": 0.0,
        "done": False,
        "is_valid": True,
        "is_success": False,
        "state": "",
        "is_truncated": False,
    }
    hint = {"valid_actions": ["end", "after 1"], "expert_action": None}
    assert hub.client.get(f"{path}/hint").json() == hint
    assert hub.client.get(f"{path}/render").json() == {"text": "1 steps", "fingerprint": "same"}
    assert hub.step(path, "end", 2).json()["done"]
    assert hub.client.delete(path).status_code == 204
    assert live(hub, "fragile") == 0


def test_workers_start_on_demand_and_are_reused(hub):
    assert worker_pids(hub) == []
    first, second = hub.open("fragile"), hub.open("fragile")
    assert len(worker_pids(hub)) == 1  # two places each
    third = hub.open("fragile")
    pids = worker_pids(hub)
    assert [opened_in(hub, p) for p in (first, second, third)] == [pids[0], pids[0], pids[1]]
    for path in (first, second, third):
        hub.client.delete(path)
    assert opened_in(hub, hub.open("fragile")) in pids
    assert worker_pids(hub) == pids


def test_places_of_all_workers_are_the_capacity(hub):
    paths = [hub.open("fragile") for _ in range(4)]
    body = {"env": "fragile", "item_id": "any-train-0"}
    refused = hub.client.post("/v1/sessions", json=body)
    assert refused.status_code == 429
    assert float(refused.headers["Retry-After"]) > 0
    hub.client.delete(paths[0])
    assert hub.client.post("/v1/sessions", json=body).status_code == 201


def test_unknown_item_keeps_worker_and_slot(hub):
    body = {"env": "fragile", "item_id": "any-train-99"}
    for _ in range(5):
        answer = hub.client.post("/v1/sessions", json=body)
        assert answer.status_code == 404
        assert "'any-train-9'" in answer.json()["detail"]
    assert len(worker_pids(hub)) == 1
    assert live(hub, "fragile") == 0


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("raise", "fragile: KeyError: 'a bug in the environment'"),
        ("fail", "fragile: the machine behind it is down"),
        ("overpay", "reward 2.0 is not in [0, 1]"),
    ],
)
def test_failing_step_ends_its_session_only(hub, action, words):
    failing, other = hub.open("fragile"), hub.open("fragile")
    failed = hub.step(failing, action, 1)
    assert (failed.status_code, words in failed.json()["detail"]) == (500, True)
    assert hub.step(failing, "go", 1).status_code == 404
    assert hub.step(other, "go", 1).status_code == 200
    assert len(worker_pids(hub)) == 1


def test_answer_that_is_no_json_fails_and_keeps_the_worker(hub):
    odd, other = hub.open("fragile"), hub.open("fragile")
    hub.step(odd, "be odd", 1)
    told = hub.client.get(f"{odd}/hint")
    assert told.status_code == 500
    assert "fragile: a message is not JSON: Object of type bytes" in told.json()["detail"]
    assert hub.step(other, "go", 1).status_code == 200


def test_hanging_step_ends_only_workers_sessions(hub):
    hanging, beside, elsewhere = (hub.open("fragile") for _ in range(3))
    first, second = worker_pids(hub)
    hub.session(hanging).episode._timeout_s = 0.5
    hung = hub.step(hanging, "hang", 1)
    assert hung.status_code == 504
    assert "fragile: worker 1" in hung.json()["detail"]
    assert "'step' took longer than 0.5 s" in hung.json()["detail"]
    lost = hub.step(beside, "go", 1)
    assert lost.status_code == 500
    assert "'step' took longer than 0.5 s" in lost.json()["detail"]
    assert hub.step(beside, "go", 1).status_code == 404
    assert hub.step(elsewhere, "go", 1).status_code == 200
    hub.run(until(lambda: not psutil.pid_exists(first), 60.0))
    assert live(hub, "fragile") == 1
    assert second in worker_pids(hub)
    assert hub.sessions.placement.num_lost == {("fragile", "deadline"): 1}
    assert hub.client.post("/v1/sessions", json={"env": "fragile", "item_id": "any-train-0"})


def test_close_has_the_deadline_of_a_call(hub):
    closing, beside = hub.open("fragile"), hub.open("fragile")
    assert opened_in(hub, closing) == opened_in(hub, beside)
    hub.step(closing, "close slowly", 1)
    assert hub.client.delete(closing).status_code == 204
    assert hub.step(beside, "go", 1).status_code == 200


def test_running_calls_of_a_lost_worker_fail_at_once(hub):
    hanging, waiting = hub.open("async"), hub.open("async")
    with ThreadPoolExecutor() as threads:
        beside = threads.submit(hub.step, waiting, "wait", 1)
        hub.run(until(lambda: hub.sessions._num_running == 1, 60.0))
        hub.session(hanging).episode._timeout_s = 0.5
        assert hub.step(hanging, "wait", 1).status_code == 504
        assert beside.result().status_code == 500


@pytest.mark.parametrize("env", ["async", "fragile"])
def test_sessions_of_one_worker_run_concurrently(hub, env):
    paths = [hub.open(env) for _ in range(2)]
    entries = [
        {"session_id": path.rpartition("/")[2], "action": "meet", "seq": 1} for path in paths
    ]
    answers = hub.client.post("/v1/step/batch", json=entries).json()
    assert [each["status"] for each in answers] == [200, 200]


@pytest.mark.timed
def test_killed_worker_is_replaced_within_two_seconds(hub):
    paths = [hub.open("fragile") for _ in range(3)]
    first, _ = worker_pids(hub)
    hub.run(asyncio.sleep(1.0))  # a worker that dies at once is not replaced before it is needed
    os.kill(first, signal.SIGKILL)

    def is_replaced() -> bool:
        workers = hub.sessions.placement.workers()
        ready = [each.pid for each in workers if each.ready_at_s is not None]
        return len(ready) == 2 and first not in ready

    assert hub.run(until(is_replaced, 60.0)) < at_most(2.0)
    assert hub.step(paths[2], "go", 1).status_code == 200
    told = hub.step(paths[0], "go", 1)
    assert told.status_code == 500
    assert f"worker 1 (pid {first}) died: signal 9" in told.json()["detail"]
    assert live(hub, "fragile") == 1
    assert opened_in(hub, hub.open("fragile")) != first


def test_worker_exit_is_reported_with_code(hub):
    path = hub.open("fragile")
    ended = hub.step(path, "exit", 1)
    assert ended.status_code == 500
    assert "died: exit code 3" in ended.json()["detail"]
    assert hub.step(hub.open("fragile"), "go", 1).status_code == 200


def test_worker_above_its_memory_limit_drains_and_restarts(hub):
    path = hub.open("fragile")
    (pid,) = worker_pids(hub)
    assert hub.step(path, "grow", 1).status_code == 200
    hub.run(hub.sessions.placement.check_memory())
    assert hub.step(path, "go", 2).status_code == 200  # it drains: above the limit, not far above
    other = hub.open("fragile")
    assert opened_in(hub, other) != pid
    hub.client.delete(path)
    hub.run(until(lambda: not psutil.pid_exists(pid), 60.0))
    assert hub.step(other, "go", 1).status_code == 200
    assert hub.sessions.placement.num_lost == {("fragile", "memory"): 1}


def test_worker_far_above_its_memory_limit_is_killed(hub):
    growing, beside = hub.open("fragile"), hub.open("fragile")
    for path in (growing, beside):
        assert hub.step(path, "grow", 1).status_code == 200
    hub.run(hub.sessions.placement.check_memory())
    told = hub.step(growing, "go", 2)
    assert told.status_code == 500
    assert "its limit is 160 MiB" in told.json()["detail"]


def test_concurrent_identical_retries_execute_once(hub):
    path = hub.open("async")
    with ThreadPoolExecutor() as threads:
        answers = list(threads.map(lambda _: hub.step(path, "pause", 1), range(2)))
    assert [each.json()["observation"] for each in answers] == ["step 1", "step 1"]
    assert hub.step(path, "go", 2).json()["observation"] == "step 2"
    assert hub.sessions.num_steps == 2
    assert hub.sessions.counts["repeated"] == 1


def test_expired_session_gives_its_place_back(hub):
    for _ in range(4):
        hub.open("fragile")
    hub.clock.now_s += 61.0
    assert hub.run(hub.sessions.expire()) == 4
    assert live(hub, "fragile") == 0
    assert hub.step(hub.open("fragile"), "go", 1).status_code == 200


def test_worker_load_failure_reports_its_cause(serve_hub):
    hub = serve_hub("make_unloadable")
    body = {"env": "unloadable", "item_id": "any-train-0"}
    for _ in range(2):
        answer = hub.client.post("/v1/sessions", json=body)
        assert answer.status_code == 500
        assert "worker did not start" in answer.json()["detail"]
        assert "no libfoo.so here" in answer.json()["detail"]
    assert live(hub, "unloadable") == 0
    assert worker_pids(hub) == []


def test_suspended_hub_kills_no_worker_with_a_pending_answer():
    async def main():
        registry = Registry(["tests.envhub.outside:make_worker"])
        sessions = Sessions(registry, idle_s=3.5, capacity=9, step_timeout_s=3.0)
        try:
            stepping, beside = [
                (await sessions.create("fragile", f"any-train-{i}"))[0] for i in range(2)
            ]
            live_session(sessions, stepping).episode._timeout_s = 1.0
            step = asyncio.create_task(sessions.step(stepping, "slow", 1))
            await asyncio.sleep(0.05)
            time.sleep(4.0)  # The process is suspended.
            assert (await step).observation == "step 1"
            assert (await sessions.step(beside, "go", 1)).observation == "step 1"
            assert await sessions.expire() == 0
            assert not sessions.placement.num_lost
        finally:
            await sessions.stop()

    asyncio.run(main())


CODE = """
import asyncio
from envhub.catalogue.registry import Registry
from envhub.hosting.sessions import Sessions

async def main():
    registry = Registry(["tests.envhub.outside:make_worker"])
    sessions = Sessions(registry, idle_s=60.0, capacity=9, step_timeout_s=5.0)
    await sessions.create("fragile", "any-train-0")
    print(sessions.placement.workers()[0].pid, flush=True)
    await asyncio.sleep(60.0)

asyncio.run(main())
"""


def test_workers_die_with_a_killed_hub():
    process = subprocess.Popen(
        [sys.executable, "-c", CODE], cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8"
    )
    assert process.stdout is not None
    with process.stdout:
        pid = int(process.stdout.readline())
    worker = psutil.Process(pid)
    process.kill()
    process.wait(timeout=60.0)
    assert psutil.wait_procs([worker], timeout=60.0)[1] == []
