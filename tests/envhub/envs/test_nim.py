"""Laws of nim: its rules, its perfect play, and the rewards of its two seats."""

from fractions import Fraction
from functools import cache

import pytest

from common.config.envs import EnvsSection
from envhub.env import StepResult, Style, parse_item
from envhub.envs.nim import (
    ONE_PILE_SIZES,
    RULES,
    SUBSETS,
    NimEnv,
    NimMove,
    Piles,
    Rules,
    make_spec,
    parsed_move,
    position_after,
    start_of,
)

ONE = RULES["OnePile"]
MANY = RULES["Piles"]


def started(sizes: Piles, *, style: Style = Style.COMPACT) -> NimEnv:
    """Return a game that begins with these piles."""
    subset = "OnePile" if len(sizes) == 1 else "Piles"
    item = next(
        item_id
        for item_id in (f"{subset}-train-{index}" for index in range(10_000))
        if start_of(parse_item(item_id, SUBSETS)) == sizes
    )
    env = NimEnv(style)
    env.reset(item)
    return env


@pytest.mark.parametrize(
    ("rules", "piles", "value", "best"),
    [
        (ONE, (21,), 1, NimMove(0, 1)),  # 21 = 5 * 4 + 1
        (ONE, (15,), 3, NimMove(0, 3)),
        (ONE, (12,), 0, NimMove(0, 1)),  # A multiple of 4 is lost.
        (ONE, (2,), 2, NimMove(0, 2)),
        (MANY, (3, 4, 5), 2, NimMove(0, 2)),  # 011 xor 100 xor 101 = 010; 3 becomes 1
        (MANY, (1, 2, 3), 0, NimMove(2, 1)),  # 01 xor 10 xor 11 = 0: lost
        (MANY, (7, 1, 1), 7, NimMove(0, 7)),
        (MANY, (0, 4, 6), 2, NimMove(2, 2)),
    ],
)
def test_perfect_play_leaves_a_nim_sum_of_zero(
    rules: Rules, piles: Piles, value: int, best: NimMove
) -> None:
    assert rules.value(piles) == value
    assert rules.best_move(piles) == best
    assert not value or rules.value(position_after(piles, best)) == 0


@cache
def chance(piles: Piles, *, is_expert: bool) -> Fraction:
    """Return the probability that the expert wins from a position against random play."""
    moves = ONE.moves(piles)
    if not moves:
        return Fraction(not is_expert)  # The player who moves has lost.
    if is_expert:
        return chance(position_after(piles, ONE.best_move(piles)), is_expert=False)
    return sum(chance(position_after(piles, move), is_expert=True) for move in moves) / Fraction(
        len(moves)
    )


def test_perfect_play_beats_random_play_in_99_percent() -> None:
    first, last = ONE_PILE_SIZES
    sizes = range(first, last + 1)
    won = [chance((n,), is_expert=seat == 0) for n in sizes for seat in (0, 1)]
    assert float(sum(won) / len(won)) == pytest.approx(0.992, abs=0.001)
    # From 4 the expert takes 1 of 4; random play takes all 3 with probability 1/3.
    assert chance((4,), is_expert=True) == Fraction(2, 3)


def result_of(env: NimEnv, *actions: str) -> StepResult:
    """Return the result of the last action."""
    return [env.step(action) for action in actions][-1]


def test_observation_is_for_the_seat_that_moves_next() -> None:
    env = NimEnv(Style.COMPACT)
    assert (
        env.reset("OnePile-train-0")
        == f"left {start_of(parse_item('OnePile-train-0', SUBSETS))[0]}"
    )
    game = started((3, 4, 5))
    result = game.step("take 2 from 3")
    assert (result.observation, result.seat, result.seat_rewards) == (
        "took 2 from 3\nleft 3 4 3",
        1,
        [0.0, 0.0],
    )
    assert not result.done
    assert game.step("take 4 from 2").seat == 0


def test_last_object_wins_for_its_seat() -> None:
    won = result_of(started((9,)), "take 3", "take 3", "take 3")
    assert (won.done, won.reward, won.seat_rewards) == (True, 1.0, [1.0, 0.0])
    lost = result_of(started((9,)), "take 1", "take 3", "take 3", "take 2")
    assert (lost.done, lost.reward, lost.seat_rewards) == (True, 1.0, [0.0, 1.0])


@pytest.mark.parametrize("action", ["", "take 4", "take 0", "take 1 from 2", "go", "take 99999999"])
def test_illegal_move_loses_the_game(action: str) -> None:
    result = result_of(started((9,)), "take 1", action)
    assert (result.done, result.is_valid, result.reward) == (True, False, 0.0)
    assert result.seat_rewards == [1.0, 0.0]


def test_move_needs_its_pile_among_several() -> None:
    assert parsed_move("Take 2 from pile 3", (1, 2, 3)) == NimMove(2, 2)
    assert parsed_move("take 2", (1, 2, 3)) is None
    assert parsed_move("take  3", (9,)) == NimMove(0, 3)


def test_expert_and_valid_actions_agree_with_the_rules() -> None:
    env = started((3, 4, 5))
    assert env.expert_action() == "take 2 from 1"
    assert len(env.valid_actions()) == 3 + 4 + 5
    assert started((9,)).valid_actions() == ["take 1", "take 2", "take 3"]


def test_catalogue_entry_names_two_seats() -> None:
    spec = make_spec(EnvsSection())
    assert (spec.name, spec.seats, set(spec.subsets)) == ("nim", 2, {"OnePile", "Piles"})
    assert "Action:" in spec.instruction[Style.AGENTGYM]
