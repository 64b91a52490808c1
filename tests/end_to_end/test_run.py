"""The whole machine for real: every role a process, every plane its real part."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from common.store.journal import read_journal
from tests.end_to_end.runs import REPOSITORY, Run, balances

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_run_trains_evaluates_and_accounts_for_every_episode(tmp_path: Path) -> None:
    with Run(tmp_path, "eval.baselines=true") as run:
        assert run.wait() == 0, run.output
        assert run.left_over() == []
    ledger = run.read("ledger.json")
    assert balances(ledger)
    assert ledger["trained"] >= 3 * 2 * 2  # steps x groups x smallest group
    metrics = run.metrics()
    assert [line["step"] for line in metrics] == [1, 2, 3]
    noise = [line["weights/canary_abs_logprob"] for line in metrics[1:]]
    assert max(noise) <= 0.005  # the engine's weights are the learner's weights
    assert all(line["offpolicy/lag_max"] <= 4 for line in metrics)
    report = run.read("report.json")
    for name in ("before", "after"):
        assert report[name]["n"] == 8
        assert report[name]["ci95"][0] <= report[name]["success"] <= report[name]["ci95"][1]
    assert report["baselines"]["expert"]["success"] == 1.0
    assert report["heldout"]["num_shared_item_ids"] == 0
    assert report["peak_memory_bytes"]["all_roles"] > 100 << 20
    assert "<dt>peak memory</dt>" in (run.root / "report.html").read_text()
    assert "finished: step 3/3" in run.output
    before = load_file(REPOSITORY / "configs/policies/tiny/model.safetensors")
    after = load_file(run.root / "checkpoints/step-000003/model.safetensors")
    assert any((before[name] != after[name]).any() for name in before)


def test_killed_actor_is_restarted_and_no_episode_is_lost(tmp_path: Path) -> None:
    with Run(tmp_path, "train.num_steps=6", "eval.before=false") as run:
        run.wait_until(lambda: len(run.metrics()) >= 1)
        os.kill(run.role_pid("actor"), signal.SIGKILL)
        assert run.wait() == 0, run.output
        assert run.left_over() == []
    assert "exit" in run.output or "restart" in run.output
    ledger = run.read("ledger.json")
    assert balances(ledger)
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4, 5, 6]


def test_stopped_run_leaves_nothing_and_goes_on_at_the_next_step(tmp_path: Path) -> None:
    overrides = ("train.num_steps=200", "eval.before=false", "eval.after=false")
    with Run(tmp_path, *overrides) as run:
        run.wait_until(lambda: len(run.metrics()) >= 2)
        run.process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        assert run.wait(timeout_s=15) != 0
        assert time.monotonic() - started < 10.0
        assert run.left_over() == []
    reached = run.metrics()[-1]["step"]
    saved = sorted((run.root / "checkpoints").glob("step-*"))[-1]
    assert json.loads((saved / "COMPLETE").read_text())["version"] >= reached
    with Run(tmp_path, f"train.num_steps={reached + 3}", *overrides[1:]) as again:
        assert again.wait() == 0, again.output
    steps = [line["step"] for line in again.metrics()]
    assert steps == list(range(1, reached + 4))
    assert balances(again.read("ledger.json"))


def test_learner_that_takes_long_to_stop_still_saves(tmp_path: Path) -> None:
    overrides = ("train.num_steps=200", "eval.before=false", "eval.after=false")
    with Run(tmp_path, *overrides) as run:
        run.wait_until(lambda: len(run.metrics()) >= 2)
        learner = run.role_pid("learner")
        os.kill(learner, signal.SIGSTOP)  # as in a step of a large model
        reached = run.metrics()[-1]["step"]
        run.process.send_signal(signal.SIGINT)
        time.sleep(8.0)
        os.kill(learner, signal.SIGCONT)
        assert run.wait(timeout_s=60) == 130
        assert run.left_over() == []
    saved = sorted((run.root / "checkpoints").glob("step-*"))[-1]
    version = json.loads((saved / "COMPLETE").read_text())["version"]
    assert version >= reached
    assert f"saved at step {version}; the same command goes on" in run.output
    assert "Ctrl-C again stops at once" in run.output
    assert "error" not in run.output.splitlines()[-1]


def test_killed_learner_repeats_its_logged_steps_and_loses_nothing(tmp_path: Path) -> None:
    overrides = ("train.num_steps=8", "eval.before=false", "learner.checkpoint_every_steps=100")
    with Run(tmp_path, *overrides) as run:
        run.wait_until(lambda: len(run.metrics()) >= 3)
        os.kill(run.role_pid("learner"), signal.SIGKILL)
        assert run.wait() == 0, run.output
    log = (run.root / "logs" / "learner.log").read_text()
    assert "repeated step=" in log
    assert [line["step"] for line in run.metrics()][-1] == 8
    assert balances(run.read("ledger.json"))


def test_learner_killed_late_reads_only_what_is_not_settled(tmp_path: Path) -> None:
    overrides = ("train.num_steps=30", "eval.before=false", "eval.after=false")
    checkpoints = ("learner.checkpoint_every_steps=2", "learner.keep_checkpoints=1")

    def is_behind_the_start(run: Run) -> bool:
        path = run.root / "journal" / "replay_point.json"
        return path.exists() and json.loads(path.read_text())["position"]["offset"] > 0

    with Run(tmp_path, *overrides, *checkpoints) as run:
        run.wait_until(lambda: is_behind_the_start(run))
        num_before = sum(1 for _ in read_journal(run.root / "journal"))
        os.kill(run.role_pid("learner"), signal.SIGKILL)
        assert run.wait() == 0, run.output
        assert run.left_over() == []
    log = (run.root / "logs" / "learner.log").read_text()
    (num_read,) = re.findall(r"journal from=.* episodes=(\d+)", log)
    assert int(num_read) < num_before
    assert [line["step"] for line in run.metrics()] == list(range(1, 31))
    assert balances(run.read("ledger.json"))
    logged = (run.root / "journal" / "steps.jsonl").read_text()
    steps = [json.loads(text) for text in logged.splitlines()]
    trained = [name for step in steps for group in step["groups"] for name in group]
    assert len(set(trained)) == len(trained) == run.read("ledger.json")["trained"]


def test_synchronous_run_repeats_itself_bit_for_bit(tmp_path: Path) -> None:
    losses = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        overrides = (
            "train.mode=sync",
            "train.num_steps=5",
            "eval.before=false",
            "eval.after=false",
        )
        with Run(folder, *overrides) as run:
            assert run.wait() == 0, run.output
        metrics = run.metrics()
        losses.append([line["loss/policy"] for line in metrics])
        assert all(line["offpolicy/lag_max"] == 0 for line in metrics)
        assert all(line["offpolicy/noise_abs_logprob"] <= 0.005 for line in metrics)
    assert len(losses[0]) == 5
    assert losses[0] == losses[1]


def test_weights_that_are_held_back_make_every_token_exactly_so_old(tmp_path: Path) -> None:
    held_back = ("train.mode=sync", "learner.hold_back_steps=2", "train.num_steps=5")
    with Run(tmp_path, *held_back, "eval.before=false") as run:
        assert run.wait() == 0, run.output
    lags = [(line["offpolicy/lag_mean"], line["offpolicy/lag_max"]) for line in run.metrics()]
    assert lags == [(0, 0), (1, 1), (2, 2), (2, 2), (2, 2)]
    assert run.read("report.json")["after"]["n"] == 8  # by the last version, which is not held back
