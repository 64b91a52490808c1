"""The whole machine for real: every role a process, every plane its real part."""

import json
import os
import re
import signal
from pathlib import Path
from urllib.request import urlopen

import pytest
from safetensors.torch import load_file

from benchmarks.envhub.hub import ServiceProcess, hub_process
from learner.journal.journal import read_journal
from tests.end_to_end.offline import BASE, RATES, loss_of, successes
from tests.end_to_end.offline import run as run_command
from tests.end_to_end.runs import CLOSED_PROXY, REPOSITORY, Run, balances, unbounded
from tests.in_process import carry_out
from tests.tools.launch.ray.clusters import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_STEPS = 6
OVERRIDES = (
    f"train.num_steps={NUM_STEPS}",
    "eval.baselines=true",
    # In the engine's own arithmetic a canary is exact. In bf16 it is a mean of too few tokens.
    "learner.precision=fp32",
    "learner.checkpoint_every_steps=2",
    "learner.keep_checkpoints=1",
)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, int]:
    """A run whose learner was killed, and the number of the journal's episodes at that time."""
    with Run(tmp_path_factory.mktemp("run"), *OVERRIDES) as run:
        run.wait_until(lambda: is_journal_partly_settled(run))
        num_episodes = sum(1 for _ in read_journal(run.root / "journal"))
        os.kill(run.role_pid("learner"), signal.SIGKILL)
        assert run.wait() == 0, run.output
        assert run.left_over() == []
    return run, num_episodes


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, int, int]:
    """A run that was stopped by Ctrl-C, and that Ray's workers ended.

    The second start is on Ray, in a shell that names a proxy where no server listens. The numbers
    are the metric lines and the characters of the output at the stop.
    """
    folder = tmp_path_factory.mktemp("run")
    with Run(folder, *OVERRIDES) as run:
        run.wait_until(lambda: len(run.metrics()) > 1)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output
        assert run.left_over() == []
        num_steps = len(run.metrics())
        assert num_steps < NUM_STEPS
        length = len(run.output)
    with Run(folder, *OVERRIDES, "launcher=ray", env=CLOSED_PROXY) as again:
        assert again.wait() == 0, again.output
        wait_for(lambda: again.left_over() == [])  # Ray's own processes end a little later.
    return again, num_steps, length


def is_journal_partly_settled(run: Run) -> bool:
    """Return True if a restarted learner would not read the journal from its beginning."""
    path = run.root / "journal" / "replay_point.json"
    return path.exists() and json.loads(path.read_text(encoding="utf-8"))["position"]["offset"] > 0


def test_run_trains_evaluates_and_accounts_for_episodes(killed: tuple[Run, int]) -> None:
    run, _ = killed
    ledger = run.read("ledger.json")
    assert balances(ledger)
    assert unbounded(run.root) == []
    assert ledger["trained"] >= NUM_STEPS * 2 * 2  # steps x groups x smallest group
    metrics = run.metrics()
    assert [line["step"] for line in metrics] == list(range(1, NUM_STEPS + 1))
    name = "weights/canary_abs_logprob"  # A busy engine answers a step later.
    noise = [line[name] for line in metrics if name in line]
    assert noise
    assert max(noise) <= 1e-4  # The engine's weights are the learner's weights.
    assert all(line["offpolicy/lag_max"] <= 4 for line in metrics)
    report = run.read("report.json")
    for name in ("before", "after"):
        assert report[name]["n"] == 8
        assert report[name]["ci95"][0] <= report[name]["success"] <= report[name]["ci95"][1]
    assert report["baselines"]["expert"]["success"] == 1.0
    assert report["heldout"]["num_shared_item_ids"] == 0
    assert report["peak_memory_bytes"]["all_roles"] > 100 << 20
    peak = f'"all_roles":{report["peak_memory_bytes"]["all_roles"]}'
    assert peak in (run.root / "report.html").read_text(encoding="utf-8")
    assert f"finished: step {NUM_STEPS}/{NUM_STEPS}" in run.output
    before = load_file(REPOSITORY / "configs/policies/tiny/model.safetensors")
    newest = run.root / f"checkpoints/step-{NUM_STEPS:06d}"
    after = load_file(newest / "model.safetensors")
    assert any((before[name] != after[name]).any() for name in before)


@pytest.mark.long
def test_interrupted_run_resumes_at_its_next_step(stopped: tuple[Run, int, int]) -> None:
    run, num_steps, _ = stopped
    words = f"stopped with a checkpoint at step {num_steps}; the same command resumes"
    assert words in run.output
    assert [line["step"] for line in run.metrics()] == list(range(1, NUM_STEPS + 1))
    assert balances(run.read("ledger.json"))


@pytest.mark.long
def test_run_on_ray_bypasses_a_closed_proxy(stopped: tuple[Run, int, int]) -> None:
    run, _, length = stopped
    resumed = run.output[length:]
    assert "restart=" not in resumed
    assert f"finished: step {NUM_STEPS}/{NUM_STEPS}" in resumed
    assert "placed role=actor-0 node=" in resumed
    assert run.read("ledger.json")["failed"] == 0


def test_killed_learner_rereads_only_unsettled_episodes(killed: tuple[Run, int]) -> None:
    run, num_episodes = killed
    log = (run.root / "logs" / "learner.log").read_text(encoding="utf-8")
    num_read, *_ = re.findall(r"journal from=.* episodes=(\d+)", log)
    assert int(num_read) < num_episodes


def test_no_episode_is_trained_twice(killed: tuple[Run, int]) -> None:
    run, _ = killed
    logged = (run.root / "journal" / "steps.jsonl").read_text(encoding="utf-8")
    steps = [json.loads(text) for text in logged.splitlines()]
    trained = [name for step in steps for group in step["groups"] for name in group]
    assert len(set(trained)) == len(trained) == run.read("ledger.json")["trained"]


def test_recompute_repeats_a_run_with_a_killed_learner(
    killed: tuple[Run, int], capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = killed
    again = carry_out(["recompute", str(run.root)], capsys)
    assert again.returncode == 0, again.stdout + again.stderr
    checksums = f"equal: all {NUM_STEPS + 1} checksums of weights, versions 0 to {NUM_STEPS}"
    assert checksums in again.stdout


@pytest.mark.long
def test_sft_learns_the_newest_successes_of_a_run(killed: tuple[Run, int], tmp_path: Path) -> None:
    root = killed[0].root
    rows = successes(root / "journal")
    num_trained = min(len(rows) // 2, 30)
    assert num_trained > 10
    run_command(
        tmp_path,
        "sft",
        "sft.from_scratch=false",
        f"sft.demonstrations={root}",
        "sft.min_reward=1",
        f"sft.max_episodes={num_trained}",
        *RATES,
        f"sft.output={tmp_path}/policy",
    )
    taken = rows[-num_trained:]
    assert loss_of(tmp_path / "policy", taken) < loss_of(BASE, taken) - 0.02


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


def num_sessions(hub: ServiceProcess) -> int:
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
