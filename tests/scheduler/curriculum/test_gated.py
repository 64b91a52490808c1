"""When a gated horizon moves, with numbers worked out by hand."""

import json
import logging
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config.horizon import GatedSection, HorizonKind, HorizonSection
from scheduler.curriculum.curriculum import UNKNOWN, GatedHorizon, StepSeen, success_gain
from scheduler.state import restore, save

GATED = GatedSection(
    window_steps=4, min_steps=6, min_truncated_frac=0.25, max_gain=0.1, backoff_steps=2
)


def make_gated(gated: GatedSection = GATED, stages: tuple[int, ...] = (5, 10, 20)) -> GatedHorizon:
    section = HorizonSection(kind=HorizonKind.GATED, stages=list(stages), gated=gated)
    return GatedHorizon(section.policy("maze"), "maze")


PLAIN = StepSeen(
    version=0, num_episodes=10, num_solved=5, num_truncated=5, entropy=1.0, ess_frac=0.9
)


def seen(version: int, **changes: Any) -> StepSeen:
    return replace(PLAIN, version=version, **changes)


def stages_of(gated: GatedHorizon, steps: list[StepSeen]) -> list[int]:
    stages: list[int] = []
    for step in steps:
        gated.step(step)
        stages.append(gated.stage)
    return stages


def test_gain_is_weighted_slope_times_span() -> None:
    # success 0.2, 0.3, 0.4, 0.5 over versions 1-4: slope 0.1, span 3
    steps = [seen(v, num_solved=v + 1) for v in (1, 2, 3, 4)]
    assert success_gain(steps) == pytest.approx(0.3)
    # weights 30, 10 at versions 1, 3 with success 0.1, 0.5: slope 0.2, whatever the weights
    pair = [
        seen(1, num_episodes=30, num_solved=3),
        seen(2, num_episodes=0, num_solved=0),
        seen(3, num_solved=5),
    ]
    assert success_gain(pair) == pytest.approx(0.4)
    # 20 episodes at version 1 (0.5), 10 at 2 (0.5), 10 at 3 (0.9); mean x 1.75, mean y 0.6:
    # spread 20*.5625 + 10*.0625 + 10*1.5625 = 27.5, joint 1.5 - .25 + 3.75 = 5, slope 2/11
    uneven = [seen(1, num_episodes=20, num_solved=10), seen(2), seen(3, num_solved=9)]
    assert success_gain(uneven) == pytest.approx(4 / 11)
    assert success_gain([seen(1)]) is None


def test_gated_horizon_advances_when_truncated_and_flat() -> None:
    gated = make_gated()
    # stage 0 for 6 steps, stage 1 for 6 more, stage 2 for ever
    assert stages_of(gated, [seen(v) for v in range(1, 21)]) == [0] * 5 + [1] * 6 + [2] * 9
    assert [(m.version, m.from_stage, m.to_stage) for m in gated.moves] == [(6, 0, 1), (12, 1, 2)]
    assert gated.moves[0].truncated_frac == 0.5
    assert gated.stamp.horizon == 20


@pytest.mark.parametrize(
    ("truncated", "solved"),
    [
        (lambda v: 2, lambda v: 5),  # too few are cut
        (lambda v: 5, lambda v: v),  # still rising by 0.1 a step
        (lambda v: 5, lambda v: 10 - v),  # falling by as much
    ],
)
def test_gated_horizon_stays_when(truncated, solved) -> None:
    steps = [seen(v, num_truncated=truncated(v), num_solved=solved(v)) for v in range(1, 10)]
    assert set(stages_of(make_gated(), steps)) == {0}


def test_gated_horizon_needs_a_full_window_of_its_stage() -> None:
    gated = make_gated(GatedSection(window_steps=4, min_steps=4, max_gain=0.1, backoff_steps=2))
    versions = [1, 2, 3, 9, 10]  # Versions are missing: at 9 the stage has four steps.
    assert stages_of(gated, [seen(v) for v in versions]) == [0, 0, 0, 1, 1]


