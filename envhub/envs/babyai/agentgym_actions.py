"""AgentGym's own rules for BabyAI's actions: the offered actions, their numbers, and the paths.

They copy its server exactly, for comparisons with its results. Only reachable objects are numbered,
so an object's number can differ from its number in the description. Actions without effect are
offered. Paths can lead through cells out of sight.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from envhub.envs.babyai import scene as sc
from envhub.envs.babyai import text
from envhub.envs.babyai.actions import ActionEffect, GridAction, has_key
from envhub.envs.babyai.scene import GridScene, Seen

Pose = tuple[int, int, int]  # Cells ahead, cells to the right, quarter turns clockwise.
Path = tuple[int, ...]
START: Pose = (0, 0, 0)
STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1))  # (ahead, right) of a step after 0..3 quarter turns.
# AgentGym's window has one row or column more than the view, behind the agent or on its right.
# Indexed by heading: east, south, west, north.
BEHIND = (1, 1, 0, 0)
RIGHTMOST = (3, 4, 4, 3)


@dataclass(frozen=True, slots=True)
class OfferedActions:
    """The actions offered now, in order, and the reasons for refused ones."""

    actions: dict[str, GridAction] = field(default_factory=dict[str, GridAction])
    refusals: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, name: str, kind: ActionEffect, path: Iterable[int], position: int = -1) -> None:
        """Offer an action."""
        self.actions[name] = GridAction(name, kind, tuple(path), position)

    def refuse(self, name: str, reason: str) -> None:
        """Record why an action is not offered."""
        self.refusals[name] = f"You cannot {name}, as {reason}."

    def add_numbered(
        self, verb: str, kind: ActionEffect, path: Path | None, seen: Seen, counts: dict[str, int]
    ) -> None:
        """Offer an action on an object; only reachable objects get a number."""
        number = counts.get(seen.name, 0) + 1
        name = f"{verb} {seen.name} {number}"
        if path is None:
            self.refuse(name, text.NO_PATH)
            return
        counts[seen.name] = number
        self.add(name, kind, path, seen.position)


def offer(scene: GridScene, objects: list[Seen], view: list[int | None]) -> OfferedActions:
    """Return AgentGym's actions in a scene, without `check available actions`."""
    facing, onto = _paths(scene, objects, view)
    made = OfferedActions()
    made.add("turn left", ActionEffect.MOVE, (sc.LEFT,))
    made.add("turn right", ActionEffect.MOVE, (sc.RIGHT,))
    if _is_barred(scene):
        made.refusals["move forward"] = text.BARRIER
    else:
        made.add("move forward", ActionEffect.MOVE, (sc.FORWARD,))
    _add_handling(made, scene, objects, facing)
    counts: dict[str, int] = {}
    for seen in objects:
        if seen.code in sc.DOOR_STATE:
            counts[seen.name] = counts.get(seen.name, 0) + 1
            label = f"{seen.name} {counts[seen.name]}"
            _add_door(made, scene, seen, label, facing[seen.position], onto[seen.position])
    for seen in objects:
        if seen.code == sc.GOAL and (path := onto[seen.position]) is not None:
            made.add("go to goal", ActionEffect.MOVE, path, seen.position)
    counts = {}
    for seen in objects:
        if seen.code != sc.GOAL:
            made.add_numbered("go to", ActionEffect.MOVE, facing[seen.position], seen, counts)
    return made


def _is_barred(scene: GridScene) -> bool:
    """Return whether a wall or a box is in front of the agent."""
    front = scene.front()
    code = scene.codes[front]
    return code == sc.WALL or (code == sc.THING and scene.things[front][1] == "box")


def _add_handling(
    made: OfferedActions, scene: GridScene, objects: list[Seen], facing: dict[int, Path | None]
) -> None:
    """Offer pickups if the hands are empty, else drop."""
    if scene.carrying is None:
        made.refusals["drop"] = text.EMPTY_HANDS
        counts: dict[str, int] = {}
        for seen in objects:
            if seen.code in (sc.THING, sc.LAVA):
                path = facing[seen.position]
                full = None if path is None else (*path, sc.PICKUP)
                made.add_numbered("pickup", ActionEffect.PICKUP, full, seen, counts)
    elif scene.codes[scene.front()] in (sc.WALL, sc.THING, sc.LAVA):
        made.refusals["drop"] = text.NO_ROOM
    else:
        made.add("drop", ActionEffect.DROP, (sc.DROP,), scene.front())


