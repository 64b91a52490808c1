"""Groups and steps of a run are drawn again as they were."""

import json
from pathlib import Path
from random import Random

import pytest

from common.errors import ConfigError
from tests.tools.simulator.builders import make_play
from tools.simulator.workload import MeasuredWorkload, load_measured


def _groups(stage: int, versions: range) -> dict[int, list[tuple[int, list]]]:
    return {stage: [(v, [make_play(wall_s=float(v), worth=i) for i in range(4)]) for v in versions]}


def test_members_come_from_one_group_of_similar_version() -> None:
    workload = MeasuredWorkload(_groups(0, range(1000)), [(1.0, 1.0), (2.0, 2.0)])
    rng = Random(0)
    for _ in range(50):
        members = workload.group(rng, horizon=5, stage=0, version=500, size=4)
        assert {each.worth for each in members} == {0, 1, 2, 3}
        assert len({each.wall_s for each in members}) == 1
        assert 460 <= members[0].wall_s <= 540


def test_unseen_stage_uses_the_nearest_one() -> None:
    groups = _groups(0, range(5)) | _groups(2, range(100, 105))
    workload = MeasuredWorkload(groups, [(1.0, 1.0), (2.0, 2.0)])
    members = workload.group(Random(0), horizon=9, stage=3, version=1, size=8)
    assert len(members) == 8
    assert members[0].wall_s >= 100


def test_step_seconds_follow_the_tokens() -> None:
    steps = [(100.0, 3.0), (200.0, 5.0), (300.0, 7.0)]  # 1 s and 0.02 s per token
    workload = MeasuredWorkload(_groups(0, range(2)), steps)
    assert workload.step_s(Random(0), 400, version=0) == pytest.approx(9.0)


def _write_metrics(folder: Path, num_steps: int) -> None:
    """Steps of 4 s, of which 1 s is waiting, after a first one of 50 s."""
    lines = [
        {
            "step": step,
            "time_s": 50.0 + 4.0 * (step - 1),
            "wait/batch_s": 1.0,
            "offpolicy/lag_mean": 2.0 if step == num_steps else 0.5,
            "train/num_tokens": 100.0,
            "train/num_sampled_tokens": 20.0 if step == num_steps else 40.0,
        }
        for step in range(1, num_steps + 1)
    ]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )


def test_measured_pace_excludes_the_first_step(tmp_path: Path) -> None:
    _write_metrics(tmp_path, 12)
    measured = load_measured(tmp_path)
    assert measured.steps_per_h == pytest.approx(900.0)
    # Ten steps of 40 sampled tokens with lag 0.5, one of 20 with lag 2; its mean is over tokens.
    assert measured.lag_mean == pytest.approx((400 * 0.5 + 20 * 2.0) / 420)
    assert measured.learner_wait_frac == pytest.approx(0.25)


def test_missing_or_short_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run directory"):
        load_measured(tmp_path)
    _write_metrics(tmp_path, 3)
    with pytest.raises(ConfigError, match="3 steps"):
        load_measured(tmp_path)


def test_step_seconds_come_from_similar_versions() -> None:
    steps = [(100.0, 1.0)] * 200 + [(100.0, 9.0)] * 200
    workload = MeasuredWorkload(_groups(0, range(2)), steps)
    rng = Random(0)
    assert {workload.step_s(rng, 100, version=20) for _ in range(50)} == {1.0}
    assert {workload.step_s(rng, 100, version=380) for _ in range(50)} == {9.0}