def test_gated_horizon_backs_off_one_stage_when_entropy_collapses() -> None:
    gated = make_gated()
    stages_of(gated, [seen(v) for v in range(1, 7)])
    assert gated.stage == 1
    # the window before has mean 1; means of the last two: (0.2 + 0.2) / 2 = 0.2 < 0.3
    assert stages_of(gated, [seen(7, entropy=0.2), seen(8, entropy=0.2)]) == [1, 0]
    move = gated.moves[-1]
    assert (move.cause, move.entropy_ratio) == ("entropy", pytest.approx(0.2))
    # hysteresis: min_steps from 8 on, although everything else would let it advance
    assert stages_of(gated, [seen(v) for v in range(9, 15)]) == [0] * 5 + [1]


def test_gated_horizon_backs_off_on_low_ess() -> None:
    gated = make_gated()
    stages_of(gated, [seen(v) for v in range(1, 7)])
    steps = [seen(7, ess_frac=0.1), seen(8, ess_frac=0.4)]  # mean 0.25 < 0.3
    assert stages_of(gated, steps) == [1, 0]
    assert (gated.moves[-1].cause, gated.moves[-1].ess_frac) == ("ess", pytest.approx(0.25))


def test_gated_horizon_never_backs_off_from_its_first_stage() -> None:
    gated = make_gated()
    steps = [seen(v, ess_frac=0.0, num_truncated=0) for v in range(1, 9)]
    assert stages_of(gated, steps) == [0] * 8
    assert not gated.moves


def test_gated_horizon_ignores_unknown_or_disabled_signals() -> None:
    off = replace(GATED, entropy_frac=0.0, ess_frac=0.0)
    for gated, entropy, ess in ((make_gated(), UNKNOWN, UNKNOWN), (make_gated(off), 0.0, 0.0)):
        stages_of(gated, [seen(v) for v in range(1, 7)])
        steps = [seen(v, entropy=entropy, ess_frac=ess, num_truncated=0) for v in range(7, 15)]
        assert set(stages_of(gated, steps)) == {1}


def test_gated_horizon_logs_every_decision_with_its_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        stages_of(make_gated(), [seen(v) for v in range(1, 7)])
    (line,) = [record.getMessage() for record in caplog.records]
    for part in ("env=maze", "version=6", "to=1", "turns=10", "truncated=0.500", "gain=+0.000"):
        assert part in line


_STEPS = st.lists(
    st.fixed_dictionaries(
        {
            "num_solved": st.integers(4, 6),
            "num_truncated": st.integers(0, 4),
            "entropy": st.sampled_from([0.05, 1.0, UNKNOWN]),
            "ess_frac": st.sampled_from([0.05, 0.9, UNKNOWN]),
        }
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(_STEPS, st.integers(0, 60))
def test_restored_gated_horizon_moves_as_before(steps: list[dict[str, float]], cut: int) -> None:
    events = [seen(v, **step) for v, step in enumerate(steps, 1)]
    whole, first, second = make_gated(), make_gated(), make_gated()
    expected = stages_of(whole, events)
    before = stages_of(first, events[:cut])
    restore(second, json.loads(json.dumps(save(first))))
    assert before + stages_of(second, events[cut:]) == expected
    assert save(second) == save(whole)


@settings(max_examples=60, deadline=None)
@given(_STEPS)
def test_gated_horizon_moves_by_single_stages(steps: list[dict[str, float]]) -> None:
    gated = make_gated()
    stages = [0, *stages_of(gated, [seen(v, **s) for v, s in enumerate(steps, 1)])]
    assert all(abs(b - a) <= 1 for a, b in pairwise(stages))
    since = 0
    for move in gated.moves:
        if move.to_stage > move.from_stage:
            assert move.version - since >= GATED.min_steps
        since = move.version
