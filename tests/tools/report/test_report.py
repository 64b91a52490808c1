"""Laws of the final report."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest

from common.config.eval import EvalSection
from common.config.model import ModelSection
from common.config.run import RunSection
from common.config.run_config import RunConfig
from common.config.tasks import TaskSection
from common.errors import ConfigError
from common.store.run_dir import RunDir
from common.text import html_text
from common.wire.messages import EndReason, EpisodeKind, Trajectory
from learner.journal.journal import PRUNED, JournalWriter
from tests.learner.journal.test_journal import make_trajectory
from tools.report.results import (
    HeldOutEpisode,
    Report,
    SubsetScore,
    paired_gain,
    score,
    write_report,
)


def play(index: int, *, is_success: bool, subset: str = "a") -> HeldOutEpisode:
    return HeldOutEpisode(
        item=("e", f"{subset}-test-{index}"), subset=subset, is_success=is_success
    )


def make_eval(name: str, index: int, *, is_success: bool, subset: str = "depth2") -> Trajectory:
    return dataclasses.replace(
        make_trajectory(f"eval-{name}/{index}"),
        kind=EpisodeKind.EVAL,
        group_id=f"eval-{name}",
        item_id=f"{subset}-test-{index}",
        is_success=is_success,
    )


def make_config(**sections: Any) -> RunConfig:
    return RunConfig(
        run=RunSection(name="a<b>&'\"", seed=7),
        model=ModelSection(path="<script>alert(1)</script>"),
        tasks=[TaskSection(env="textcraft", subset="<img src=x>")],
        **sections,
    )


def make_run(root: Path, trajectories: list[Trajectory], *, num_steps: int = 30) -> RunDir:
    run_dir = RunDir(root=root)
    writer = JournalWriter(run_dir.journal)
    for trajectory in trajectories:
        writer.append(trajectory)
    writer.close()
    run_dir.metrics.write_text(
        "".join(_line(step) for step in range(1, num_steps + 1)), encoding="utf-8"
    )
    books = {"trained": 200, "filtered": 40, "stale": 8, "failed": 2, "in_flight": 6}
    run_dir.ledger.write_text(json.dumps({"issued": 256, **books}), encoding="utf-8")
    return run_dir


def full_run(root: Path) -> RunDir:
    """40 items: before solves 16, after 30, random 4, expert all; two subsets."""
    solved = {"before-model": 16, "after-model": 30, "before-random_valid": 4, "before-expert": 40}
    trajectories = [
        make_eval(name, i, is_success=i < num, subset="depth2" if i % 2 else "<b>depth3")
        for name, num in solved.items()
        for i in range(40)
    ]
    trajectories += [
        dataclasses.replace(make_trajectory(f"g/{i}"), item_id=f"depth2-train-{i // 4}")
        for i in range(20)
    ]
    return make_run(root, trajectories)


def test_report_json_has_promised_keys_and_numbers(tmp_path: Path) -> None:
    run_dir = full_run(tmp_path)
    write_report(run_dir, make_config())
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report.keys() == {field.name for field in dataclasses.fields(Report)}
    baselines = report["baselines"]
    evaluations = [report["before"], report["after"]]
    evaluations += [baselines["random_valid"], baselines["expert"]]
    for evaluation in evaluations:
        assert evaluation.keys() == {"success", "n", "ci95", "by_subset"}
        assert evaluation["n"] == 40
        for subset in evaluation["by_subset"].values():
            assert subset.keys() == {"success", "n"}
    assert [e["success"] for e in evaluations] == [0.4, 0.75, 0.1, 1.0]
    assert report["baselines"].keys() == {"random_valid", "expert"}
    assert report["before"]["by_subset"]["depth2"] == {"success": 0.4, "n": 20}
    assert (report["mode"], report["steps"], report["episodes"]) == ("async", 30, 256)
    assert (report["wall_s"], report["seed"], report["absent"]) == (60.0, 7, {})
    assert report["lag_histogram"] == {"0": 30000, "1": 15000, "8": 30}
    assert report["peak_memory_bytes"] == {"all_roles": None, "by_role": {"learner": 130}}
    assert report["heldout"] == {
        "num_train_items_drawn": 5,
        "num_test_items": 40,
        "num_shared_item_ids": 0,
        "num_pruned_files": 0,
    }


def test_report_pairs_items_for_the_gain(tmp_path: Path) -> None:
    report = write_report(full_run(tmp_path), make_config())
    # 14 of 40 items gain 1, the rest 0: on [0, 1] the mean is 0.675, squared deviations are 2.275.
    # 1600 * 0.219375 / (2.275 + 0.219375) = 140.717 trials, t = 2.02269: 0.670056 +- 0.078883
    assert report.gain is not None
    assert report.gain.num_pairs == 40
    assert report.gain.success == pytest.approx(0.35)
    assert report.gain.ci95 == pytest.approx((0.340112 - 0.157766, 0.340112 + 0.157766), abs=1e-5)


def test_report_includes_the_peak_memory(tmp_path: Path) -> None:
    report = write_report(full_run(tmp_path), make_config(), peak_memory_bytes=3 << 30)
    assert report.peak_memory_bytes.all_roles == 3 << 30
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == json.loads(
        json.dumps(dataclasses.asdict(report))
    )


def test_gain_uses_only_items_played_in_both() -> None:
    before = [play(0, is_success=False), play(1, is_success=False), play(2, is_success=True)]
    after = [play(0, is_success=True), play(1, is_success=False), play(9, is_success=True)]
    gain = paired_gain(before, after)
    assert gain is not None
    assert (gain.success, gain.num_pairs) == (0.5, 2)
    assert paired_gain(before, []) is None
    alone = paired_gain(before[:1], after)
    assert alone is not None
    assert alone.ci95 is None


def test_score_splits_by_subset() -> None:
    plays = [
        play(0, is_success=True),
        play(1, is_success=False),
        play(2, is_success=True, subset="b"),
    ]
    result = score(plays)
    assert result.by_subset == {
        "a": SubsetScore(success=0.5, n=2),
        "b": SubsetScore(success=1.0, n=1),
    }


def test_equal_subsets_of_two_environments_have_scores_of_their_own() -> None:
    other = dataclasses.replace(play(0, is_success=False), item=("another", "a-test-0"))
    result = score([play(0, is_success=True), other, play(1, is_success=True, subset="b")])
    env = play(0, is_success=True).item[0]
    assert {name: part.success for name, part in result.by_subset.items()} == {
        f"{env}/a": 1.0,
        "another/a": 0.0,
        "b": 1.0,
    }


def test_report_counts_infrastructure_failures_separately(tmp_path: Path) -> None:
    good = [make_eval("before-model", i, is_success=True) for i in range(3)]
    failure = {"end_reason": EndReason.ENV_ERROR, "error": "gone", "is_success": False}
    lost = dataclasses.replace(make_eval("before-model", 3, is_success=False), **failure)
    retried = dataclasses.replace(good[0], **failure)
    run_dir = make_run(tmp_path, [retried, *good, lost, lost, good[1]])
    report = write_report(run_dir, make_config())
    assert report.before is not None
    assert (report.before.n, report.before.success) == (3, 1.0)
    assert report.failed_evals == {"before-model": 1}


def test_report_explains_an_absent_evaluation(tmp_path: Path) -> None:
    cfg = make_config(eval=EvalSection(after=False))
    lost = dataclasses.replace(
        make_eval("before-expert", 0, is_success=False), end_reason=EndReason.ENV_TIMEOUT
    )
    report = write_report(make_run(tmp_path, [lost]), cfg)
    assert (report.before, report.after, report.gain) == (None, None, None)
    assert report.absent == {
        "before-model": "no episode was played",
        "after-model": "not configured",
        "before-random_valid": "no episode was played",
        "before-expert": "all played episodes (1) ended with an infrastructure failure",
    }


def test_pruned_journal_is_named_as_the_reason_of_an_absence(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, [])
    pruned = {"before": 3, "at": "2026-01-01", "num_bytes": 9}
    (run_dir.journal / PRUNED).write_text(json.dumps(pruned), encoding="utf-8")
    report = write_report(run_dir, make_config())
    assert report.absent["before-model"] == (
        "no episode is in the journal, of which 3 files were pruned"
    )
    assert report.heldout.num_pruned_files == 3


def test_empty_run_still_gets_a_report(tmp_path: Path) -> None:
    report = write_report(RunDir(root=tmp_path), make_config())
    assert (report.steps, report.episodes, report.wall_s) == (0, 0, None)
    assert answers_of(tmp_path / "report.html")["api/runs"][0]["episodes"] == 0


def answers_of(page: Path) -> dict[str, Any]:
    """What the page's scripts find in it."""
    _, _, rest = page.read_text(encoding="utf-8").partition(
        '<script type="application/json" id="answers">'
    )
    return json.loads(rest.partition("</script>")[0])


