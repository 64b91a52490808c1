"""Laws of the BabyAI environment."""

import json
import random
import subprocess
import sys

import pytest

from envhub.env import Style, UnknownItem
from envhub.envs.babyai import levels
from envhub.envs.babyai.env import SUBSETS, BabyAiEnv

ONE_ROOM = ("PickupLoc", "PickupDist", "GoToLocal")
MIXTURE = {
    **{"PickupLoc": 0.15, "ActionObjDoor": 0.13, "OpenDoor": 0.13, "PickupDist": 0.10},
    **{"GoToLocal": 0.08, "GoToDoor": 0.08, "GoToObjDoor": 0.08, "Open": 0.06},
    **{"OneRoomS12": 0.05, "GoToObjMazeS4": 0.05, "FindObjS5": 0.05, "Pickup": 0.04},
}


def started(item_id: str, style: Style = Style.COMPACT) -> BabyAiEnv:
    env = BabyAiEnv(style)
    env.reset(item_id, 0)
    return env


def played_by_expert(item_id: str) -> float:
    env = started(item_id)
    for _ in range(SUBSETS[item_id.split("-")[0]].max_turns):
        action = env.expert_action()
        if action is None:
            return 0.0
        result = env.step(action)
        assert result.is_valid
        if result.done:
            return result.reward
    return 0.0


def transcript(item_id: str, num_turns: int) -> list[str]:
    env = BabyAiEnv(Style.COMPACT)
    lines = [env.reset(item_id, 0)]
    rng = random.Random(item_id)
    for _ in range(num_turns):
        result = env.step(rng.choice(env.valid_actions()))
        lines.append(result.observation)
        if result.done:
            break
    return [*lines, env.fingerprint()]


def test_first_observation_names_goal_objects_and_wall():
    env = BabyAiEnv(Style.COMPACT)
    goal, view = env.reset("GoToLocal-train-0", 0).split("\n")
    assert goal == "goal: go to the green ball"
    assert view == (
        "yellow key 1 ahead 1 left 1, grey ball 1 ahead 1 right 1, green ball 1 ahead 3, "
        "purple key 1 ahead 2 left 1, green key 1 ahead 2 right 1, red box 1 ahead 2 right 2, "
        "grey ball 2 ahead 5 right 1, green key 2 ahead 4 right 2, wall 6"
    )


def test_agentgym_observation_lists_actions_and_positions():
    env = BabyAiEnv(Style.AGENTGYM)
    goal, view, actions = env.reset("GoToLocal-train-0", 0).split("\n")
    assert goal == "Your goal: go to the green ball"
    assert "There is a green ball 1 right in front of you 3 steps away. " in view
    assert "There is a red box 1 2 steps in front of you and 2 steps to your right. " in view
    assert "You are facing a wall 6 steps away. You are not carrying anything." in view
    listed = json.loads(actions.removeprefix("Available actions: "))
    assert listed == [*env.valid_actions(), "check available actions"]


def test_env_rewards_one_and_ends_when_mission_is_met():
    env = started("GoToLocal-train-0")
    result = env.step("go to green ball 1")
    assert (result.reward, result.done, result.is_valid) == (1.0, True, True)
    assert env.valid_actions() == []
    with pytest.raises(RuntimeError, match="ended"):
        env.step("turn left")


def test_env_counts_success_in_the_middle_of_toggle_and_go_through():
    for index in range(40):
        env = started(f"OpenDoor-train-{index}")
        expert = env.expert_action()
        if expert.startswith("toggle and go through"):
            assert env.step(expert).reward == 1.0
            return
    pytest.fail("no item whose first action is to toggle and go through")


def test_env_rewards_success_beyond_minigrids_own_step_limit():
    env = started("GoToLocal-train-0")
    for _ in range(4 * 25):  # four quarter turns give the first pose again; minigrid's limit is 64
        assert not env.step("turn left").done
    assert env.step("go to green ball 1").reward == 1.0


@pytest.mark.parametrize("text", ["", "fly", "go to green ball 9", "pickup", "x" * 60_000, "\0\n"])
def test_env_answers_invalid_action_with_unchanged_view(text):
    env = BabyAiEnv(Style.COMPACT)
    view = env.reset("GoToLocal-train-0", 0).split("\n")[1]
    result = env.step(text)
    assert result.observation == f"invalid action, {view}"
    assert (result.reward, result.done, result.is_valid) == (0.0, False, False)


@pytest.mark.parametrize(
    "text",
    [
        "Pick up green ball 1",
        "  pickup  green ball 1 ",
        "Thought:\nAction: x\nAction:\npickup green ball 1",
    ],
)
def test_env_accepts_wordings_of_pickup(text):
    result = started("GoToLocal-train-0").step(text)
    assert result.is_valid


