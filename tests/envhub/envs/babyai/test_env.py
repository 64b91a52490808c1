"""Laws of the BabyAI environment."""

import json
import random
import re

import pytest

from common.config.envs import BabyaiOptions, EnvsSection
from envhub.env import Style, UnknownItem, parse_item
from envhub.envs.babyai import levels
from envhub.envs.babyai.env import make_spec
from envhub.envs.babyai.episode import SUBSETS, BabyAiEnv
from tests.envhub.envs.playing import elsewhere, item_of

ONE_ROOM = ("PickupLoc", "PickupDist", "GoToLocal")
MIXTURE = {
    **{"PickupLoc": 0.15, "ActionObjDoor": 0.13, "OpenDoor": 0.13, "PickupDist": 0.10},
    **{"GoToLocal": 0.08, "GoToDoor": 0.08, "GoToObjDoor": 0.08, "Open": 0.06},
    **{"OneRoomS12": 0.05, "GoToObjMazeS4": 0.05, "FindObjS5": 0.05, "PickupLevel": 0.04},
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


def test_env_pays_one_and_ends_at_the_mission():
    env = started("GoToLocal-train-0")
    result = env.step("go to green ball 1")
    assert (result.reward, result.done, result.is_valid) == (1.0, True, True)
    assert env.valid_actions() == []
    with pytest.raises(RuntimeError, match="ended"):
        env.step("turn left")


def test_env_counts_success_inside_toggle_and_go_through():
    for index in range(40):
        env = started(f"OpenDoor-train-{index}")
        expert = env.expert_action()
        if expert is not None and expert.startswith("toggle and go through"):
            assert env.step(expert).reward == 1.0
            return
    pytest.fail("no item whose first action is to toggle and go through")


def test_env_rewards_success_beyond_minigrids_step_limit():
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


def test_agentgym_refusals_give_their_reasons():
    env = started("GoToLocal-train-0", Style.AGENTGYM)
    answers = {
        "": "No change in state.",
        "drop": "You cannot drop the object, as you are not carrying anything.",
        "dance": "The action is not recognized. Please check valid actions.",
    }
    for action, answer in answers.items():
        assert env.step(action).observation.split("\n")[0] == answer
    checked = env.step("check available actions")
    listed = ", ".join([*env.valid_actions(), "check available actions"])
    said = checked.observation.split("\n")[0]
    assert said == f"You can take the following actions: {listed}"


def test_agentgym_observation_reports_the_end_before_the_actions():
    env = started("GoToLocal-train-0", Style.AGENTGYM)
    view, end, actions = env.step("go to green ball 1").observation.split("\n")
    assert view.endswith("You are not carrying anything.")
    assert end == " The task is completed."
    assert actions.startswith("Available actions: ")


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


def test_view_and_actions_number_objects_alike():
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
def test_expert_fetches_keys_clears_paths_and_drops_things(level):
    assert sum(played_by_expert(f"{level}-test-{i}") for i in range(5)) == 5


def test_expert_opens_box_with_key():
    env = started("KeyInBox-test-0")
    played = []
    while (action := env.expert_action()) is not None:
        played.append(action)
        env.step(action)
    assert "toggle" in played
    assert played[-1].startswith("toggle and go through")
    assert all(played_by_expert(f"KeyInBox-train-{i}") == 1 for i in range(5))


def test_box_cannot_be_toggled_in_other_levels():
    for index in range(20):
        env = started(f"PickupLoc-train-{index}")
        to_box = [a for a in env.valid_actions() if re.fullmatch(r"go to \w+ box 1", a)]
        if to_box:
            assert re.search(r"box \d ahead 1(,|$)", env.step(to_box[0]).observation)
            assert "toggle" not in env.valid_actions()
            return
    pytest.fail("no item with a box in reach")


def test_expert_closes_a_door_before_it_must_open_it():
    env = started("MiniBossLevel-test-11")  # "open a door ..., then open the red door ..."
    results = []
    while (action := env.expert_action()) is not None:
        results.append((action, env.step(action).reward))
    assert ("toggle", 0.0) in results
    assert results[-1][1] == 1.0


@pytest.mark.parametrize(
    "item_id",
    [
        "SynthS5R2-test-7",  # both cells beside the door are taken
        "SynthS5R2-train-25",  # The obstacle must not be dropped on the way back.
        "MiniBossLevel-train-35",  # two things to be moved, in any order
        "Unlock-test-4",  # one of two doors is locked, the other is only far away
        "Unlock-train-249",  # a key lies behind its own door, another like it elsewhere
        "GoToImpUnlock-train-647",  # one ball is locked away, the other a long way round
    ],
)
def test_expert_is_not_caught_in_a_circle(item_id):
    assert played_by_expert(item_id) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("num", [4, pytest.param(30, marks=pytest.mark.long)])
@pytest.mark.parametrize("subset", sorted(SUBSETS))
def test_expert_solves_the_items_of_every_subset(subset, num):
    solved = [played_by_expert(f"{subset}-{s}-{i}") for s in ("test", "train") for i in range(num)]
    assert sum(solved) >= 2 * num - 1


def test_every_level_resets_and_offers_actions():
    env = BabyAiEnv(Style.COMPACT)
    for subset, spec in SUBSETS.items():
        assert env.reset(f"{subset}-test-{spec.num_test - 1}", 0).startswith("goal: ")
        assert "turn left" in env.valid_actions()


def test_reset_terminates_where_minigrid_searches_forever():
    for seed in (1741, 2678):
        env = started(f"SynthS5R2-train-{seed}")
        assert env.fingerprint() == started(f"SynthS5R2-train-{seed}").fingerprint()
        assert env.valid_actions()


def test_turn_limits_follow_the_number_of_rooms():
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
    assert set(map(levels.subset_of, levels.AGENTGYM_LEVELS)) <= set(SUBSETS)


def test_agentgym_index_determines_level_and_seed():
    spec = make_spec(EnvsSection())
    for index in (0, 16, 39, 40, 1804, 123_456):
        item = parse_item(item_of(spec, index), spec.subsets)
        assert levels.locate(item) == (levels.AGENTGYM_LEVELS[index % 40], index // 40)
    assert item_of(spec, 29) == "ActionObjDoor-train-0"
    assert item_of(spec, 56) == "PickupLevel-train-1"
    for index in (-1, 40_000_000):
        with pytest.raises(UnknownItem, match="out of range"):
            item_of(spec, index)


def test_tasks_pool_agentgyms_levels_and_seeds():
    spec = make_spec(EnvsSection())
    sizes = {name: (len(task.train), len(task.test)) for name, task in spec.tasks.items()}
    assert sizes == {
        **{"GoTo": (495, 55), "Pickup": (135, 15)},
        **dict.fromkeys(("AOD", "Find", "Room", "SLoc"), (45, 5)),
    }
    places = {s: set() for s in ("train", "test")}
    for task in spec.tasks.values():
        for split in places:
            for item_id in getattr(task, split):
                item = parse_item(item_id, spec.subsets)
                assert (item.subset, item.split) == (task.subset, split)
                places[split].add(levels.locate(item))
    assert {seed for _, seed in places["train"]} == set(range(45))
    assert {seed for _, seed in places["test"]} == set(range(45, 50))
    assert len({level for level, _ in places["test"]}) == 18
    assert len(places["test"]) == 90


def test_train_and_test_seeds_of_a_task_are_disjoint():
    for index in range(11 * 60):
        item = parse_item(f"GoTo-train-{index}", SUBSETS)
        assert not 45 <= levels.locate(item)[1] < 245
    last = parse_item("GoTo-test-2199", SUBSETS)
    assert levels.locate(last) == ("GoToObjDoor", 244)


def test_level_shadowed_by_a_task_gets_another_name():
    assert levels.locate(parse_item("PickupLevel-train-7", SUBSETS)) == ("Pickup", 7)
    assert levels.locate(parse_item("Pickup-train-7", SUBSETS)) == ("PickupDistDebug", 2)


def test_shaped_reward_equals_minigrids():
    env = BabyAiEnv(Style.COMPACT, options=BabyaiOptions(shaped_reward=True))
    env.reset("GoToLocal-train-0", 0)
    for _ in range(4):
        assert env.step("turn left").reward == 0.0
    # two steps to the ball three cells ahead: step 6 of at most 64
    assert env.step("go to green ball 1").reward == pytest.approx(1 - 0.9 * 6 / 64)
    env.reset("GoToLocal-train-0", 0)
    for _ in range(100):
        env.step("turn left")
    assert env.step("go to green ball 1").reward == 0.0  # never negative


@pytest.mark.parametrize("level", ["FindObjS7", "KeyCorridorS6R3", "GoToLocal"])
def test_shaped_reward_is_the_same_after_another_reset(level: str):
    env = BabyAiEnv(Style.COMPACT, options=BabyaiOptions(shaped_reward=True))
    limits = []
    for _ in range(3):
        env.reset(f"{level}-train-0", 0)
        limits.append(env._max_steps)
    assert limits == [levels.make_level(level).max_steps or limits[0]] * 3


def test_agentgym_goal_hides_order_of_parts():
    options = BabyaiOptions(agentgym_goals=True)
    goals = {}
    for style in Style:
        observation = BabyAiEnv(style, options=options).reset("SynthSeq-train-22", 0)
        goals[style] = observation.split("\n")[0]
    assert "after you" in goals[Style.COMPACT]
    assert goals[Style.AGENTGYM] == "Your goal: " + goals[Style.COMPACT].removeprefix(
        "goal: "
    ).replace("after you", "and")


def test_wrong_object_does_not_end_the_episode():
    env = started("PickupDistDebug-train-36")  # The goal lies behind other objects.
    result = env.step("pickup grey box 1")
    assert (result.reward, result.done, result.is_valid) == (0.0, False, True)
    assert played_by_expert("PickupDistDebug-train-36") == 1.0


def test_train_and_test_samples_share_no_initial_state():
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


@pytest.mark.slow
def test_env_is_the_same_in_every_process():
    items = ["PickupLoc-train-3", "ActionObjDoor-test-4", "BossLevel-train-5"]
    told = elsewhere(__name__, f"[transcript(item, 8) for item in {items}]", hash_seed=1)
    assert told == [transcript(item, 8) for item in items]


@pytest.mark.parametrize(
    ("item_id", "reason"),
    [
        ("GoToLokal-train-0", "nearest is 'GoToLocal'"),
        ("GoToLocal-test-1000", "last is 'GoToLocal-test-999'"),
        ("GoToLocal-dev-0", "not <subset>-<split>-<index>"),
        ("GoToLocal-train--1", "not <subset>-<split>-<index>"),
    ],
)
def test_unknown_item_suggests_valid_ones(item_id, reason):
    with pytest.raises(UnknownItem, match=reason):
        BabyAiEnv(Style.COMPACT).reset(item_id, 0)


def test_state_text_depends_only_on_pose_and_load():
    env = started("PickupLoc-train-0")
    start = env.state_text()
    turned = env.step("turn left").state
    assert start != turned
    assert env.step("turn right").state == start