def test_page_scores_equal_the_report_file(tmp_path: Path) -> None:
    report = write_report(full_run(tmp_path), make_config())
    answers = answers_of(tmp_path / "report.html")
    (path,) = (each for each in answers if each.endswith("/fleet"))
    shown = answers[path.removesuffix("/fleet")]
    found = shown["evaluations"]
    assert list(found) == ["before-model", "after-model", "before-random_valid", "before-expert"]
    for name, known in zip(found, report.evaluations.values(), strict=True):
        assert (found[name]["success"], found[name]["num"]) == (known.success, known.n)
        assert found[name]["ci95"] == pytest.approx(known.ci95)
        for subset, part in known.by_subset.items():
            assert found[name]["by_subset"][subset]["success"] == part.success
            low, high = found[name]["by_subset"][subset]["ci95"]
            assert low < part.success <= high
    assert shown["report"]["gain"]["success"] == pytest.approx(0.35)
    assert (shown["marks"], shown["ledger"]["issued"]) == (
        [{"step": 1, "horizon": 5}, {"step": 11, "horizon": 10}, {"step": 21, "horizon": 20}],
        256,
    )


def test_hostile_text_is_escaped_on_every_page() -> None:
    hostile = "</title><script>x\x00\x1b[31m\u202eevil\u2066\ud83d&\"'"
    shown = html_text(hostile)
    assert "&lt;script&gt;x\ufffd\ufffd[31m\ufffdevil\ufffd\ufffd&amp;&quot;" in shown
    assert not set("\x00\x1b\u202e\u2066\ud83d<") & set(shown)
    right_to_left = "שלום, \u0645\u0631\u062d\u0628\u0627\n"
    assert html_text(right_to_left) == right_to_left


