"""Laws of the numbers and tables of an evaluation, and of the curve beside training."""

import dataclasses
import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from common.wire.messages import EndReason, EpisodeKind
from learner.intervals import wilson_interval
from learner.journal.journal import JournalWriter
from tests.learner.journal.test_journal import make_trajectory
from tools.evaluate.scores import ItemPlays, all_scores, as_markdown, pass_at, scores
from tools.report.results import eval_curve, read_totals


def item(name: str, marks: str, *, env: str = "textcraft", subset: str = "depth1") -> ItemPlays:
    """marks: one letter per sample: 1 solved, 0 not, x failed by infrastructure, - not played."""
    plays = ItemPlays(env=env, subset=subset, item_id=name, num_missing=marks.count("-"))
    for mark in marks.replace("-", ""):
        end = EndReason.ENV_ERROR if mark == "x" else EndReason.DONE
        plays.add(
            dataclasses.replace(
                make_trajectory(name),
                is_success=mark == "1",
                reward=1.0 if mark == "1" else 0.25,
                end_reason=end,
            )
        )
    return plays


@pytest.mark.parametrize(("num", "solved"), [(4, 0), (4, 1), (4, 3), (5, 2)])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_pass_at_k_equals_solved_draw_share(num: int, solved: int, k: int) -> None:
    samples = [1] * solved + [0] * (num - solved)
    draws = [any(draw) for draw in combinations(samples, k)]
    expected = sum(draws) / len(draws)
    assert pass_at(k, num_samples=num, num_solved=solved) == pytest.approx(expected)


def test_identical_samples_narrow_no_interval() -> None:
    once = scores([item(str(i), "1" if i < 3 else "0") for i in range(10)], k=1)
    often = scores([item(str(i), "1111" if i < 3 else "0000") for i in range(10)], k=4)
    assert often["avg_at_k"]["ci95"] == pytest.approx(once["avg_at_k"]["ci95"])
    assert often["success"]["ci95"] == pytest.approx(once["success"]["ci95"])


def test_failed_and_missing_items_enter_no_mean() -> None:
    told = scores([item("a", "1x"), item("b", "xx"), item("c", "0-")], k=2)
    assert (told["num_items"], told["num_episodes"]) == (3, 2)
    assert (told["num_failed"], told["num_missing"]) == (3, 1)
    assert told["failures"] == {"env_error": 3}
    assert told["success"]["mean"] == 0.5
    assert told["avg_at_k"]["num_items"] == 2
    assert told["pass_at"]["2"] == {"mean": None, "ci95": None, "num_items": 0}
    assert told["score"]["mean"] == pytest.approx(0.625)


def test_overall_is_weighted_by_items() -> None:
    items = [item(str(i), "1", subset="depth1") for i in range(3)]
    items.append(item("d", "0", subset="depth2"))
    told = all_scores(items, k=1)
    assert told["overall"]["avg_at_k"]["mean"] == 0.75
    assert told["by_env"]["textcraft"]["by_subset"]["depth2"]["avg_at_k"]["mean"] == 0.0


def _entry(items: list[ItemPlays], *, k: int, label: str = "m") -> dict[str, object]:
    return {
        "digest": "d0",
        "label": label,
        "policy": {"source": "engine"},
        "k": k,
        "split": "test",
        "items": "spread",
        **all_scores(items, k=k),
    }


def test_table_shows_dashes_for_unplayed_columns() -> None:
    items = [item("a", "11", subset="depth1"), item("b", "10", subset="depth3")]
    lines = as_markdown([_entry(items, k=2)]).splitlines()
    assert "| Model |  | Depth 1 | Depth 2 | Depth 3 | Depth 4 | Overall |" in lines
    row = next(line for line in lines if line.startswith("| m | avg@2 |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert [cell.split(" ")[0] for cell in cells[2:]] == ["100.00", "-", "50.00", "-", "75.00"]
    assert any(line.startswith("| m | pass@2 | 100.00") for line in lines)


def test_pooled_column_is_weighted_by_items() -> None:
    items = [item(str(i), "1", env="webarena", subset="GitLab") for i in range(3)]
    items.append(item("r", "0", env="webarena", subset="Reddit"))
    row = next(
        line for line in as_markdown([_entry(items, k=1)]).splitlines() if "| success |" in line
    )
    assert row.split("|")[6].strip() == "75.00"


def test_minisites_are_distinguished_from_webarena() -> None:
    text = as_markdown([_entry([item("a", "1", env="minisites", subset="Maps")], k=1)])
    assert "## Web navigation (minisites, not WebArena)" in text
    assert "| Model |  | Shopping | CMS | Maps | G & R | Overall |" in text


def test_unknown_subsets_get_their_own_columns() -> None:
    text = as_markdown([_entry([item("a", "1", env="babyai", subset="GoToLocal")], k=1)])
    assert "| Model |  | GoToLocal | Overall |" in text


def test_curve_reports_success_and_versions_per_evaluation(tmp_path: Path) -> None:
    def play(
        name: str, versions: list[int], *, solved: bool, end: EndReason = EndReason.DONE
    ) -> None:
        writer.append(
            dataclasses.replace(
                make_trajectory(name),
                kind=EpisodeKind.EVAL,
                is_success=solved,
                end_reason=end,
                versions=np.array([-1, *versions], dtype=np.int32),
            )
        )

    writer = JournalWriter(tmp_path)
    play("eval-step-4-model/0", [4, 4], solved=True)
    play("eval-step-4-model/1", [5, 6], solved=False)
    play("eval-step-4-model/2", [4, 4], solved=False, end=EndReason.ENV_ERROR)
    play("eval-step-2-model/0", [2, 2], solved=True, end=EndReason.ENV_ERROR)
    play("eval-step-2-model/0", [2, 2], solved=True)  # played again
    play("eval-before-model/0", [0, 0], solved=True)
    writer.close()
    early, late = eval_curve(read_totals(tmp_path))
    assert (early.step, early.num, early.num_failed, early.success) == (2, 1, 0, 1.0)
    assert (late.step, late.num, late.num_failed, late.success) == (4, 2, 1, 0.5)
    assert (late.first_version, late.last_version) == (4, 6)
    assert (late.own_version_frac, late.mixed_frac) == (0.5, 0.5)
    assert math.isclose(late.ci95[0], wilson_interval(1, 2)[0])
