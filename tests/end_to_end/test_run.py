"""The whole machine for real: every role a process, every plane its real part."""

import json
import signal
from pathlib import Path
from urllib.request import urlopen

import pytest
from safetensors.torch import load_file

from benchmarks.envhub.hub import Service, hub_process
from tests.end_to_end.runs import REPOSITORY, Run, balances, unbounded

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_run_trains_evaluates_and_accounts_for_episodes(tmp_path: Path) -> None:
    # In the engine's own arithmetic a canary is exact; in bf16 it is a mean of too few tokens.
    with Run(tmp_path, "eval.baselines=true", "learner.precision=fp32") as run:
        assert run.wait() == 0, run.output
        assert run.left_over() == []
    ledger = run.read("ledger.json")
    assert balances(ledger)
    assert unbounded(run.root) == []
    assert ledger["trained"] >= 3 * 2 * 2  # steps x groups x smallest group
    metrics = run.metrics()
    assert [line["step"] for line in metrics] == [1, 2, 3]
    name = "weights/canary_abs_logprob"  # a busy engine answers a step later
    noise = [line[name] for line in metrics if name in line]
    assert noise
    assert max(noise) <= 1e-4  # the engine's weights are the learner's weights
    assert all(line["offpolicy/lag_max"] <= 4 for line in metrics)
    report = run.read("report.json")
    for name in ("before", "after"):
        assert report[name]["n"] == 8
        assert report[name]["ci95"][0] <= report[name]["success"] <= report[name]["ci95"][1]
    assert report["baselines"]["expert"]["success"] == 1.0
    assert report["heldout"]["num_shared_item_ids"] == 0
    assert report["peak_memory_bytes"]["all_roles"] > 100 << 20
    told = f'"all_roles":{report["peak_memory_bytes"]["all_roles"]}'
    assert told in (run.root / "report.html").read_text(encoding="utf-8")
    assert "finished: step 3/3" in run.output
    before = load_file(REPOSITORY / "configs/policies/tiny/model.safetensors")
    after = load_file(run.root / "checkpoints/step-000003/model.safetensors")
    assert any((before[name] != after[name]).any() for name in before)


def test_interrupted_run_resumes_at_its_next_step(tmp_path: Path) -> None:
    overrides = ("train.num_steps=4", "eval.before=false", "eval.after=false")
    with Run(tmp_path, *overrides) as run:
        run.wait_until(lambda: len(run.metrics()) >= 1)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output
        assert run.left_over() == []
    num_steps = len(run.metrics())
    assert f"stopped with a checkpoint at step {num_steps}; the same command resumes" in run.output
    with Run(tmp_path, *overrides) as again:
        assert again.wait() == 0, again.output
    assert [line["step"] for line in again.metrics()] == [1, 2, 3, 4]
    assert balances(again.read("ledger.json"))
    assert unbounded(again.root) == []


@pytest.mark.long
def test_stopped_sync_run_repeats_bit_for_bit(tmp_path: Path) -> None:
    losses = []
    for name in ("whole", "stopped"):
        folder = tmp_path / name
        folder.mkdir()
        overrides = (
            "train.mode=sync",
            "train.num_steps=4",
            "eval.before=false",
            "eval.after=false",
        )
        if name == "stopped":
            with Run(folder, *overrides) as run:
                run.wait_until(lambda run=run: len(run.metrics()) >= 2)
                run.process.send_signal(signal.SIGINT)
                assert run.wait() == 130, run.output
                assert len(run.metrics()) < 4
        with Run(folder, *overrides) as run:
            assert run.wait() == 0, run.output
        metrics = run.metrics()
        losses.append([line["loss/policy"] for line in metrics])
        assert all(line["offpolicy/lag_max"] == 0 for line in metrics)
        assert all(line["offpolicy/noise_abs_logprob"] <= 0.005 for line in metrics)
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]


def num_sessions(hub: Service) -> int:
    with urlopen(f"{hub.target.url}/healthz", timeout=10) as answer:
        return json.load(answer)["num_sessions"]


@pytest.mark.long
def test_held_back_weights_fix_the_token_lag(tmp_path: Path) -> None:
    """The run uses an external hub with its own token and starts no other."""
    held_back = ("train.mode=sync", "learner.hold_back_steps=2", "train.num_steps=5")
    with hub_process(["babyai"]) as hub:
        there = (f"envhub.url={hub.target.url}", f"envhub.token={hub.target.token}")
        with Run(tmp_path, *held_back, *there, "eval.before=false") as run:
            assert run.wait() == 0, run.output
            assert run.left_over() == []
        assert num_sessions(hub) == 0  # all were closed
    assert not (run.root / "logs" / "envhub.log").exists()
    assert balances(run.read("ledger.json"))
    token = str(hub.target.token)
    said = [
        run.output,
        *(path.read_text(encoding="utf-8") for path in (run.root / "logs").glob("*.log")),
    ]
    assert not [text for text in said if token in text]
    lags = [(line["offpolicy/lag_mean"], line["offpolicy/lag_max"]) for line in run.metrics()]
    assert lags == [(0, 0), (1, 1), (2, 2), (2, 2), (2, 2)]
    assert run.read("report.json")["after"]["n"] == 8  # by the last version, which is not held back
