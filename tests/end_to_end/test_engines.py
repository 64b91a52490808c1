"""Several engines behind one actor process, and engines of unlike precision in one run."""

import json
import os
import signal
import statistics
from pathlib import Path

import psutil
import pytest

from common.wire.messages import EpisodeKind, Trajectory
from learner.journal.journal import read_journal
from tests.end_to_end.runs import Run, balances, joining

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1500)]

TWO = {"actor-0", "actor-0~1"}
ENDLESS = ("train.num_steps=100000", "eval.before=false", "eval.after=false")
# Most steps find fresh episodes, so that the noise of each engine is measured at lag 0, too.
PRECISE = ("learner.precision=fp32", "learner.lr=1e-7", "learner.muon_lr=1e-7")


def played(run: Run) -> list[Trajectory]:
    """Return the training episodes in the journal."""
    every = [trajectory for _, trajectory in read_journal(run.root / "journal")]
    return [each for each in every if each.kind is EpisodeKind.TRAIN]


def members(run: Run) -> dict[str, dict[str, object]]:
    """Return the actors of the scheduler's status by name."""
    status = run.root / "status.json"
    actors = json.loads(status.read_text(encoding="utf-8"))["actors"] if status.exists() else []
    return {each["name"]: each for each in actors}


def test_two_engines_of_one_process_take_part_as_two(tmp_path: Path) -> None:
    more = ("actor.engines_per_process=2", "train.num_steps=6", "groups.per_step=4", *PRECISE)
    with Run(tmp_path, *more) as run:
        assert run.wait(timeout_s=900.0) == 0, run.output
    assert set(members(run)) == TWO
    assert not (run.root / "logs" / "actor-1.log").exists()
    newest = {name: 0 for name in TWO}
    for each in played(run):
        newest[each.actor] = max(newest[each.actor], int(each.versions.max()))
    assert min(newest.values()) > 0, newest
    assert balances(run.read("ledger.json"))
    known = {key for line in run.metrics() for key in line}
    assert {f"weights/canary_abs_logprob/{name}" for name in TWO} <= known


def test_death_of_one_engine_restarts_its_process_and_loses_nothing(tmp_path: Path) -> None:
    with Run(tmp_path, "actor.engines_per_process=2", *ENDLESS, *PRECISE) as run:
        run.wait_until(lambda: {each.actor for each in played(run)} == TWO)
        actor = psutil.Process(run.role_pid("actor"))
        cores = [each for each in actor.children(recursive=True) if "EngineCore" in each.name()]
        cores = cores or [c for c in actor.children() if "EngineCore" in " ".join(c.cmdline())]
        assert len(cores) == 2
        os.kill(cores[1].pid, signal.SIGKILL)
        run.wait_until(lambda: {m.get("num_restarts") for m in members(run).values()} == {1})
        num = len(played(run))
        run.wait_until(lambda: {each.actor for each in played(run)[num:]} == TWO)
        assert run.role_pid("actor") != actor.pid
        run.process.send_signal(signal.SIGTERM)
        run.wait(timeout_s=60.0)
    ledger = run.read("ledger.json")
    assert balances(ledger)
    assert ledger["failed"] == 0


def test_noise_of_unlike_engines_is_measured_for_each(tmp_path: Path) -> None:
    """One engine has bf16 weights, one fp32 weights and a quarter of the concurrency."""
    with Run(tmp_path, "actor.num_actors=0", "groups.per_step=4", *ENDLESS, *PRECISE) as run:
        run.wait_until((run.root / "addresses" / "scheduler").exists)
        exact = ("model.dtype=float32", "actor.max_concurrent=4")
        with (
            joining(run, "coarse", "model.dtype=bfloat16", "actor.max_concurrent=16"),
            joining(run, "exact", *exact),
        ):
            run.wait_until(lambda: len(measured(run, "exact")) >= 3, timeout_s=900.0)
            run.process.send_signal(signal.SIGTERM)
            run.wait(timeout_s=60.0)
    noise = {name: statistics.mean(measured(run, name)) for name in ("coarse", "exact")}
    assert noise["exact"] < 1e-4 < noise["coarse"] < 0.05
    for name in noise:
        key = f"offpolicy/weight_mean/{name}"
        weights = [line[key] for line in run.metrics() if key in line]
        assert statistics.mean(weights) == pytest.approx(1.0, abs=0.02)
    assert balances(run.read("ledger.json"))


def measured(run: Run, name: str) -> list[float]:
    """Return the differences of an engine from the trainer at the same version, in nats."""
    key = f"weights/canary_abs_logprob/{name}"
    return [line[key] for line in run.metrics() if key in line]
