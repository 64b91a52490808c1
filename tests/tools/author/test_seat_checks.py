"""Laws of the checks of environments with seats."""

from typing import Any

import pytest

from common.config.envs import EnvsSection
from envhub.env import StepResult, Style
from envhub.envs.nim import make_spec
from tools.author.check_env import check_seats
from tools.author.checks import Grade, Plays
from tools.author.episodes import Driver, chance


def plays_of(num: int, *, change: dict[str, Any] | None = None) -> Plays:
    """Return random games; `change` replaces fields of the last result of each."""
    plays = Plays()
    with Driver(make_spec(EnvsSection()), Style.COMPACT) as driver:
        for number in range(num):
            item_id = f"OnePile-train-{number}"
            with driver.open(item_id) as game:
                game.play(chance(item_id), max_turns=30)
            plays.by_chance.append(game)
    for game in plays.by_chance if change else []:
        last: StepResult = game.results[-1]
        for name, value in (change or {}).items():
            setattr(last, name, value)
    return plays


def test_game_with_seats_reports_the_reward_of_each_seat() -> None:
    (found,) = check_seats(make_spec(EnvsSection()), plays_of(40))
    assert found.grade is Grade.OK
    first, second = map(
        float, found.text.removeprefix("2 seats; random play gives them ").split(", ")
    )
    assert first + second == pytest.approx(1.0, abs=0.011)  # Each game has one winner.
    assert 0.2 < first < 0.8


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"seat_rewards": None}, "seat_rewards=None, but there are 2 seats"),
        ({"seat_rewards": [1.0]}, "but there are 2 seats"),
        ({"seat_rewards": [1.5, 0.0]}, "are not in [0, 1]"),
        ({"done": False, "seat": 2}, "seat=2 moves next, but the seats are 0 to 1"),
        ({"done": False, "seat": None}, "seat=None moves next"),
    ],
)
def test_wrong_seats_are_refused_with_their_reason(change: dict[str, Any], reason: str) -> None:
    (found,) = check_seats(make_spec(EnvsSection()), plays_of(1, change=change))
    assert found.grade is Grade.FAIL
    assert reason in found.text
