"""Laws of live keys in a whole run: `set`, restarts, a resume, a recomputation."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.config.load import load_config
from tests.end_to_end.runs import REPOSITORY, Run, balances

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]

OVERRIDES = (
    "train.num_steps=400",
    "eval.before=false",
    "eval.after=false",
    "learner.optimizer=adamw",
    "learner.lr=1e-4",
    "learner.decay_start_frac=1",
    "learner.checkpoint_every_steps=50",
)


def command(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command about the run of a test."""
    argv = [sys.executable, "run.py", *words, f"run.dir={folder}"]
    return subprocess.run(argv, cwd=REPOSITORY, capture_output=True, encoding="utf-8", timeout=600)


def change(folder: Path, *changes: str) -> subprocess.CompletedProcess[str]:
    return command("set", "run.name=r", *changes, folder=folder)


def steps_with(run: Run, rate: float) -> list[int]:
    return [each["step"] for each in run.metrics() if each["train/lr"] == rate]


def test_changed_keys_hold_through_restarts_and_a_resume(tmp_path: Path) -> None:
    with Run(tmp_path, *OVERRIDES) as run:
        run.wait_until(lambda: len(run.metrics()) >= 2)
        done = change(tmp_path, "learner.lr=3e-4", "horizon.stages=[6]", "actor.max_concurrent=8")
        assert done.returncode == 0, done
        assert "change 1 is in force after step" in done.stdout
        run.wait_until(lambda: len(steps_with(run, 3e-4)) >= 1)
        refused = change(tmp_path, "run.seed=1")
        assert (refused.returncode, "cannot change during a run" in refused.stderr) == (2, True)
        os.kill(run.role_pid("scheduler"), signal.SIGKILL)
        assert change(tmp_path, "learner.lr=2e-4", "train.num_steps=500").returncode == 0
        run.wait_until(lambda: len(steps_with(run, 2e-4)) >= 1)
        run.process.send_signal(signal.SIGTERM)
        run.wait()
    lines = (run.root / "config_changes.jsonl").read_text(encoding="utf-8").splitlines()
    first, second = map(json.loads, lines)
    assert (first["number"], second["number"]) == (1, 2)
    assert first["old"] == {
        "learner.lr": "0.0001",
        "horizon.stages": "[4]",
        "actor.max_concurrent": "16",
    }
    cfg = load_config(str(run.root / "config.yaml"), [])
    assert (cfg.learner.lr, cfg.horizon.stages, cfg.train.num_steps) == (2e-4, [6], 500)
    before = len(run.metrics())
    with Run(tmp_path, *OVERRIDES) as again:  # The same command.
        again.wait_until(lambda: len(again.metrics()) >= before + 2)
        numbers = {each["config/number"] for each in again.metrics()[before:]}
        assert {each["train/lr"] for each in again.metrics()[before:]} == {2e-4}
        assert numbers == {2.0}
        step = again.metrics()[-1]["step"] + 8
        assert change(tmp_path, f"train.num_steps={step}").returncode == 0
        assert again.wait() == 0, again.output[-3_000:]
        assert again.metrics()[-1]["step"] == step
        assert again.read("finished.json")["version"] == step
        ledger = again.read("ledger.json")
        assert balances(ledger)
        assert ledger["lost"] == 0
    done = command("recompute", "r", folder=tmp_path)
    assert done.returncode == 0, done
