"""Laws of TextCraft: the book, the tasks, every sentence of the engine, the solver."""

import random

import pytest

from common.config.envs import EnvsSection
from envhub.env import Style, parse_item
from envhub.envs.textcraft.book import the_book
from envhub.envs.textcraft.env import TextCraftEnv, check, make_spec, our_catalogue
from envhub.envs.textcraft.tasks import MAX_TURNS, MIN_TEST_GOALS
from tests.envhub.envs.playing import elsewhere, expert_results, item_of

CATALOGUE = our_catalogue()


def started_with(style: Style, goal: str) -> TextCraftEnv:
    """Return an episode with the given goal."""
    depth = the_book().depths[goal]
    split = "train" if goal in CATALOGUE.goals(depth, "train") else "test"
    env = TextCraftEnv(style)
    env.reset(f"depth{depth}-{split}-{CATALOGUE.goals(depth, split).index(goal)}", 0)
    return env


def said(env: TextCraftEnv, *actions: str) -> str:
    """Return the answer to the last of the actions."""
    return [env.step(action).observation for action in actions][-1]


def transcript(item_id: str) -> list[str]:
    env = TextCraftEnv(Style.COMPACT)
    lines = [env.reset(item_id, 0), *env.valid_actions()]
    while (action := env.expert_action()) is not None:
        lines += [action, env.step(action).observation]
    return [*lines, env.fingerprint()]


def test_equal_observations_may_have_different_states():
    one, other = (started_with(Style.AGENTGYM, "stick") for _ in range(2))
    first = one.step("get 1 oak log")
    other.step("get 2 cobblestone")
    second = other.step("get 1 oak log")
    assert first.observation == second.observation == "Got 1 oak log"
    assert (first.state, second.state) == (
        "holds [('oak log', 1)]",
        "holds [('cobblestone', 2), ('oak log', 1)]",
    )
    assert (second.is_success, second.tells_success) == (False, False)


def test_book_has_many_items_of_each_depth():
    book = the_book()
    assert sum(1 <= book.depths[item] <= 4 for item in book.recipes) >= 300
    assert {book.depths[item] for item in book.recipes} >= {1, 2, 3, 4}
    assert (book.depths["oak log"], book.depths["oak planks"], book.depths["stick"]) == (0, 1, 2)
    assert book.depths["torch"] == 3
    assert book.depths["planks"] == 1


def test_goals_of_train_and_test_never_meet():
    for depth in MAX_TURNS:
        train, test = set(CATALOGUE.goals(depth, "train")), set(CATALOGUE.goals(depth, "test"))
        assert not train & test
        assert len(test) >= MIN_TEST_GOALS
        assert sorted(train | test) == the_book().goals(depth)


def test_expert_solves_every_goal_within_its_turns():
    for subset, spec in CATALOGUE.subsets.items():
        for split in ("train", "test"):
            for index in range(len(CATALOGUE.goals(int(subset[-1]), split))):
                env = TextCraftEnv(Style.COMPACT)
                env.reset(f"{subset}-{split}-{index}", 0)
                results = expert_results(env)
                assert len(results) <= spec.max_turns
                assert all(result.is_valid for result in results)
                assert results[-1].reward == 1.0


def test_expert_finishes_after_random_play():
    for index in range(40):
        env = TextCraftEnv(Style.COMPACT)
        env.reset(f"depth3-train-{index}", 0)
        rng = random.Random(index)
        for _ in range(10):
            if env.valid_actions():
                env.step(rng.choice(env.valid_actions()))
        assert len(expert_results(env)) <= 30
        assert not env.valid_actions()


def test_every_valid_action_is_executed():
    for index in range(40):
        env = TextCraftEnv(Style.COMPACT)
        env.reset(f"depth2-train-{index}", 0)
        rng = random.Random(index)
        for _ in range(10):
            result = env.step(rng.choice(env.valid_actions()))
            assert result.is_valid
            if result.done:
                break


def test_observation_shows_commands_then_goal():
    compact, agentgym = TextCraftEnv(Style.COMPACT), TextCraftEnv(Style.AGENTGYM)
    *commands, goal = compact.reset("depth2-test-0", 0).split("\n")
    name = CATALOGUE.goals(2, "test")[0]
    assert goal == f"goal: {name}"
    assert any(command.startswith(f"craft 1 {name} using ") for command in commands) or commands
    shown = "\n".join(commands)
    assert agentgym.reset("depth2-test-0", 0) == (
        f"Crafting commands:\n{shown}\n\nGoal: craft {name}."
    )


def test_tasks_list_existing_items_with_disjoint_goals():
    spec = make_spec(EnvsSection())
    assert [task.subset for task in spec.tasks.values()] == ["depth1", "depth2", "depth3", "depth4"]
    for task, at_least in zip(spec.tasks.values(), (31, 41, 25, 3), strict=True):
        assert len(task.test) >= at_least
        goals = [
            {CATALOGUE.make_task(parse_item(item, spec.subsets)).goal for item in items}
            for items in (task.train, task.test)
        ]
        assert not goals[0] & goals[1]
    assert sum(len(task.train) for task in spec.tasks.values()) == 374
    assert check(EnvsSection()) == []


def test_data_index_orders_goals_by_depth_and_wraps():
    spec = make_spec(EnvsSection())
    num_goals = sum(len(the_book().goals(depth)) for depth in MAX_TURNS)

    def goal(index: int) -> str:
        return CATALOGUE.make_task(parse_item(item_of(spec, index), spec.subsets)).goal

    goals = [goal(index) for index in range(num_goals)]
    assert len(set(goals)) == num_goals
    assert goals[0] == the_book().goals(1)[0]
    depths = [the_book().depths[name] for name in goals]
    assert depths == sorted(depths)
    assert goal(num_goals) == goals[0]
    assert goal(-1) == goals[-1]


