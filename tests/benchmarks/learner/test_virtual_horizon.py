"""Laws of the virtual run that the suite `virtual-horizon` measures."""

import numpy as np
import pytest

from benchmarks.learner.virtual_horizon import (
    ARMS,
    FIRST_ANSWER,
    NUM_SYMBOLS,
    HorizonRun,
    draw_item,
    play,
    trajectory_of,
)
from common.wire.messages import EndReason

KEYS = np.array([3, 0, 5])


def probs_of(shift: int) -> np.ndarray:
    """Return a policy whose answers are off by `shift` symbols."""
    symbols = np.arange(NUM_SYMBOLS)
    probs = np.zeros((NUM_SYMBOLS, 32))
    probs[symbols, FIRST_ANSWER + (symbols + shift) % NUM_SYMBOLS] = 1.0
    return probs


def test_right_answers_open_each_room_once() -> None:
    played = play(probs_of(0), KEYS, horizon=1_000, rng=np.random.default_rng(0))
    assert played.is_solved
    assert played.symbols.tolist() == KEYS.tolist()


@pytest.mark.parametrize(
    ("horizon", "num_turns", "end"), [(1_000, 6, EndReason.DONE), (4, 4, EndReason.HORIZON)]
)
def test_wrong_answers_end_with_the_turns_of_the_item_or_the_horizon(
    horizon: int, num_turns: int, end: EndReason
) -> None:
    probs = probs_of(1)
    played = play(probs, KEYS, horizon=horizon, rng=np.random.default_rng(0))
    assert not played.is_solved
    assert played.symbols.tolist() == [3] * num_turns
    trajectory = trajectory_of(played, probs, group=0, member=0, horizon=horizon, version=2)
    assert trajectory.end_reason is end
    assert trajectory.versions[trajectory.loss_mask].tolist() == [2] * num_turns


def test_items_have_at_most_the_rooms_of_the_stage() -> None:
    rng = np.random.default_rng(0)
    sizes = {most: [len(draw_item(rng, most_rooms=most)) for _ in range(40)] for most in (8, 500)}
    assert max(sizes[8]) <= 8
    assert max(sizes[500]) > 250


@pytest.mark.slow
def test_short_distances_make_more_steps_of_the_same_tokens() -> None:
    fixed, distance = (
        HorizonRun(ARMS[arm], seed=7, num_tokens=6_000).run() for arm in ("fixed", "distance")
    )
    assert min(fixed.num_tokens, distance.num_tokens) >= 6_000
    assert distance.num_steps > 2 * max(1, fixed.num_steps)
    assert distance.right_after > distance.right_before
