"""Laws of a learner that is computed again from what its run has kept."""

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.store.run_dir import RunDir
from learner.journal.journal import journal_files
from learner.journal.upkeep import prune
from learner.recovery.checksums import ChecksumLog, read_checksums
from learner.recovery.step_log import StepLog, read_steps
from learner.training.checkpoint import load_values
from learner.training.optimizer import LossScale
from tests.tools.recompute.lives import config, live
from tools.cli.command_line import ParsedCommand
from tools.recompute.command import recompute

LORA = ("learner.optimizer=adamw", "learner.lora.rank=4", "algorithm.kl_coef=0.1")
CRITIC = (
    *("algorithm.advantage=ppo", "learner.ppo_epochs=2", "learner.num_minibatches=2"),
    *("algorithm.kl_coef=0.1", "algorithm.entropy_coef=0.01"),
)


def computed(root: Path, *words: str, steps: str | None = None) -> tuple[int, list[str]]:
    """Return the exit code of the command and its output."""
    request = ParsedCommand(
        command="recompute",
        config=None,
        overrides=[str(root), *words],
        is_dry=False,
        suite=None,
        json=None,
        steps=steps,
    )
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = recompute(request)
    return code, output.getvalue().splitlines()


def result(root: Path) -> dict[str, Any]:
    return json.loads((root / "recompute.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def _run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A learner that was killed after five batches, and went on from the checkpoint of step 2."""
    root = tmp_path_factory.mktemp("run") / "r"
    live(root, config(), range(5), skipped=[1], nan=[3], saved=[2])
    return live(root, config(), range(5, 7))


@pytest.fixture
def run(_run: RunDir, tmp_path: Path) -> RunDir:
    """A copy: a bug report is a folder."""
    return RunDir(root=Path(shutil.copytree(_run.root, tmp_path / "copy")))


def flip(run: RunDir, episode: str) -> None:
    """Flip one bit of the tokens of an episode in the journal."""
    for path in journal_files(run.journal).values():
        content = bytearray(path.read_bytes())
        at = content.find(episode.encode())
        if at >= 0:
            content[at + 300] ^= 4
            path.write_bytes(content)
            return
    raise AssertionError(episode)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        LORA,
        pytest.param(CRITIC, marks=pytest.mark.long),
        pytest.param((*LORA, "learner.compile=true"), marks=pytest.mark.long),
    ],
)
def test_recompute_reproduces_the_learner_over_restarts(
    tmp_path: Path, settings: tuple[str, ...]
) -> None:
    root = tmp_path / "r"
    live(root, config(*settings), range(5), skipped=[1], nan=[3], saved=[2])
    # The restart does not repeat the first settings.
    live(root, config(*settings, "learner.lr=3e-4", "train.num_steps=9"), range(5, 8), saved=[6])
    live(root, config(*settings, "learner.lr=3e-4", "train.num_steps=9"), range(8, 9))
    assert len(read_checksums(root / "checksums.jsonl").starts) == 3
    assert computed(root)[0] == 0
    assert result(root)["equal_checksums"] == 9  # versions 0 to 8
    code, said = computed(root, steps="4:6")
    assert code == 0, said
    assert "step-000002 (step 2)" in said[0]
    assert result(root)["equal_checksums"] == 5  # 2 to 6


@pytest.mark.slow
def test_recompute_reproduces_overflows_and_the_scale_of_fp16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LossScale, "FIRST", 2.0**24)  # The first steps overflow.
    root = tmp_path / "r"
    cfg = config("learner.precision=fp16")
    live(root, cfg, range(3), saved=[1])
    run = live(root, cfg, range(3, 8), saved=[6])
    scales = [
        load_values(run.checkpoints / f"step-{step:06d}")["loss_scale"]["value"] for step in (2, 7)
    ]
    assert LossScale.FIRST > scales[0] > scales[1]
    code, said = computed(root)
    assert code == 0, said
    assert result(root)["equal_checksums"] == 9
    lines = read_checksums(root / "checksums.jsonl").lines.values()
    assert 1 < len({line.digests.weights for line in lines}) < 8  # Some steps changed nothing.