def test_agentgym_refusals_say_why():
    env = started("GoToLocal-train-0", Style.AGENTGYM)
    answers = {
        "": "No change in state.",
        "drop": "You cannot drop the object, as you are not carrying anything.",
        "dance": "The action is not recognized. Please check valid actions.",
    }
    for action, answer in answers.items():
        assert env.step(action).observation.split("\n")[0] == answer
    checked = env.step("check available actions")
    assert checked.observation.startswith("You can take the following actions: turn left, ")


@pytest.mark.parametrize("level", ["BossLevel", "PickupLoc", "KeyCorridorS6R3", "UnblockPickup"])
def test_every_valid_action_is_executed(level):
    rng = random.Random(level)
    for index in range(3):
        env = started(f"{level}-train-{index}")
        for _ in range(15):
            result = env.step(rng.choice(env.valid_actions()))
            assert result.is_valid
            if result.done:
                break


def test_numbers_in_the_view_are_those_of_the_actions():
    env = BabyAiEnv(Style.COMPACT)
    for index in range(30):
        view = env.reset(f"GoToDoor-train-{index}", 0).split("\n")[1]
        for action in env.valid_actions():
            if action.startswith("go to "):
                label = action.removeprefix("go to ")
                assert any(part.startswith(label + " ") for part in view.split(", "))


def test_expert_solves_the_quickstart_mixture():
    score = sum(
        weight * sum(played_by_expert(f"{level}-test-{i}") for i in range(12)) / 12
        for level, weight in MIXTURE.items()
    )
    assert score >= 0.97


@pytest.mark.parametrize("level", ["UnlockToUnlock", "BlockedUnlockPickup", "PutNextLocalS6N4"])
def test_expert_fetches_keys_clears_ways_and_puts_things_down(level):
    assert sum(played_by_expert(f"{level}-test-{i}") for i in range(5)) == 5


def test_expert_knows_no_way_when_the_key_lies_in_a_box():
    assert started("KeyInBox-test-0").expert_action() is None


def test_every_level_resets_and_offers_actions():
    env = BabyAiEnv(Style.COMPACT)
    for level in SUBSETS:
        assert env.reset(f"{level}-test-999", 0).startswith("goal: ")
        assert "turn left" in env.valid_actions()


def test_turn_limits_follow_the_rooms_that_must_be_searched():
    in_first_room = {"ActionObjDoor", "OpenDoor", "GoToDoor", "GoToObjDoor"}
    for level, max_turns in levels.MAX_TURNS.items():
        grid = levels.make_level(level)
        grid.reset(seed=0)
        is_large = grid.room_size > 8
        one_room = 10 if is_large else 6
        several = 8 if level in in_first_room else 16
        expected = several if grid.num_rows * grid.num_cols > 1 else one_room
        assert max_turns == expected, level


def test_agentgym_numbering_has_forty_levels():
    assert len(levels.AGENTGYM_LEVELS) == 40
    assert levels.AGENTGYM_LEVELS[29] == "ActionObjDoor"
    assert levels.AGENTGYM_LEVELS[39] == "BossLevelNoUnlock"
    assert set(levels.AGENTGYM_LEVELS) <= set(SUBSETS)


def test_train_and_test_share_no_initial_state_on_a_sample():
    for level in ONE_ROOM:
        train = {started(f"{level}-train-{i}").fingerprint() for i in range(100)}
        test = {started(f"{level}-test-{i}").fingerprint() for i in range(100)}
        assert not train & test


def test_env_reset_again_gives_the_same_episode():
    env = BabyAiEnv(Style.COMPACT)
    first = env.reset("FindObjS5-train-7", 0)
    env.step("move forward")
    env.reset("PickupLoc-train-7", 0)
    assert env.reset("FindObjS5-train-7", 5) == first


def test_env_is_the_same_in_every_process():
    items = ["PickupLoc-train-3", "ActionObjDoor-test-4", "BossLevel-train-5"]
    here = [transcript(item, 8) for item in items]
    code = (
        "import json; from tests.envhub.test_babyai_env import transcript;"
        f"print(json.dumps([transcript(i, 8) for i in {items!r}]))"
    )
    for hash_seed in ("0", "1"):
        env = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path), "PATH": ""}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        assert json.loads(done.stdout.splitlines()[-1]) == here


@pytest.mark.parametrize(
    ("item_id", "reason"),
    [
        ("GoToLokal-train-0", "nearest is 'GoToLocal'"),
        ("GoToLocal-test-1000", "last is 'GoToLocal-test-999'"),
        ("GoToLocal-dev-0", "not <subset>-<split>-<index>"),
        ("GoToLocal-train--1", "not <subset>-<split>-<index>"),
    ],
)
def test_unknown_item_says_what_would_do(item_id, reason):
    with pytest.raises(UnknownItem, match=reason):
        BabyAiEnv(Style.COMPACT).reset(item_id, 0)
