"""The high-level actions in a scene, and the primitives of each."""

from dataclasses import dataclass, replace
from enum import Enum, auto

from envhub.envs.babyai import scene as sc
from envhub.envs.babyai.scene import GridScene, Seen


class ActionEffect(Enum):
    """The effect of an action after its walk."""

    MOVE = auto()
    PICKUP = auto()
    DROP = auto()
    TOGGLE = auto()
    TOGGLE_THROUGH = auto()


@dataclass(frozen=True, slots=True)
class GridAction:
    """One executable action; `position` is its object's cell, -1 for none."""

    name: str
    kind: ActionEffect
    primitives: tuple[int, ...]
    position: int = -1


def has_key(scene: GridScene, position: int) -> bool:
    """Return whether the agent carries the key of the door at `position`."""
    return scene.carrying == (scene.things[position][0], "key")


def list_actions(scene: GridScene, objects: list[Seen]) -> list[GridAction]:
    """Return every action that changes the state now, in AgentGym's order.

    AgentGym's list also has actions without effect: walking into a ball, a key or a closed door,
    and going to an object already faced. They are left out here. Paths use visible free cells only.
    """
    front = scene.front()
    ahead = scene.codes[front]
    actions = [
        GridAction("turn left", ActionEffect.MOVE, (sc.LEFT,)),
        GridAction("turn right", ActionEffect.MOVE, (sc.RIGHT,)),
    ]
    if sc.IS_WALKABLE[ahead]:
        actions.append(GridAction("move forward", ActionEffect.MOVE, (sc.FORWARD,)))
    if scene.carrying is None:
        actions += [
            _pickup(seen) for seen in objects if seen.code == sc.THING and seen.path is not None
        ]
    elif ahead == sc.FREE:
        actions.append(GridAction("drop", ActionEffect.DROP, (sc.DROP,), front))
    for seen in objects:
        actions += _on_door(scene, seen)
        if seen.position == front and _is_togglable(scene, front):
            actions.append(GridAction("toggle", ActionEffect.TOGGLE, (sc.TOGGLE,), front))
    for seen in objects:
        actions += _going_to(seen)
    return actions


def _is_togglable(scene: GridScene, front: int) -> bool:
    """Return whether `toggle` changes the object in front of the agent."""
    ahead = scene.codes[front]
    if ahead == sc.LOCKED:
        return has_key(scene, front)
    if ahead == sc.THING:
        return scene.opens_boxes and scene.things[front][1] == "box"
    return ahead == sc.CLOSED or (ahead == sc.OPEN and scene.closes_doors)


def _pickup(seen: Seen) -> GridAction:
    """Return the action that picks up a visible object."""
    path = (*(seen.path or ()), sc.PICKUP)
    return GridAction(f"pickup {seen.name} {seen.number}", ActionEffect.PICKUP, path, seen.position)


def _on_door(scene: GridScene, seen: Seen) -> list[GridAction]:
    """Return the action that goes through a door, if possible."""
    label = f"{seen.name} {seen.number}"
    if seen.code == sc.OPEN and seen.path_onto:
        return [GridAction(f"go through {label}", ActionEffect.MOVE, seen.path_onto)]
    openable = seen.code == sc.LOCKED and has_key(scene, seen.position)
    if seen.path is None or not (seen.code == sc.CLOSED or openable):
        return []
    path = (*seen.path, sc.TOGGLE, sc.FORWARD)
    return [
        GridAction(
            f"toggle and go through {label}", ActionEffect.TOGGLE_THROUGH, path, seen.position
        )
    ]


def _going_to(seen: Seen) -> list[GridAction]:
    """Return the walk that ends in front of an object, or on the goal, if possible."""
    if seen.code == sc.GOAL:
        return (
            [GridAction("go to goal", ActionEffect.MOVE, seen.path_onto)] if seen.path_onto else []
        )
    if not seen.path or seen.code == sc.LAVA:
        return []
    return [GridAction(f"go to {seen.name} {seen.number}", ActionEffect.MOVE, seen.path)]


def poses(scene: GridScene, action: GridAction) -> list[tuple[int, int]]:
    """Return the (position, heading) after each primitive of an action, without performing it."""
    at = scene.at
    heading = scene.heading
    passed = []
    for primitive in action.primitives:
        if primitive == sc.FORWARD:
            at += sc.delta(scene.stride, heading)
        elif primitive == sc.LEFT:
            heading = (heading - 1) & 3
        elif primitive == sc.RIGHT:
            heading = (heading + 1) & 3
        passed.append((at, heading))
    return passed


def after(scene: GridScene, action: GridAction) -> GridScene:
    """Return the scene after a walk or a door action; pickups and drops are not modelled."""
    at, heading = poses(scene, action)[-1]
    codes = scene.codes
    if action.kind in (ActionEffect.TOGGLE, ActionEffect.TOGGLE_THROUGH):
        codes = codes.copy()
        codes[action.position] = sc.OPEN
    return replace(scene, codes=codes, at=at, heading=heading)


def normalize(text: str) -> str:
    """Return an action text in lower case, single-spaced, with `pick up` replaced by `pickup`."""
    words = " ".join(text.lower().split())
    return "pickup " + words[8:] if words.startswith("pick up ") else words