def _line(step: int) -> str:
    noise = random.Random(step)
    line = {
        "step": step,
        "time_s": 2.0 * step,
        "reward/success": min(1.0, 0.4 + 0.012 * step + noise.uniform(-0.1, 0.1)),
        "horizon/value": 5 if step <= 10 else 10 if step <= 20 else 20,
        "episodes/truncated_frac": None if step == 5 else 0.5 / step,
        "episodes/turns_mean": 4 + 0.1 * step,
        "offpolicy/lag_0_tokens": 1000,
        "offpolicy/lag_1_tokens": 500,
        "offpolicy/lag_8_tokens": 1,
        "offpolicy/ess_frac": 0.95,
        "policy/entropy": 1.0 / step,
        "train/tokens_per_s": 7400 + 100 * noise.random(),
        "train/step_s": 1.2,
        "wait/batch_s": 0.6,
        "publish/total_s": 0.1,
        "publish/pause_s": 0.05,
        "actor/tokens_per_s": 3200 + 300 * noise.random(),
        "actor/episodes_per_s": 12 + noise.random(),
        "memory/learner_rss_bytes": 100 + step,
    }
    return json.dumps(line) + "\n"


def test_damaged_ledger_error_names_the_remedy(tmp_path: Path) -> None:
    run_dir = full_run(tmp_path)
    for content in (b"{", b"[1]", b"\xff"):
        run_dir.ledger.write_bytes(content)
        with pytest.raises(ConfigError, match=r"ledger\.json is damaged .*Remove it"):
            write_report(run_dir, make_config())
