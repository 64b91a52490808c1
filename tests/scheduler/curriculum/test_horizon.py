"""The horizon as a function of the version, against tables computed by hand."""

import pytest

from common.config.horizon import HorizonKind, HorizonSection
from scheduler.curriculum.curriculum import HorizonStamp, horizon_at


def _stamps(cfg: HorizonSection, versions: range) -> list[tuple[int, int]]:
    stamps = [horizon_at(cfg.policy("maze"), version) for version in versions]
    return [(stamp.horizon, stamp.stage) for stamp in stamps]


def test_stepwise_horizon_holds_each_stage_for_every_steps() -> None:
    cfg = HorizonSection(kind=HorizonKind.STEPWISE, stages=[10, 20, 30], every_steps=3)
    # version v is the state while optimizer step v + 1 is trained: steps 1-3, 4-6, 7 and on
    expected = [(10, 0)] * 3 + [(20, 1)] * 3 + [(30, 2)] * 4
    assert _stamps(cfg, range(10)) == expected


def test_papers_stepwise_horizon_changes_at_steps_101_and_201() -> None:
    cfg = HorizonSection(kind=HorizonKind.STEPWISE, stages=[10, 20, 30], every_steps=100)
    steps = (1, 100, 101, 200, 201, 300, 999)
    at = {step: horizon_at(cfg.policy("maze"), step - 1).horizon for step in steps}
    assert at == {1: 10, 100: 10, 101: 20, 200: 20, 201: 30, 300: 30, 999: 30}


def test_stepwise_horizon_may_change_at_every_step() -> None:
    cfg = HorizonSection(kind=HorizonKind.STEPWISE, stages=[1, 2, 3], every_steps=1)
    assert _stamps(cfg, range(4)) == [(1, 0), (2, 1), (3, 2), (3, 2)]


def test_fixed_horizon_is_always_the_last_stage() -> None:
    policy = HorizonSection(stages=[10, 20], every_steps=1).policy("maze")
    assert {horizon_at(policy, version) for version in range(50)} == {
        HorizonStamp(horizon=20, stage=1)
    }


def test_linear_horizon_rises_by_whole_turns_then_stays() -> None:
    cfg = HorizonSection(kind=HorizonKind.LINEAR, stages=[4, 7, 9], over_steps=10)
    # 4 + 5 v / 10: 4, 4.5, 5, 5.5, 6, 6.5, 7, 7.5, 8, 8.5, 9; the stage counts 7 and 9
    expected = [(4, 0), (4, 0), (5, 0), (5, 0), (6, 0), (6, 0), (7, 1), (7, 1), (8, 1), (8, 1)]
    assert _stamps(cfg, range(13)) == [*expected, (9, 2), (9, 2), (9, 2)]


def test_gated_horizon_is_no_function_of_the_version() -> None:
    policy = HorizonSection(kind=HorizonKind.GATED, stages=[4, 7]).policy("maze")
    with pytest.raises(ValueError, match="depends on the results of the run"):
        horizon_at(policy, 3)
