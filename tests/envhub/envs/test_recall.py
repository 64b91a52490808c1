"""Laws of Recall: the goal is shown at every third crossing only."""

from typing import cast

from common.config.env import RemoteOptions
from common.config.envs import EnvsSection
from envhub.catalogue.registry import load_spec
from envhub.env import Env, Style

ITEM = "Signs-test-0"


def begun(item_id: str = ITEM) -> tuple[Env, str]:
    env = cast(Env, load_spec("recall", EnvsSection(), RemoteOptions()).make(Style.COMPACT))
    return env, env.reset(item_id, 0)


def test_goal_is_shown_at_every_third_crossing_only() -> None:
    env, first = begun()
    results = [env.step(action) for action in iter(env.expert_action, None)]
    seen = [first, *(each.observation for each in results)]
    told = [number for number, text in enumerate(seen) if text.startswith("goal ")]
    assert told == [0, 3, 6, 9]
    assert [text for text in seen if not text.startswith("goal ")] == ["nothing"] * 8 + ["success"]
    assert [each.reward for each in results] == [at / 12 for at in range(1, 13)]
    assert (results[-1].done, results[-1].is_success) == (True, True)


def test_wrong_turn_costs_one_of_twelve_spare_turns() -> None:
    env, first = begun()
    for _ in range(12):
        (wrong, *_) = [each for each in env.valid_actions() if each != env.expert_action()]
        result = env.step(wrong)
        assert (result.observation, result.reward, result.is_valid) == (first, 0.0, True)
    assert not env.step("go home").is_valid
    results = [env.step(action) for action in iter(env.expert_action, None)]
    assert len(results) == 11
    assert (results[-1].reward, results[-1].done, results[-1].is_success) == (11 / 12, True, False)


def test_halls_show_the_goal_at_every_fourth_crossing() -> None:
    env, first = begun("Halls-test-0")
    results = [env.step(action) for action in iter(env.expert_action, None)]
    seen = [first, *(each.observation for each in results)]
    assert len(results) == 24
    assert [at for at, text in enumerate(seen) if text.startswith("goal ")] == [0, 4, 8, 12, 16, 20]
    assert seen[2:24:4] == ["nothing"] * 6
    assert {len(text.split()) for text in seen[1::2]} == {32}
    assert len(set(seen[1::2])) == 12
    assert (results[-1].reward, results[-1].is_success) == (1.0, True)
    env, first = begun("Halls-test-1")
    (wrong, *_) = [each for each in env.valid_actions() if each != env.expert_action()]
    assert [env.step(wrong).done for _ in range(36)] == [False] * 35 + [True]


def test_wrong_turn_repeats_a_sign_but_not_a_hall() -> None:
    env, first = begun("Halls-test-1")
    (wrong, *_) = [each for each in env.valid_actions() if each != env.expert_action()]
    assert env.step(wrong).observation == first
    assert len(env.step(cast(str, env.expert_action())).observation.split()) == 32
    told = [env.step(each).observation for each in (wrong, "go home")]
    assert told == ["nothing", "invalid action, nothing"]
    assert env.step(cast(str, env.expert_action())).observation == "nothing"
    assert len(env.step(cast(str, env.expert_action())).observation.split()) == 32
