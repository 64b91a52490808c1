"""Policies are trained on tasks with images of their own: whole runs with containers.

The small policy solves no task. A reward over the group gives its answers different rewards.
"""

import subprocess
import time
from pathlib import Path

import psutil
import pytest

from common.wire.messages import EndReason
from envhub.sandbox.containers import is_alive
from envhub.sandbox.engine import BUILT, LABEL
from learner.journal.journal import read_journal
from tests.end_to_end.runs import Run
from tests.envhub.envs.terminal.container_tasks import TASKS, write_task
from tests.envhub.envs.terminal.test_containers import ENGINE, owners, problem

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(2400)]
NAMES = sorted(TASKS)[:12]
MAX_IMAGES = 3
NUM_SLOTS = 4
NUM_STEPS = 3
RUN_S = 2000.0
GONE_S = 120.0  # Seconds for the containers of a killed hub to be removed.
OWN = """
import itertools
numbers = itertools.count()

def in_turn(draw, cfg):
    "All tasks, one after another."
    return draw.tasks[0].name, next(numbers) % draw.tasks[0].num_items

def variety(completion_ids):
    "The share of different tokens in the answers of an episode."
    return [len(set(ids)) / len(ids) for ids in completion_ids]
"""


def running(run: Run) -> list[str]:
    """Return the running containers of a run. The machine may have those of others."""
    line = f'{{{{.ID}}}} {{{{index .Labels "{LABEL}"}}}}'
    argv = [ENGINE, "ps", "--filter", f"label={LABEL}", "--format", line]
    listed = subprocess.run(argv, capture_output=True, encoding="utf-8", check=True).stdout
    processes = psutil.Process(run.process.pid).children(recursive=True)
    pids = {f"{each.pid}" for each in processes}
    pairs = [each.split() for each in listed.splitlines()]
    return [name for name, owner in pairs if owner.split(".")[1] in pids]


def built() -> list[str]:
    """Return the images that were built for tasks."""
    argv = [ENGINE, "images", "--quiet", "--filter", f"reference={BUILT}"]
    return subprocess.run(argv, capture_output=True, encoding="utf-8", check=True).stdout.split()


def left_over() -> list[str]:
    """Return the containers of processes that have ended."""
    return [owner for owner in owners() if not is_alive(owner)]


def of_process(pid: int) -> list[str]:
    """Return the containers and networks whose creator is a process or its child."""
    return [owner for owner in owners() if f".{pid}." in f".{owner}."]


def test_run_on_containers_survives_a_killed_container_and_a_killed_hub(tmp_path: Path) -> None:
    if reason := problem():
        pytest.skip(reason)
    before = set(left_over())
    tasks = tmp_path / "tasks"
    for name in NAMES:
        write_task(tasks, name)
    own = tmp_path / "own.py"
    own.write_text(OWN, encoding="utf-8")
    settings = (
        f"envs.terminal.train={tasks}",
        "envs.terminal.max_turns=2",
        "horizon.stages=[2]",
        f"envs.sandbox.backend={ENGINE}",
        "envs.sandbox.start_timeout_s=300",
        f"envs.sandbox.containers.max_images={MAX_IMAGES}",
        f"curriculum.kind={own}:in_turn",
        f"groups.reward={own}:variety",
        "groups.size=2",
        "groups.per_step=4",
        f"train.num_steps={NUM_STEPS}",
        f"actor.max_concurrent={NUM_SLOTS}",
        f"run.stall_s={RUN_S}",
    )
    with Run(tmp_path, *settings, config="terminal") as run:
        # The start itself plays an episode. A container that dies in it ends the start.
        ledger_file = run.root / "ledger.json"
        run.wait_until(
            lambda: bool(
                ledger_file.exists() and run.read("ledger.json")["issued"] and running(run)
            ),
            timeout_s=RUN_S,
        )
        victim = running(run)[0]
        subprocess.run([ENGINE, "kill", victim], check=True, capture_output=True)
        run.wait_until(lambda: len(run.metrics()) >= 1 and bool(running(run)), timeout_s=RUN_S)
        hub = psutil.Process(run.role_pid("envhub"))
        workers = [hub, *hub.children(recursive=True)]
        hub.kill()
        deadline_s = time.monotonic() + GONE_S
        while any(of_process(each.pid) for each in workers):
            assert time.monotonic() < deadline_s, owners()
            time.sleep(1.0)
        assert run.wait(timeout_s=RUN_S) == 0, run.output[-3_000:]
        ledger = run.read("ledger.json")
        episodes = [each for _, each in read_journal(run.root / "journal")]
        lines = run.metrics()
        log = (run.root / "logs" / "launcher.log").read_text(encoding="utf-8")
    assert "role=envhub exit=killed by SIGKILL" in log
    assert [line["step"] for line in lines] == [*range(1, NUM_STEPS + 1)]
    assert all(line["train/grad_norm"] > 0.0 for line in lines)
    outcomes = ("trained", "filtered", "stale", "failed", "in_flight")
    assert ledger["issued"] == sum(ledger[outcome] for outcome in outcomes), ledger
    assert ledger["lost"] == 0
    failed = [each for each in episodes if each.end_reason.is_infrastructure_failure]
    assert any(victim[:8] in each.error or "container" in each.error for each in failed), failed
    ended = [each for each in episodes if not each.end_reason.is_infrastructure_failure]
    assert {each.end_reason for each in ended} <= {EndReason.DONE, EndReason.TRUNCATED}
    assert {each.item_id for each in ended} >= {f"tasks-train-{n}" for n in range(len(NAMES) - 1)}
    assert set(left_over()) <= before
    assert len(built()) <= MAX_IMAGES + NUM_SLOTS  # Images in use at the last build remain.
