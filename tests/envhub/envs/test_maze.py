"""Laws of the maze: its walls, its observations and the end of an episode."""

import pytest

from common.config.envs import EnvsSection
from envhub.conversations import CONVERSATIONS
from envhub.env import Style, UnknownItem, parse_item
from envhub.envs.maze import FREE, GOAL, STARTS, SUBSETS, MazeEnv, drawn_map, make_spec, start_of
from tests.envhub.envs.playing import expert_results
from tests.envhub.envs.playing import item_of as item_of_number

ITEMS = [
    f"DoubleT-{split}-{index}"
    for split, num in (("train", 21), ("test", 5))
    for index in range(num)
]


def started(item_id: str = "DoubleT-train-0", style: Style = Style.COMPACT) -> MazeEnv:
    env = MazeEnv(style)
    env.reset(item_id, 0)
    return env


def item_of(row: int, column: int) -> str:
    """Return the item that begins at a cell."""
    return next(i for i in ITEMS if start_of(parse_item(i, SUBSETS)) == (row, column))


def test_maze_is_two_ts_that_meet():
    assert drawn_map((1, 1)).split("\n") == [
        "#############",
        "#@....#.....#",
        "###.#####.###",
        "###.#####.###",
        "###.#####.###",
        "###.......###",
        "######.######",
        "######.######",
        "######G######",
        "#############",
    ]


def test_items_are_the_26_starts_each_once():
    starts = [start_of(parse_item(item_id, SUBSETS)) for item_id in ITEMS]
    assert len(starts) == 26  # the last one is the goal: AgentGym's game 25, which it refuses
    assert set(starts) == set(STARTS) == FREE


def test_any_action_succeeds_at_the_goal():
    env = started(item_of(*GOAL))
    action = env.expert_action()
    assert action is not None
    result = env.step(action)
    assert (result.reward, result.done, result.is_success) == (1, True, True)


def test_game_number_names_the_start():
    spec = make_spec(EnvsSection())
    for game, start in enumerate(STARTS[:25]):
        assert start_of(parse_item(item_of_number(spec, game), spec.subsets)) == start
    for game in (-1, 25, 26, 27):
        with pytest.raises(UnknownItem, match=f"The game {game} "):
            item_of_number(spec, game)


@pytest.mark.parametrize(
    ("cell", "walls"),
    [
        ((1, 3), "There is a wall above you."),
        ((5, 3), "There are walls to your left, below you."),
        ((1, 11), "There are walls to your right, above you, below you."),
        ((6, 6), "There are walls to your right, to your left."),
        ((5, 6), "There is a wall above you."),
    ],
)
def test_agentgym_observation_gives_goal_position_and_walls(cell, walls):
    observation = MazeEnv(Style.AGENTGYM).reset(item_of(*cell), 0)
    assert CONVERSATIONS["maze"].server_text(observation) == (
        "The goal is at position 8, 6. "
        f"Your current position is at position {cell[0]}, {cell[1]}. {walls}"
    )


def test_compact_observation_is_short():
    env = MazeEnv(Style.COMPACT)
    assert env.reset("DoubleT-train-0", 0) == "goal: 8 6\nat 1 1, wall left up down"
    assert env.step("move right").observation == "at 1 2, wall up down"
    assert env.step("Thought: on\nAction: Move  LEFT").observation == "at 1 1, wall left up down"


@pytest.mark.parametrize(
    "text", ["move up", "sing", "", "move", "move up down", "x" * 60_000, "\0"]
)
def test_unparsed_action_changes_nothing(text):
    for style in Style:
        env = started(style=style)
        result = env.step(text)
        assert (result.reward, result.done, result.is_valid) == (0.0, False, False)
        assert "1" in result.observation
        assert env.step("move right").is_valid


def test_expert_reaches_the_goal_from_every_start():
    lengths = {}
    for item_id in ITEMS:
        env = started(item_id)
        results = expert_results(env)
        assert [r.reward for r in results] == [0.0] * (len(results) - 1) + [1.0]
        assert results[-1].observation == "success"
        lengths[start_of(parse_item(item_id, SUBSETS))] = len(results)
    # (1,1): two right, four down, three right, three down
    assert (lengths[1, 1], lengths[7, 6], lengths[1, 11]) == (12, 1, 12)


def test_episode_ends_without_reward_after_fifty_moves():
    env = started(style=Style.AGENTGYM)
    for move in range(50):
        assert not env.step(("move right", "move left")[move % 2]).done
    last = env.step("move right")
    assert (last.observation, last.reward, last.done) == ("Failure\n", 0.0, True)
    assert (env.valid_actions(), env.expert_action()) == ([], None)
    with pytest.raises(RuntimeError, match="ended"):
        env.step("move right")


def test_agentgym_success_has_agentgyms_text():
    env = started(item_of(7, 6), Style.AGENTGYM)
    result = env.step("move down")
    assert (result.observation, result.reward, result.done) == ("Success\n", 1.0, True)


def test_valid_actions_are_the_unblocked_moves():
    env = started(item_of(5, 6))
    assert env.valid_actions() == ["move right", "move left", "move down"]
    for action in env.valid_actions():
        assert started(item_of(5, 6)).step(action).is_valid


def test_fingerprints_of_starts_differ():
    assert len({started(item_id).fingerprint() for item_id in ITEMS}) == 26


def test_task_lists_the_items():
    (task,) = make_spec(EnvsSection()).tasks.values()
    assert [*task.train, "DoubleT-train-20", *task.test] == ITEMS  # Winning starts are excluded.


@pytest.mark.parametrize("text", ["MOVE LEFT", "left", "move  left", "Move left", "move left."])
def test_agentgyms_style_takes_agentgyms_four_actions_alone(text: str):
    env, compact = (started(item_of(1, 3), style) for style in (Style.AGENTGYM, Style.COMPACT))
    before = env.render()
    assert not env.step(text).is_valid
    assert env.render().partition("moves")[0] == before.partition("moves")[0]
    assert env.step("Thought:\nso\n\nAction:\nmove left").is_valid
    assert compact.step(text).is_valid is (text != "move left.")


def test_state_text_does_not_depend_on_the_path():
    env = started()
    start, (there, *_) = env.state_text(), env.valid_actions()
    back = {"up": "down", "down": "up", "left": "right", "right": "left"}
    away = env.step(there).state
    assert away not in ("", start)
    assert env.step(f"move {back[there.removeprefix('move ')]}").state == start


def test_picture_shows_map_and_agents_position():
    env = started(item_of(1, 1))
    before = env.detail("picture")["map"]
    env.step("move right")
    after = env.detail("picture")["map"]
    assert (before[1][:4], after[1][:4], after[8][6]) == ("#@..", "#.@.", "G")
    assert env.detail("score") is None
