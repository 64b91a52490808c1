"""Laws of the view: visible objects and offered actions."""

import random

from envhub.envs.babyai import levels
from envhub.envs.babyai import scene as sc
from envhub.envs.babyai.actions import list_actions
from envhub.envs.babyai.episode import read_scene
from envhub.envs.babyai.scene import GridScene
from envhub.envs.babyai.text import agentgym_view, compact_view

SIGNS = {"#": sc.WALL, ".": sc.FREE, "r": sc.THING, "b": sc.THING, "D": sc.CLOSED, "O": sc.OPEN}
NAMES = {"r": ("red", "ball"), "b": ("blue", "box"), "D": ("grey", "door"), "O": ("grey", "door")}


def drawn(*rows: str, carrying: tuple[str, str] | None = None) -> GridScene:
    """Return a drawn scene; `^` is the agent, looking up."""
    stride = len(rows[0]) + 2 * sc.PAD
    codes = [sc.WALL] * (stride * (len(rows) + 2 * sc.PAD))
    things, at = {}, -1
    for y, row in enumerate(rows):
        for x, sign in enumerate(row):
            position = (y + sc.PAD) * stride + x + sc.PAD
            if sign == "^":
                at = position
            codes[position] = SIGNS.get(sign, sc.FREE)
            if sign in NAMES:
                things[position] = NAMES[sign]
    return GridScene(codes, things, stride, at, 3, carrying)


def described(scene: GridScene) -> str:
    objects, view = sc.see(scene)
    return compact_view(scene, objects, view)


def action_names(scene: GridScene) -> set[str]:
    return {action.name for action in list_actions(scene, sc.see(scene)[0])}


def test_view_numbers_like_named_objects_from_the_nearest():
    scene = drawn("#####", "#r..#", "#..r#", "#^..#", "#####")
    assert described(scene) == "red ball 1 ahead 2, red ball 2 ahead 1 right 2, wall 3"


def test_view_marks_unreachable_object_as_blocked():
    scene = drawn("#####", "#r#.#", "#bb.#", "#^b.#", "#####")
    assert "red ball 1 ahead 2 blocked" in described(scene)
    assert "go to red ball 1" not in action_names(scene)


def test_view_ends_at_closed_doors_only():
    closed = drawn("##r##", "##D##", "#.^.#", "#####")
    opened = drawn("##r##", "##O##", "#.^.#", "#####")
    assert described(closed) == "grey closed door 1 ahead 1"
    assert described(opened) == "grey open door 1 ahead 1, red ball 1 ahead 2, wall 3"
    assert {"toggle", "toggle and go through grey closed door 1"} <= action_names(closed)
    assert {"move forward", "go through grey open door 1"} <= action_names(opened)
    assert "move forward" not in action_names(closed)


def test_view_shows_the_load_and_pickup_needs_free_hands():
    rows = ("#####", "#.r.#", "#.^.#", "#####")
    carrying = drawn(*rows, carrying=("blue", "key"))
    assert described(carrying) == "red ball 1 ahead 1, wall 2, carrying blue key"
    assert "pickup red ball 1" in action_names(drawn(*rows))
    assert not {"pickup red ball 1", "drop"} & action_names(carrying)


def test_go_to_is_not_offered_for_a_faced_object():
    assert "go to red ball 1" not in action_names(drawn("####", "#r.#", "#^.#", "####"))


def test_actions_come_by_kind_in_agentgyms_order():
    free = drawn("#####", "#r.b#", "#.D.#", "#.^.#", "#####")
    assert [a.name for a in list_actions(free, sc.see(free)[0])] == [
        *("turn left", "turn right", "pickup red ball 1", "pickup blue box 1"),
        *("toggle and go through grey closed door 1", "toggle"),
        *("go to red ball 1", "go to blue box 1"),
    ]
    carrying = drawn("#####", "#O..#", "#.r.#", "#^..#", "#####", carrying=("blue", "key"))
    assert [a.name for a in list_actions(carrying, sc.see(carrying)[0])] == [
        *("turn left", "turn right", "move forward", "drop"),
        *("go through grey open door 1", "go to grey open door 1", "go to red ball 1"),
    ]


def test_agentgym_view_counts_walls_as_seen_objects():
    walled, open_floor = drawn("###", "#^#", "###"), drawn(*["." * 17] * 8, "." * 8 + "^" + "." * 8)
    for scene, seen in (
        (walled, "In front of you in this room, you can see several objects: The room has "),
        (open_floor, "You cannot see any objects within sight.The room has "),
    ):
        assert agentgym_view(scene, *sc.see(scene), [], is_over=False).startswith(seen)


def test_walk_takes_the_fewest_primitives():
    scene = drawn("#####", "#..r#", "#^..#", "#####")
    by_name = {a.name: a.primitives for a in list_actions(scene, sc.see(scene)[0])}
    assert by_name["go to red ball 1"] == (sc.FORWARD, sc.RIGHT, sc.FORWARD)
    assert by_name["pickup red ball 1"] == (sc.FORWARD, sc.RIGHT, sc.FORWARD, sc.PICKUP)


def test_view_shows_exactly_the_cells_minigrid_shows():
    rng = random.Random(0)
    for name in ("BossLevel", "GoToObjMazeS4", "PickupDist"):
        level = levels.make_level(name)
        level.reset(seed=3)
        for _ in range(60):
            level.step(rng.choice((0, 1, 2, 2, 2, 3, 4, 5, 5)))
            _, lit = level.gen_obs_grid()
            view = sc.visible_codes(read_scene(level))
            for cell, code in enumerate(view):
                forward, column = divmod(cell, sc.VIEW)
                assert (code is not None) == bool(lit[column, sc.VIEW - 1 - forward])
