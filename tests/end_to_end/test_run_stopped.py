"""Laws of runs that are stopped and resumed."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.end_to_end.runs import Run, balances, unbounded
from tools.dashboard.interactive import InteractiveEpisodes

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


ENV_TIMEOUT_S = 4.0
OVERRIDES = (
    *("train.num_steps=200", "eval.before=false", "eval.after=false"),
    f"actor.env_timeout_s={ENV_TIMEOUT_S}",
    "run.stop_timeout_s=45",  # Longer than the pause and the checkpoint together.
)


def test_run_stopped_mid_step_saves_and_resumes(tmp_path: Path) -> None:
    with Run(tmp_path, *OVERRIDES) as run:
        run.wait_until(lambda: len(run.metrics()) >= 2)
        assert run.probe("ready") == "ready"
        by = asyncio.run(played_by_own_policy(run.root))  # asks the actor of the run
        assert by.startswith("r, version ")
        assert int(by.split()[-1]) > 0
        hub_stands_still(run)
        learner = run.role_pid("learner")
        os.kill(learner, signal.SIGSTOP)  # as in a step of a large model
        reached = run.metrics()[-1]["step"]
        run.process.send_signal(signal.SIGINT)
        asked_s = time.monotonic()
        assert run.probe("ready") == "not ready: the run is stopping"
        assert run.probe("live") == "live"
        time.sleep(max(0.0, asked_s + 8.0 - time.monotonic()))
        os.kill(learner, signal.SIGCONT)
        assert run.wait(timeout_s=60) == 130
        assert run.left_over() == []
        assert run.probe("live") == "not live: no launcher process supervises the run"
    version = saved_version(run)
    assert version >= reached
    assert f"stopped with a checkpoint at step {version}; the same command resumes" in run.output
    assert "a second Ctrl-C ends it at once" in run.output
    assert "error" not in run.output.splitlines()[-1]
    with Run(tmp_path, *OVERRIDES) as again:
        again.wait_until(lambda: len(again.metrics()) >= version + 2)
        again.process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        assert again.wait(timeout_s=15) != 0
        assert time.monotonic() - started < 10.0
        assert again.left_over() == []
    steps = [line["step"] for line in again.metrics()]
    assert steps == list(range(1, len(steps) + 1))
    assert saved_version(again) >= steps[-1] > version
    assert balances(again.read("ledger.json"))
    assert unbounded(again.root) == []
    assert asyncio.run(played_by_own_policy(again.root)) == f"r, step-{saved_version(again):06d}"


def hub_stands_still(run: Run) -> None:
    """Suspend the hub while versions are published; resume it when its steps time out."""
    hub = run.role_pid("envhub")
    os.kill(hub, signal.SIGSTOP)
    time.sleep(ENV_TIMEOUT_S + 1.0)
    os.kill(hub, signal.SIGCONT)
    reached = run.metrics()[-1]["step"]
    run.wait_until(lambda: run.metrics()[-1]["step"] >= reached + 3)
    assert run.read("ledger.json")["failed"] == 0
    assert run.role_pid("envhub") == hub
    assert "role ended" not in (run.root / "logs" / "launcher.log").read_text(encoding="utf-8")


async def played_by_own_policy(root: Path) -> str:
    """Let the run's policy take one action at the dashboard's table; return the model's name."""
    table = InteractiveEpisodes()
    try:
        first = await table.open("babyai", "GoToLocal-test-0")
        return (await table.ask_run(first["id"], str(root)))["by"]
    finally:
        await table.shut_down()


def saved_version(run: Run) -> int:
    newest = sorted((run.root / "checkpoints").glob("step-*"))[-1]
    return json.loads((newest / "COMPLETE").read_text(encoding="utf-8"))["version"]