@pytest.mark.slow
def test_recompute_reproduces_parts_over_restarts(tmp_path: Path) -> None:
    root = tmp_path / "r"
    cfg = config(*("algorithm.advantage=ppo", "learner.partial_episodes=turns", "train.mode=async"))
    run = live(root, cfg, range(3), saved=[0], early=[1])
    live(root, cfg, range(3, 5), late=[4])
    steps = {step.version: step.groups for step in read_steps(run.steps)}
    assert steps[2][-1][0].startswith("g0000900/0@0-2-")
    assert steps[5][-1] == ["g0000900/0@2"]
    code, said = computed(root)
    assert code == 0, said
    assert result(root)["equal_checksums"] == 6
    lines = run.parts.read_bytes()
    run.parts.write_bytes(b"")
    code, said = computed(root)
    assert code == 1
    assert "g0000900/0@0-2-" in said[-1]
    run.parts.write_bytes(lines)


@pytest.mark.slow
@pytest.mark.long
def test_recompute_reproduces_killed_ranks(tmp_path: Path) -> None:
    running = ["algorithm.advantage=running", "learner.num_ranks=2", "learner.compile=true"]
    root = tmp_path / "r"
    cfg = config(*running, "algorithm.correction=second_moment", "algorithm.m2_threshold=0.3")
    live(root, cfg, range(4), skipped=[1], nan=[2], saved=[0])
    live(root, cfg, range(4, 5))
    code, said = computed(root)  # It starts from the first weights without a restart.
    assert code == 0, said
    assert result(root)["equal_checksums"] == 5


def test_recompute_finds_a_flipped_journal_bit_at_its_step(run: RunDir) -> None:
    flip(run, "g0000010/1")  # Batch 5 is step 5.
    code, said = computed(run.root)
    assert code == 1
    assert said[-1].startswith("step 5 differs: batch: episode g0000010/1")
    assert "journal/" in said[-1]
    assert result(run.root)["first_difference"]["step"] == 5
    assert result(run.root)["equal_checksums"] == 5  # 0 to 4
    assert computed(run.root, steps=":4")[0] == 0


def test_recompute_names_the_first_difference(run: RunDir) -> None:
    lines = [json.loads(text) for text in run.checksums.read_text(encoding="utf-8").splitlines()]
    at = next(i for i, line in enumerate(lines) if line.get("version") == 3)
    for stage, name in (
        ("episodes", "batch: episode g0000006/0"),
        ("advantages", "advantage"),
        ("minibatches", "batch: the same episodes"),
        ("controller", "controller"),
        ("weights", "optimizer"),
    ):
        changed = json.loads(json.dumps(lines))
        digests = changed[at]["digests"]
        digests[stage] = ["0" * 8, *digests[stage][1:]] if stage == "episodes" else "0"
        run.checksums.write_text(
            "".join(json.dumps(line) + "\n" for line in changed), encoding="utf-8"
        )
        code, said = computed(run.root, steps=":3")
        assert code == 1
        assert said[-1].startswith(f"step 3 differs: {name}"), said


def test_recompute_reports_different_start_weights_and_machine(run: RunDir) -> None:
    lines = [json.loads(text) for text in run.checksums.read_text(encoding="utf-8").splitlines()]
    lines[0]["start"]["weights"] = "0" * 32
    lines[0]["start"]["machine"]["cpu"] = "Some Other CPU"
    run.checksums.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    code, said = computed(run.root)
    assert code == 1
    assert any("this machine differs" in text and "was Some Other CPU" in text for text in said)
    assert said[-1].startswith("step 0 differs: weights: configs/policies/tiny")


def test_running_run_is_recomputed_up_to_its_last_record(run: RunDir) -> None:
    whole = run.checksums.read_bytes()
    run.checksums.write_bytes(whole[:-20])  # Cut within the last line.
    with run.steps.open("ab") as steps:
        steps.write(b'{"version":7,"gro')
    code, said = computed(run.root)
    assert code == 0
    assert any(text.startswith("1 batch was not compared") for text in said)
    assert "versions 0 to 6" in said[-1]


def test_pruned_range_is_refused_by_name(run: RunDir) -> None:
    numbers = list(journal_files(run.journal))
    prune(run.journal, before=numbers[3], may_remove=lambda *_: True)
    with pytest.raises(ConfigError, match=r"--steps=1:6: .*pruned.*--steps=3:6 can be") as refused:
        computed(run.root)
    assert "steps 1 to" in str(refused.value)
    assert computed(run.root, steps="3:6")[0] == 0
    with pytest.raises(ConfigError, match="has steps 1 to 6"):
        computed(run.root, steps="3:60")
    run.checksums.unlink()
    with pytest.raises(ConfigError, match=r"checksums\.jsonl is missing"):
        computed(run.root, steps="3:6")


