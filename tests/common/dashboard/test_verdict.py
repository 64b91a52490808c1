"""Laws of the sentence that says what limits a run."""

import pytest

from common.dashboard.verdict import Bound, judge

Line = dict[str, float | None]


def steps(*, wait: float, train: float, slots_busy: float, env: float, num: int = 10) -> list[Line]:
    """Return steps of 10 s with 32 slots, of whose time episodes hold a share."""
    return [
        {
            "step": float(i),
            "time_s": 10.0 * i,
            "wait/batch_s": wait,
            "train/step_s": train,
            "actor/concurrency": 32.0,
            "episodes/arrived": 64.0,
            "episodes/wall_s_mean": 5.0 * slots_busy,
            "episodes/env_s_mean": 5.0 * slots_busy * env,
            "episodes/generate_s_mean": 5.0 * slots_busy * (1.0 - env),
        }
        for i in range(num)
    ]


STAGED = {  # case -> measured, limit, the first knob
    "slow environment": (
        steps(wait=6.0, train=3.5, slots_busy=0.98, env=0.8),
        Bound.ENVIRONMENT,
        "actor.max_concurrent=64",
    ),
    "slow engine": (
        steps(wait=6.0, train=3.5, slots_busy=0.98, env=0.1),
        Bound.ENGINE,
        "actor.num_actors=2",
    ),
    "slow learner": (
        steps(wait=0.1, train=9.5, slots_busy=0.4, env=0.3),
        Bound.LEARNER,
        "learner.num_ranks=2",
    ),
    "gate too tight": (
        steps(wait=5.0, train=4.8, slots_busy=0.4, env=0.3),
        Bound.GATE,
        "scheduler.max_ahead_steps=2",
    ),
}


@pytest.mark.parametrize("case", STAGED)
def test_verdict_names_the_limit_and_the_knob_in_each_staged_case(case: str) -> None:
    lines, bound, knob = STAGED[case]
    config = {"actor": {"num_actors": 1}, "scheduler": {"max_ahead_steps": 1}}
    verdict = judge(lines, config)
    assert verdict.bound == bound
    assert verdict.advice[0].knob == knob
    assert knob in verdict.sentence


def test_gain_is_what_the_next_limit_leaves() -> None:
    lines, *_ = STAGED["gate too tight"]
    # The learner works 5 s of each 10 s step, episodes need 4 s of the slots: 5 s remain.
    assert judge(lines, {}).advice[0].gain == pytest.approx(1.0)
    lines, *_ = STAGED["slow engine"]
    assert judge(lines, {"actor": {"num_actors": 1}}).advice[0].gain == pytest.approx(1.0)
    assert judge(lines, {"actor": {"num_actors": 3}}).advice[0].gain == pytest.approx(1 / 3)


def test_gain_never_exceeds_what_the_learner_leaves() -> None:
    lines = steps(wait=2.0, train=7.9, slots_busy=0.98, env=0.1)
    assert judge(lines, {}).advice[0].gain == pytest.approx(0.25)  # 10 s -> its own 8 s


def test_learner_that_waits_for_nobody_gains_no_more_than_actors_can_play() -> None:
    lines = steps(wait=0.1, train=9.5, slots_busy=0.9, env=0.3)
    assert judge(lines, {}).advice[0].gain == pytest.approx(1 / 0.9 - 1)


def test_sync_mode_is_told_apart() -> None:
    lines, *_ = STAGED["gate too tight"]
    verdict = judge(lines, {"train": {"mode": "sync"}})
    assert (verdict.bound, verdict.advice[0].knob) == (Bound.SYNC, "train.mode=async")


@pytest.mark.parametrize(
    "lines", [[], STAGED["slow engine"][0][:2], [{"step": 1.0}] * 5, [{"time_s": None}] * 5]
)
def test_too_few_or_older_steps_are_no_verdict(lines: list[Line]) -> None:
    verdict = judge(lines, {})
    assert verdict.bound == Bound.UNKNOWN
    assert "too early" in verdict.sentence
    assert verdict.advice == []


def test_gate_is_quoted_when_it_says_why() -> None:
    lines, *_ = STAGED["gate too tight"]
    assert "4 groups ahead" in judge(lines, {}, {"gate": "4 groups ahead"}).sentence