def test_variation_changes_commands_and_keeps_the_goal():
    num_goals = len(CATALOGUE.goals(2, "train"))
    env = TextCraftEnv(Style.COMPACT)
    first = env.reset("depth2-train-5", 0).split("\n")
    other = env.reset(f"depth2-train-{5 + num_goals}", 0).split("\n")
    assert first[-1] == other[-1]
    assert first != other


def assert_said(env: TextCraftEnv, answers: list[tuple[str, str]]) -> None:
    """Perform the actions one after the other; each has its answer."""
    for action, answer in answers:
        assert said(env, action) == answer, action


def test_engine_answers_with_agentgyms_sentences():
    enough = "Could not find enough items to craft "
    assert_said(
        started_with(Style.AGENTGYM, "oak sign"),
        [
            ("inventory", "Inventory: You are not carrying anything."),
            ("get 2 oak log", "Got 2 oak log"),
            ("inventory", "Inventory: [oak log] (2) "),
            ("get 1 oak planks", "Could not find oak planks"),
            ("get 1 planks", "Could not find planks"),
            ("get 1 unicorn", "Could not find unicorn"),
            ("get oak log", "Could not execute get oak log"),
            ("Get 1 oak log", "Could not execute Get 1 oak log"),
            ("", "Could not execute "),
            ("craft 4 oak planks using 1 oak log", "Crafted 4 minecraft:oak_planks"),
            ("inventory", "Inventory: [oak log] (1) [oak planks] (4) "),
            ("craft oak planks using oak log", "Wrong item format: oak log"),
            ("craft 4 oak planks using 9 oak log", enough + "minecraft:oak_planks"),
            ("craft 4 stick using 2 planks", enough + "minecraft:stick"),
            ("craft 4 planks using 9 oak log", enough + "None"),
            (
                "craft 3 oak slab using 2 oak planks",
                "Could not find a valid recipe for ItemTagWithCount(item_tag=ItemTag(tag=None, "
                "item_id='minecraft:oak_slab'), count=3)",
            ),
            ("craft 1 stick using 2 oak planks", "Crafted 4 minecraft:stick"),
        ],
    )


def test_duplicated_ingredient_matches_no_recipe():
    env = started_with(Style.AGENTGYM, "stick")
    said(env, "get 1 oak log", "craft 4 oak planks using 1 oak log")
    no_recipe = "Could not find a valid recipe for ItemTagWithCount(item_tag=ItemTag("
    assert said(env, "craft 1 stick using 1 oak planks, 1 oak planks").startswith(no_recipe)
    assert said(env, "craft 1 stick using 2 oak planks, 3 oak planks").startswith(no_recipe)
    assert said(env, "craft 1 stick using 2 oak planks, 0 oak log").startswith(
        "Could not find enough"
    )
    planks = "tag='minecraft:planks', item_id=None), count=1)"
    assert said(env, "craft 1 planks using 1 oak planks") == no_recipe + planks
    assert said(env, "craft 1 stick using 2 oak planks") == "Crafted 4 minecraft:stick"


def test_compact_engine_answers_in_short_lower_case():
    assert_said(
        started_with(Style.COMPACT, "oak sign"),
        [
            ("inventory", "inventory: nothing"),
            ("Get 2 Oak Log", "got 2 oak log"),
            ("craft 4 oak planks using 1 oak log", "crafted 4 oak planks"),
            ("inventory", "inventory: 1 oak log, 4 oak planks"),
            ("get 1 oak planks", "could not find oak planks"),
            ("get 1 unicorn", "could not find"),
            ("sing", "could not execute"),
            ("craft 4 stick using 9 oak planks", "could not find enough items to craft stick"),
            ("craft 4 stick using oak planks", "wrong item format"),
            ("craft 4 stick using 1 oak planks", "could not find a valid recipe for stick"),
        ],
    )


def test_tag_slot_takes_one_kind_only():
    env = started_with(Style.COMPACT, "bowl")
    said(env, "get 1 oak log", "get 1 birch log")
    said(env, "craft 4 oak planks using 1 oak log", "craft 4 birch planks using 1 birch log")
    mixed = env.step("craft 1 bowl using 2 oak planks, 1 birch planks")
    assert (mixed.is_valid, mixed.reward) == (False, 0.0)
    assert env.step("craft 1 bowl using 3 birch planks").reward == 1.0


@pytest.mark.parametrize(
    "text", ["x" * 60_000, "get 99999999999 oak log", "get -1 oak log", "craft using", "get 1 \0"]
)
def test_engine_survives_untrusted_text(text):
    for style in Style:
        result = started_with(style, "oak sign").step(text)
        assert not result.is_valid
        assert len(result.observation) < 300


def test_item_is_the_same_in_every_process():
    items = ["depth1-train-3", "depth3-test-4", "depth4-train-50"]
    told = elsewhere(__name__, f"[transcript(item) for item in {items}]", hash_seed=1)
    assert told == [transcript(item) for item in items]


def test_picture_shows_inventory_and_recipe_tree():
    env = started_with(Style.COMPACT, "iron chestplate")
    said(env, "get 3 iron ingot")
    picture = env.detail("picture")
    part = {"name": "iron ingot", "count": 8, "held": 3, "parts": []}
    assert picture["tree"] == {"name": "iron chestplate", "count": 1, "held": 0, "parts": [part]}
    assert picture["held"] == {"iron ingot": 3}
    assert env.detail("score") is None