def test_steps_pruned_from_the_log_are_refused_by_name(run: RunDir) -> None:
    steps, size = list(read_steps(run.steps)), run.steps.stat().st_size
    before = steps[2].journal_file  # Step 2 comes after a step and a skipped batch.
    prune(run.journal, before=before, may_remove=lambda *_: True)
    log, sums = StepLog(run.steps, prune_from_bytes=0), ChecksumLog(run.checksums, version=6)
    assert log.prune(before=before, needed=size)
    sums.prune(log.pruned.number)
    left = [step.number for step in read_steps(run.steps)]
    assert left == [step.number for step in steps if step.number > log.pruned.number]
    for each in (log, sums):
        each.close()
    gone = rf"--steps=1:6: steps 1 to {log.pruned.version} are no longer in .*--steps=3:6 can be"
    with pytest.raises(ConfigError, match=gone):
        computed(run.root)
    assert computed(run.root, steps="3:6")[0] == 0


@pytest.mark.long
def test_overrides_are_counterfactual_after_the_first_step(run: RunDir) -> None:
    code, said = computed(run.root, "learner.lr=1e-2", "algorithm.correction=icepop")
    assert code == 0, said
    rows = result(run.root)["rows"]
    assert [row["step"] for row in rows] == [1, 1, 2, 3, 4, 5, 6]
    assert [row["policy"] for row in rows] == ["recorded"] + 6 * ["counterfactual"]
    assert (rows[0]["ess_frac"], rows[0]["kl"]) == (1.0, 0.0)
    assert all(0 < row["ess_frac"] < 1 and row["kl"] > 0 for row in rows[1:])
    assert [row["note"] for row in rows if row["note"]] == ["skipped by the run"]
    assert any("mask_low" in text or "0.5" in text for text in said[:3]), said[:3]
    assert rows[0]["metrics"]["train/lr"] == pytest.approx(10 * rows[0]["recorded"]["train/lr"])


@pytest.mark.long
@pytest.mark.slow
def test_learner_without_episodes_is_not_the_recorded_one(run: RunDir) -> None:
    code, lines = computed(run.root, "horizon=998:999")
    assert code == 0
    rows = result(run.root)["rows"]
    assert {row["note"] for row in rows} == {"no episode left"}
    trained = [row["step"] for row in rows if not row["recorded"].get("controller/skipped")]
    policies = {row["policy"] for row in rows if row["step"] > trained[0]}
    assert policies == {"counterfactual"}
    assert "the overrides change nothing on this data" not in lines


def test_running_baseline_is_recomputed_for_overrides(tmp_path: Path) -> None:
    running = config("algorithm.advantage=running")
    live(tmp_path / "r", running, range(4), skipped=[1], nan=[2], saved=[2])
    live(tmp_path / "r", running, range(4, 6))
    assert computed(tmp_path / "r")[0] == 0
    _, said = computed(tmp_path / "r", "algorithm.mask_low=0.4", steps="3:5")
    assert "the overrides change nothing on this data" in said


def test_ineffective_overrides_are_reported_and_impossible_ones_refused(run: RunDir) -> None:
    _, said = computed(run.root, "algorithm.mask_low=0.4", steps="3:5")
    assert "the overrides change nothing on this data" in said
    _, said = computed(run.root, "horizon=1:2", steps="5:6")
    assert all(row["note"] == "no episode left" for row in result(run.root)["rows"])
    for word, why in (
        ("actor.temperature=0.5", "playing and batching"),
        ("horizon.stages=[5]", "horizon=a:b"),
        ("learner.port=5", "does not affect training"),
        ("algorithm.filter_zero_variance=false", "which groups become batches"),
        ("drop=soon", "expects end reasons"),
        ("algorithm.corection=none", "corection"),
    ):
        with pytest.raises(ConfigError, match=why):
            computed(run.root, word)


@pytest.mark.long
def test_restart_warns_when_it_does_not_repeat_its_past(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    before = len(run.checksums.read_text(encoding="utf-8").splitlines())
    live(run.root, config(), [])
    assert len(run.checksums.read_text(encoding="utf-8").splitlines()) == before
    assert "differs from its first computation" not in caplog.text
    live(run.root, config("learner.beta2=0.5"), [])
    assert "repeated step=4 differs from its first computation: optimizer" in caplog.text
