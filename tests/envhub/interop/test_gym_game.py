"""Laws of gymnasium's conventions: ends, success, seeds, numbers of numpy, the gym before it."""

from typing import Any

import numpy as np
import pytest

from common.errors import ConfigError
from envhub.env import EnvSpec, StepResult, Style
from envhub.interop.games import make_spec
from envhub.interop.texts import SUCCESS_KEYS, reported_truth

LITTLE = "gymnasium:tests.envhub.interop.little_games"


def spec_of(name: str, options: str = "") -> EnvSpec:
    return make_spec(f"{LITTLE}:{name}-v0{options}")


def played(name: str, *actions: str, options: str = "") -> list[StepResult]:
    env: Any = spec_of(name, options).make(Style.COMPACT)
    env.reset("all-train-5", 0)
    return [env.step(action) for action in actions]


def test_negative_actions_are_requested_and_played() -> None:
    refused, up, down, end = played("Walk", "2", "Action: 1", "-01", "Action: -1")
    assert "a whole number from -1 to 1" in spec_of("Walk").instruction[Style.COMPACT]
    assert "a whole number from -1 to 1" in refused.observation
    assert [each.is_valid for each in (refused, up, down, end)] == [False, True, True, True]
    assert (end.observation, end.reward, end.is_success) == ("You stand at -1.", 1.0, True)


def test_actions_offered_are_all_legal() -> None:
    for name in ("Walk", "Push", "Lights"):
        env: Any = spec_of(name).make(Style.COMPACT)
        env.reset("all-train-0", 0)
        assert env.valid_actions()
        for action in env.valid_actions():
            env.reset("all-train-0", 0)
            assert env.step(action).is_valid
    env = spec_of("Walk").make(Style.COMPACT)
    assert env.valid_actions() == ["-1", "0", "1"]


def test_time_limit_is_a_truncation_and_an_end_is_not() -> None:
    cut = played("Endless", *"000", options="?max_reward=10")[-1]
    assert (cut.done, cut.is_truncated, cut.is_success, cut.reward) == (True, True, False, 0.3)
    end = played("Walk", "-1")[-1]
    assert (end.done, end.is_truncated) == (True, False)


def test_truncated_episode_with_full_reward_is_solved() -> None:
    assert played("Endless", *"000", options="?max_reward=3")[-1].is_success


def test_numpy_values_are_read_as_plain_ones() -> None:
    env: Any = spec_of("Numpy").make(Style.COMPACT)
    assert env.reset("all-train-0", 0) == '{"at": [0, 0], "left": 3}'
    (right,) = played("Numpy", "1")
    (wrong,) = played("Numpy", "-1")
    assert (right.observation, right.reward) == ('{"at": [1, 0], "left": 2}', 0.5)
    assert (right.done, right.is_success) == (True, True)
    assert (wrong.done, wrong.is_success) == (True, False)


@pytest.mark.parametrize(
    ("name", "text", "reward"), [("Push", "[0.5, 0]", 0.75), ("Lights", "[2, 1]", 1.0)]
)
def test_arrays_are_played_as_json(name: str, text: str, reward: float) -> None:
    assert "a JSON array of 2" in spec_of(name).instruction[Style.COMPACT]
    refused, right = played(name, "0.5 0", f"Thought: so.\nAction: {text}")
    assert (refused.is_valid, refused.done) == (False, False)
    assert (right.is_valid, right.reward) == (True, reward)


def test_unsupported_action_space_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"actions: a Graph has no text form; register it with"):
        spec_of("Wired")


def test_environment_of_old_gym_is_played() -> None:
    env: Any = spec_of("Old").make(Style.COMPACT)
    drawn = int(np.random.default_rng(5).integers(100))
    assert env.reset("all-train-5", 0) == f"Drawn: {drawn}."
    (cut,) = played("Old", "0")
    (end,) = played("Old", "1")
    assert [(each.done, each.is_truncated) for each in (cut, end)] == [(True, True), (True, False)]


def test_first_known_key_decides_success() -> None:
    assert SUCCESS_KEYS[:3] == ("is_success", "success", "episode_success")
    assert reported_truth({"success": True, "is_success": False}, SUCCESS_KEYS) is False
    assert reported_truth({"is_success": None, "success": np.bool_(True)}, SUCCESS_KEYS) is True
    assert reported_truth({"episode_success": np.array([1.0])}, SUCCESS_KEYS) is True
    assert reported_truth({"success": 0.5}, SUCCESS_KEYS) is False
    for silent in ({}, {"success": "yes"}, {"won": float("nan")}, {"won": np.zeros(2)}):
        assert reported_truth(silent, SUCCESS_KEYS) is None


def test_full_reward_is_success_without_key() -> None:
    assert played("Judged", "1")[-1].is_success
    assert not played("Judged", "0")[-1].is_success
    assert not played("Judged", "2", options="?min_reward=-1")[-1].is_success
