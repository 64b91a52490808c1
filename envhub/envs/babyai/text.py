"""Text of a scene, in the compact style and in AgentGym's style."""

import json

from envhub.envs.babyai import scene as sc
from envhub.envs.babyai.actions import GridAction, has_key
from envhub.envs.babyai.scene import GridScene, Seen

INVALID = "invalid action"
CHECK = "check available actions"
# AgentGym's refusals, and reasons within its other refusals.
NO_CHANGE = "No change in state."
UNKNOWN = "The action is not recognized. Please check valid actions."
NO_PATH = "there is no path leading to it"
BARRIER = "There is a barrier in front of you, you can't move forward."
EMPTY_HANDS = "You cannot drop the object, as you are not carrying anything."
NO_ROOM = "You cannot drop the object, as there is already an object in front of you."
CLOSED = "it is closed. You should toggle it first"
NO_KEY = "you are not carrying a key"
WRONG_KEY = "the color of the key you are carrying does not match the color of door"


def wall_ahead(view: list[int | None]) -> int | None:
    """Return the steps to the wall straight ahead (1: adjacent); None if no wall is visible."""
    for forward in range(1, sc.VIEW):
        if view[forward * sc.VIEW + sc.HALF] == sc.WALL:
            return forward
    return None


def compact_view(scene: GridScene, objects: list[Seen], view: list[int | None]) -> str:
    """Return the view as one line, such as `red box 1 ahead 1 right 1, wall 4`."""
    parts = [_compact_object(seen) for seen in objects]
    wall = wall_ahead(view)
    if wall is not None:
        parts.append(f"wall {wall}")
    if scene.carrying is not None:
        parts.append("carrying {} {}".format(*scene.carrying))
    return ", ".join(parts) if parts else "nothing"


def _compact_object(seen: Seen) -> str:
    """Return an object and its position in few words."""
    words = [seen.name, str(seen.number)]
    if seen.forward:
        words.append(f"ahead {seen.forward}")
    if seen.right:
        words.append(f"right {seen.right}" if seen.right > 0 else f"left {-seen.right}")
    if seen.path is None:
        words.append("blocked")
    return " ".join(words)


def agentgym_view(
    scene: GridScene,
    objects: list[Seen],
    view: list[int | None],
    actions: list[GridAction],
    *,
    is_over: bool,
) -> str:
    """Return the view in AgentGym's sentences, followed by the available actions."""
    sentences = ["You cannot see any objects within sight."]
    if objects or sc.WALL in view:
        sentences = ["In front of you in this room, you can see several objects: "]
        sentences += [f"There is a {s.name} {s.number} {_position(s)} " for s in objects]
    sentences.append("The room has walls around you. ")
    sentences.append(_barrier(objects, view))
    if scene.carrying is None:
        sentences.append("You are not carrying anything.")
    else:
        sentences.append("You are carrying a {} {}.".format(*scene.carrying))
    if is_over:
        sentences.append("\n The task is completed.")
    return "".join(sentences) + "\n" + available(actions)


def _position(seen: Seen) -> str:
    """Return an object's position in AgentGym's words."""
    if not seen.right:
        return f"right in front of you {seen.forward} steps away. "
    side = "right" if seen.right > 0 else "left"
    return f"{seen.forward} steps in front of you and {abs(seen.right)} steps to your {side}. "


def _barrier(objects: list[Seen], view: list[int | None]) -> str:
    """Return the sentence about the nearest wall or box straight ahead; "" without one."""
    boxes = [s.forward for s in objects if not s.right and s.name.endswith(" box")]
    wall = wall_ahead(view)
    if boxes and (wall is None or min(boxes) < wall):
        return f"You are facing a box {min(boxes)} steps away. "
    return f"You are facing a wall {wall} steps away. " if wall is not None else ""


def available(actions: list[GridAction]) -> str:
    """Return AgentGym's line of available actions."""
    return "Available actions: " + json.dumps(_names(actions))


def _names(actions: list[GridAction]) -> list[str]:
    """Return the names of the actions and of the check for available actions."""
    return [*(action.name for action in actions), CHECK]


def asked(actions: list[GridAction]) -> str:
    """Return AgentGym's answer to `check available actions`."""
    return f"You can take the following actions: {', '.join(_names(actions))}"


def refusal(scene: GridScene, objects: list[Seen], actions: list[GridAction], action: str) -> str:
    """Return AgentGym's answer to a normalized action text that is unavailable."""
    if not action:
        return NO_CHANGE
    if "check" in action:
        return asked(actions)
    if action == "move forward":
        return BARRIER
    if action == "drop":
        if scene.carrying is None:
            return EMPTY_HANDS
        return NO_ROOM
    by_label = {f"{seen.name} {seen.number}": seen for seen in objects}
    for verb in ("toggle and go through", "go through", "pickup", "go to"):
        seen = by_label.get(action.removeprefix(verb + " "))
        if action.startswith(verb + " ") and seen is not None:
            return _refusal_on(scene, seen, verb)
    return UNKNOWN


def _refusal_on(scene: GridScene, seen: Seen, verb: str) -> str:
    """Return AgentGym's reason why an action on an object is unavailable."""
    label = f"{verb} {seen.name} {seen.number}"
    if verb == "go to" and seen.path == ():
        return NO_CHANGE
    reason = NO_PATH
    if verb == "pickup" and scene.carrying is not None:
        reason = "you are already carrying something"
    if verb == "go through" and seen.code == sc.CLOSED:
        reason = CLOSED
    locked_out = seen.code == sc.LOCKED and not has_key(scene, seen.position)
    if verb == "toggle and go through" and locked_out:
        reason = NO_KEY
        if scene.carrying is not None and scene.carrying[1] == "key":
            reason = WRONG_KEY
    return f"You cannot {label}, as {reason}."
