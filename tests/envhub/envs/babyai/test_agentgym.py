"""Laws of BabyAI by AgentGym's rules."""

import pytest

from common.config.envs import BabyaiOptions, EnvsSection
from common.config.load import load_config
from envhub.env import Style
from envhub.envs.babyai import levels
from envhub.envs.babyai.env import AgentGymBabyAiEnv, make_spec
from envhub.envs.babyai.episode import BabyAiEnv
from envhub.envs.searchqa import env as searchqa

NO_CHANGE = "No change in state."
KEY_IN_BOX = levels.from_agentgym(25).split("-")[0]


def started(item_id: str) -> AgentGymBabyAiEnv:
    env = AgentGymBabyAiEnv(Style.AGENTGYM, options=BabyaiOptions())
    env.reset(item_id, 0)
    return env


def door_ahead(subset: str) -> tuple[AgentGymBabyAiEnv, str]:
    """An episode with the mission to open the door in front of its agent."""
    for index in range(60):
        env = started(f"{subset}-train-{index}")
        doors = [name for name in env.valid_actions() if "closed door" in name]
        if "go to red closed door 1" in doors:
            env.step("go to red closed door 1")
            if "toggle" in env.valid_actions():
                return env, "toggle and go through red closed door 1"
    pytest.fail("no door in sight of any item")


def test_ineffective_action_is_listed_and_changes_nothing():
    env, _ = door_ahead("OpenRedDoor")
    assert "go to red closed door 1" in env.valid_actions()
    result = env.step("go to red closed door 1")
    assert result.observation.startswith(NO_CHANGE + "\nAvailable actions: [")
    assert result.is_valid


def test_move_forward_into_a_ball_is_valid_without_effect():
    for index in range(20):
        env = started(f"PickupLoc-train-{index}")
        balls = [n for n in env.valid_actions() if n.startswith("go to") and "ball" in n]
        if balls and not env.step(balls[0]).done:
            view = env.step("turn left").observation, env.step("turn right").observation
            assert "move forward" in env.valid_actions()
            assert env.step("move forward").observation == view[1]
            return
    pytest.fail("no ball in sight of any item")


def test_success_before_an_actions_last_primitive_is_lost():
    env, through = door_ahead("OpenRedDoor")
    result = env.step(through)
    assert (result.reward, result.done) == (0.0, False)
    env, _ = door_ahead("OpenRedDoor")
    result = env.step("toggle")
    assert result.done
    assert 0.5 < result.reward < 1.0
    assert "\n The task is completed.\nAvailable actions: [" in result.observation


def test_late_success_pays_repeatedly_and_continues_the_episode():
    env = started("GoToLocal-train-0")
    plain = BabyAiEnv(Style.AGENTGYM)
    plain.reset("GoToLocal-train-0", 0)
    for _ in range(40):  # Success pays less than half after 32 of 64 steps.
        env.step("turn left")
    late = env.step("go to green ball 1")
    assert not late.done
    assert 0.0 < late.reward < 0.5
    assert "The task is completed." in late.observation
    stale = env.step("sing")
    assert (stale.reward, stale.done, stale.is_valid) == (late.reward, False, False)
    assert env.step("turn left").reward == 0.0
    assert plain.step("go to green ball 1").reward == 1.0


def test_solved_episode_is_a_success_at_any_reward():
    env = started("GoToLocal-train-0")
    env.step("turn left")
    result = env.step("go to green ball 1")
    assert result.done
    assert result.is_success
    assert result.reward < 1.0
    shaped = BabyAiEnv(Style.COMPACT, options=BabyaiOptions(shaped_reward=True))
    shaped.reset("GoToLocal-train-0", 0)
    assert not shaped.step("turn left").is_success
    assert shaped.step("go to green ball 1").is_success
    late = started("GoToLocal-train-0")
    for _ in range(40):
        late.step("turn left")
    assert not late.step("go to green ball 1").is_success  # The episode continues, as in AgentGym.


def test_reward_falls_with_steps_like_minigrids():
    env = started("GoToLocal-train-0")
    env.step("turn left")
    env.step("turn right")
    num_steps = 2 + len(env._offer.actions["go to green ball 1"].primitives)
    assert env.step("go to green ball 1").reward == pytest.approx(1 - 0.9 * num_steps / 64)


@pytest.mark.parametrize("word", ["check", "check available actions", "please check"])
def test_text_containing_check_lists_the_actions(word: str):
    env = started("GoToLocal-train-0")
    listed = ", ".join([*env.valid_actions(), "check available actions"])
    asked = env.step(word)
    assert asked.observation.startswith(f"You can take the following actions: {listed}\n")
    assert asked.is_valid


def test_refusals_give_their_reasons():
    env = started("GoToLocal-train-0")
    told = {text: env.step(text).observation.split("\n")[0] for text in ("", "sing", "drop")}
    assert told == {
        "": NO_CHANGE,
        "sing": "The action is not recognized. Please check valid actions.",
        "drop": "You cannot drop the object, as you are not carrying anything.",
    }


@pytest.mark.parametrize("seed", [0, 2])
def test_expert_solves_agentgyms_levels_by_agentgyms_rules(seed: int):
    unsolved = []
    for level in range(40):
        item_id = levels.from_agentgym(40 * seed + level)
        env = started(item_id)
        for _ in range(200):
            action = env.expert_action()
            result = None if action is None else env.step(action)
            if result is None or result.done:
                break
            assert result.is_valid, (item_id, action)
        if result is None or result.reward <= 0.5:
            unsolved.append(item_id.split("-")[0])
    assert unsolved == [KEY_IN_BOX]


def test_one_switch_turns_every_rule_on():
    overrides = ["model.path=unset", "envs.agentgym_rules=true"]
    cfg = load_config(None, overrides)
    assert isinstance(make_spec(cfg.envs).make(Style.AGENTGYM), AgentGymBabyAiEnv)
    assert not isinstance(make_spec(EnvsSection()).make(Style.AGENTGYM), AgentGymBabyAiEnv)
    again, once = (
        searchqa.make_spec(each).make(Style.AGENTGYM) for each in (cfg.envs, EnvsSection())
    )
    assert isinstance(again, searchqa.SearchqaEnv)
    assert isinstance(once, searchqa.SearchqaEnv)
    assert (again._shared.options.retry, once._shared.options.retry) == (True, False)
    assert not cfg.envs.babyai.agentgym_rules  # The user's configuration is unchanged.
