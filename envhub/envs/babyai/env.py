"""BabyAI's catalogue entry, and its episodes by AgentGym's own rules.

AgentGym's rules decide the offered actions, their numbers and the paths. They are copied exactly,
for comparisons with its results. Only reachable objects are numbered, so an object's number can
differ from its number in the description. Actions without effect are offered. Paths can lead
through cells out of sight.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from common.config.envs import BabyaiOptions, EnvsSection
from envhub.digests import digests_of_packages
from envhub.env import EnvSpec, ItemId, StepResult, Style, action_text
from envhub.envs.babyai import actions as act
from envhub.envs.babyai import levels, text
from envhub.envs.babyai import scene as sc
from envhub.envs.babyai.actions import ActionEffect, GridAction, has_key
from envhub.envs.babyai.episode import SUBSETS, BabyAiEnv, read_scene
from envhub.envs.babyai.scene import GridScene, Seen
from envhub.tasks import spec_beside

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
        for paths, place in ((facing, step), (onto, (ahead, right))):
            position = wanted.get(place)
            if position is not None and paths[position] is None:
                paths[position] = _path_to(entered, pose)
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


MIN_REWARD = 0.5  # Only a higher reward ends the episode.
PRIMITIVES = {sc.LEFT: "turn left", sc.RIGHT: "turn right", sc.FORWARD: "move forward"}


class AgentGymBabyAiEnv(BabyAiEnv):
    """One BabyAI episode with AgentGym's rules.

    Actions, their numbers and paths are AgentGym's. A macro stops when a primitive changes nothing
    in sight. Only the reward of its last primitive counts, so an earlier success is lost. The
    reward is minigrid's and falls with the steps. It is repeated after an invalid action, and it
    ends the episode only above 0.5. KeyInBox has no solution. Two rules differ: the reward is never
    below 0 except on AgentGym's own routes, and `pick up` is accepted.
    """

    def __init__(self, style: Style, *, options: BabyaiOptions) -> None:
        options = replace(options, shaped_reward=True, agentgym_goals=True, agentgym_layouts=True)
        super().__init__(style, options=options)
        # Rewards of the last performed action: returned, and minigrid's.
        self._reward = self._score = 0.0
        self._has_ended = False  # Whether minigrid ended the episode with that action.

    def _start(self, item: ItemId) -> None:
        """Begin an item, with minigrid's first view."""
        self._reward = self._score = 0.0
        self._has_ended = False
        super()._start(item)
        carried = self._level.carrying
        if (
            carried is not None and carried.init_pos is not None
        ):  # minigrid's first view is from before the agent picks up the object.
            column, row = carried.init_pos
            self._level.grid.set(column, row, carried)
            self._scene = read_scene(self._level)
            self._update_view()
            self._level.grid.set(column, row, None)

    def _locate(self, item: ItemId) -> tuple[str, int]:
        """Return the level and the seed of an item, with the level that AgentGym uses."""
        level, seed = levels.locate(item)
        return levels.AS_IN_AGENTGYM.get(level, level), seed

    def save(self) -> Any:
        """Return the primitives so far, and the result of the last action."""
        return [super().save(), self._reward, self._score, self._has_ended]

    def load(self, state: Any) -> None:
        """Repeat saved primitives."""
        performed, self._reward, self._score, self._has_ended = state
        super().load(performed)

    def _update_view(self) -> None:
        super()._update_view()
        self._offer = offer(self._scene, self._objects, self._view)

    def _step(self, action: str) -> StepResult:
        """Perform an offered action, and describe the result."""
        name = act.normalize(action_text(action))
        chosen = self._offer.actions.get(name)
        is_asked = "check" in name
        if chosen is None or not chosen.primitives or is_asked:
            return StepResult(
                observation=self._refusal(name),
                reward=self._reward,
                done=False,
                is_valid=chosen is not None or is_asked,
                score=self._score,
            )
        self._run(chosen)
        self._done = self._has_ended and self._reward > MIN_REWARD
        return StepResult(
            observation=self._observation(),
            reward=self._reward,
            done=self._done,
            is_valid=True,
            is_success=self._done,  # The episode ends with success only.
            score=self._score,
        )

    def _run(self, action: GridAction) -> None:
        """Run an action's primitives until one of them changes nothing."""
        has_reward = False
        for primitive in action.primitives:
            before = image(self._scene)
            self._performed.append(int(primitive))
            _, reward, self._has_ended, _, _ = self._level.step(primitive)
            has_reward = float(reward) > 0
            self._scene = read_scene(self._level)
            if image(self._scene) == before:
                break
        self._score = self._minigrid_reward() if has_reward else 0.0
        self._reward = max(0.0, self._score)
        self._update_view()

    def _observation(self) -> str:
        """Return the text of the view with the offered actions."""
        if self._is_compact:
            return super()._observation()
        offered = list(self._offer.actions.values())
        return text.agentgym_view(
            self._scene, self._objects, self._view, offered, is_over=self._has_ended
        )

    def _refusal(self, name: str) -> str:
        """Return the observation after an action that changes nothing."""
        offered = list(self._offer.actions.values())
        if "check" in name:
            answer = text.asked(offered)
        elif name and name not in self._offer.actions:
            answer = self._offer.refusals.get(name, text.UNKNOWN)
        else:
            answer = text.NO_CHANGE
        if self._is_compact:
            return f"{text.INVALID}, {self._observation()}"
        return f"{answer}\n{text.available(offered)}"

    def _valid_actions(self) -> list[str]:
        return [*self._offer.actions]

    def _expert_action(self) -> str | None:
        """Return the scripted expert's action in AgentGym's wording, one part at a time."""
        name = super()._expert_action()
        return None if name is None else self._worded(self._by_name[name])

    def _worded(self, wanted: GridAction) -> str | None:
        """Return the offered action with the same effect, or its first part; None without one."""
        # A combined action would get no reward for opening the door.
        if wanted.kind is ActionEffect.TOGGLE_THROUGH:
            walk = wanted.primitives[:-2]
            part = ActionEffect.MOVE if walk else ActionEffect.TOGGLE
            wanted = replace(wanted, kind=part, primitives=walk or (sc.TOGGLE,))
        ends = act.poses(self._scene, wanted)[-1]
        for name, action in self._offer.actions.items():
            if action.kind is not wanted.kind or not action.primitives:
                continue
            is_same_place = act.poses(self._scene, action)[-1] == ends
            is_same_thing = wanted.kind is ActionEffect.MOVE or action.position == wanted.position
            if is_same_place and is_same_thing:
                return name
        return PRIMITIVES.get(wanted.primitives[0])


def make_spec(options: EnvsSection) -> EnvSpec:
    """Return BabyAI's catalogue entry."""
    has_rules = options.babyai.agentgym_rules or options.agentgym_rules
    kind = AgentGymBabyAiEnv if has_rules else BabyAiEnv
    make = partial(kind, options=options.babyai)
    return spec_beside(
        __file__,
        SUBSETS,
        make,
        from_agentgym=levels.from_agentgym,
        column_item=levels.column_item,
        content=digests_of_packages("minigrid"),
    )