def _add_door(
    made: OfferedActions,
    scene: GridScene,
    seen: Seen,
    label: str,
    facing: Path | None,
    onto: Path | None,
) -> None:
    """Offer the actions on a door, or refuse them with reasons."""
    through = f"go through {label}"
    toggle = f"toggle and go through {label}"
    if seen.code == sc.OPEN:
        if onto is None:
            made.refuse(through, text.NO_PATH)
        else:
            made.add(through, ActionEffect.MOVE, onto, seen.position)
        return
    if seen.code == sc.CLOSED:
        made.refuse(through, text.CLOSED)
    elif scene.carrying is None or scene.carrying[1] != "key":
        made.refuse(toggle, text.NO_KEY)
        return
    elif not has_key(scene, seen.position):
        made.refuse(toggle, text.WRONG_KEY)
        return
    if facing is None:
        made.refuse(toggle, text.NO_PATH)
        return
    made.add(toggle, ActionEffect.TOGGLE_THROUGH, (*facing, sc.TOGGLE, sc.FORWARD), seen.position)
    if not facing:
        made.add("toggle", ActionEffect.TOGGLE, (sc.TOGGLE,), seen.position)


def _paths(
    scene: GridScene, objects: list[Seen], view: list[int | None]
) -> tuple[dict[int, Path | None], dict[int, Path | None]]:
    """Return the paths that end facing each object, and those that end on it, by its position.

    The search is AgentGym's: forward, left, right. A pose that is still in the queue can be entered
    again, and its path is then that of the last entry.
    """
    barred = {
        (cell // sc.VIEW, cell % sc.VIEW - sc.HALF)
        for cell, code in enumerate(view)
        if code in (sc.WALL, sc.THING, sc.LAVA) and cell != sc.HALF
    }
    heading = scene.heading & 3
    aheads = range(-BEHIND[heading], sc.VIEW)
    rights = range(-sc.HALF, RIGHTMOST[heading] + 1)
    wanted = {(seen.forward, seen.right): seen.position for seen in objects}
    facing: dict[int, Path | None] = dict.fromkeys(wanted.values())
    onto: dict[int, Path | None] = dict.fromkeys(wanted.values())
    entered: dict[Pose, tuple[Pose, int]] = {}
    left: set[Pose] = set()
    queue: deque[Pose] = deque([START])
    while queue:
        pose = queue.popleft()
        left.add(pose)
        ahead, right, turn = pose
        step = (ahead + STEPS[turn][0], right + STEPS[turn][1])
        for found, place in ((facing, step), (onto, (ahead, right))):
            position = wanted.get(place)
            if position is not None and found[position] is None:
                found[position] = _path_to(entered, pose)
        for following, primitive in (
            ((*step, turn), sc.FORWARD),
            ((ahead, right, (turn - 1) & 3), sc.LEFT),
            ((ahead, right, (turn + 1) & 3), sc.RIGHT),
        ):
            cell = following[:2]
            is_inside = cell[0] in aheads and cell[1] in rights
            if is_inside and following not in left and cell not in barred:
                queue.append(following)
                entered[following] = (pose, primitive)
    return facing, onto


def _path_to(entered: dict[Pose, tuple[Pose, int]], pose: Pose) -> Path:
    """Return the primitives from the start to a pose."""
    path: list[int] = []
    while pose != START:
        pose, primitive = entered[pose]
        path.append(primitive)
    return tuple(reversed(path))


def image(scene: GridScene) -> tuple[object, ...]:
    """Return a value that is equal for equal views, like the agent's own image."""
    view = sc.visible_codes(scene)
    places = sc.view_positions(scene)
    shown = [
        (code, scene.things.get(place) if code is not None and code > sc.WALL else None)
        for code, place in zip(view, places, strict=True)
    ]
    shown[sc.HALF] = (None, scene.carrying)
    return tuple(shown)
