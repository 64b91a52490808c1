"""BabyAI levels in text form, with high-level actions."""

import hashlib
import heapq
import struct
import zlib
from base64 import b64encode
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from minigrid.envs.babyai.core.verifier import (
    AfterInstr,
    AndInstr,
    BeforeInstr,
    GoToInstr,
    Instr,
    OpenInstr,
    PickupInstr,
    PutNextInstr,
    SeqInstr,
)
from minigrid.envs.babyai.unlock import KeyInBox

from common.config.envs import BabyaiOptions
from envhub.env import ItemId, StepResult, Style, action_text, parse_item
from envhub.envs.babyai import actions as act
from envhub.envs.babyai import levels, text
from envhub.envs.babyai import scene as sc
from envhub.envs.babyai.actions import ActionEffect, GridAction
from envhub.envs.babyai.scene import GridScene
from envhub.envs.text_env import TextEnv

OPENING = (ActionEffect.TOGGLE, ActionEffect.TOGGLE_THROUGH)
CLOSING = (ActionEffect.TOGGLE,)
PICKING_UP = (ActionEffect.PICKUP,)
DROPPING = (ActionEffect.DROP,)


@dataclass(frozen=True, slots=True)
class FacingTarget:
    """Cells to face, and the kinds of action that finish there; no kinds: facing is enough.

    `then` is the destination of an object that is picked up here; None if it does not matter.
    """

    positions: frozenset[int]
    kinds: tuple[ActionEffect, ...]
    then: "FacingTarget | None" = None


def position_of(cell, stride: int) -> int:
    """Return the padded position of a minigrid (x, y)."""
    return (int(cell[1]) + sc.PAD) * stride + int(cell[0]) + sc.PAD


def current_targets(level, scene: GridScene) -> list[FacingTarget]:
    """Return the next targets of the level's instruction; usually one."""
    targets = [_target(level, scene, clause) for clause in _open_clauses(level.instrs)]
    return [target for target in targets if target is not None and target.positions]


def _open_clauses(instruction: Instr) -> list[Instr]:
    """Return the active clauses of an instruction with before, after and and."""
    if isinstance(instruction, BeforeInstr):
        is_first = instruction.a_done != "success"
        return _open_clauses(instruction.instr_a if is_first else instruction.instr_b)
    if isinstance(instruction, AfterInstr):
        is_first = instruction.b_done != "success"
        return _open_clauses(instruction.instr_b if is_first else instruction.instr_a)
    if isinstance(instruction, AndInstr):
        clauses = []
        if instruction.a_done != "success":
            clauses += _open_clauses(instruction.instr_a)
        if instruction.b_done != "success":
            clauses += _open_clauses(instruction.instr_b)
        return clauses
    return [instruction]


def _target(level, scene: GridScene, clause: Instr) -> FacingTarget | None:
    """Return the target of one clause of an instruction; None: it is complete."""
    if isinstance(clause, GoToInstr):
        return FacingTarget(
            frozenset(position_of(p, scene.stride) for p in clause.desc.obj_poss), ()
        )
    if isinstance(clause, OpenInstr):
        closed = [door for door in clause.desc.obj_set if not door.is_open]
        if closed or not scene.closes_doors:
            return FacingTarget(_where(level, scene, closed), OPENING)
        return FacingTarget(_where(level, scene, clause.desc.obj_set), CLOSING)
    if isinstance(clause, PickupInstr):
        return FacingTarget(_where(level, scene, clause.desc.obj_set), PICKING_UP)
    if isinstance(clause, PutNextInstr):
        return _put_next(level, scene, clause)
    return None


def _where(level, scene: GridScene, wanted: list) -> frozenset[int]:
    """Return the positions of these exact objects; minigrid does not always store them."""
    identities = {id(thing) for thing in wanted}
    width = level.grid.width
    cells = (i for i, thing in enumerate(level.grid.grid) if id(thing) in identities)
    return frozenset(position_of((i % width, i // width), scene.stride) for i in cells)


def _put_next(level, scene: GridScene, clause: PutNextInstr) -> FacingTarget:
    """Return the cells to drop the moved object on, or the object to pick up first."""
    moved = _where(level, scene, clause.desc_move.obj_set)
    near = {
        position_of(cell, scene.stride) + sc.delta(scene.stride, heading)
        for cell in clause.desc_fixed.obj_poss
        for heading in range(4)
    }
    beside = FacingTarget(
        frozenset(p for p in near if scene.codes[p] == sc.FREE or p in moved), DROPPING
    )
    if not beside.positions:
        taken = frozenset(p for p in near if scene.codes[p] == sc.THING)
        return FacingTarget(taken, PICKING_UP)
    if any(level.carrying is thing for thing in clause.desc_move.obj_set):
        return beside
    return FacingTarget(moved, PICKING_UP, then=beside)


def closes_doors(level) -> bool:
    """Return whether an open door may have to be closed and opened again.

    This is so if opening a door is one of several parts: the way to another part may open it too
    early.
    """
    return isinstance(level.instrs, SeqInstr) and _has_opening(level.instrs)


def _has_opening(instruction: Instr) -> bool:
    """Return whether an instruction contains a door to open."""
    if isinstance(instruction, SeqInstr):
        return _has_opening(instruction.instr_a) or _has_opening(instruction.instr_b)
    return isinstance(instruction, OpenInstr)


# Cost of entering a cell, in primitives. An obstacle costs as much as clearing it.
COSTS = {sc.FREE: 1, sc.OPEN: 1, sc.GOAL: 1, sc.CLOSED: 2, sc.THING: 15, sc.LOCKED: 40}
UNLOCK_COST = 2
UNREACHABLE = 1 << 20
MAX_ERRANDS = 8


def distances(
    scene: GridScene, target: FacingTarget, *, through_locks: bool = True
) -> dict[int, int]:
    """Return for each position the cost of walking to a cell that faces a target cell.

    Without `through_locks` a door whose key is not in hand is a wall.
    """
    steps = [sc.delta(scene.stride, heading) for heading in range(4)]
    heap = [(0, position + s) for position in target.positions for s in steps]
    heapq.heapify(heap)
    cost: dict[int, int] = {}
    while heap:
        so_far, position = heapq.heappop(heap)
        if position in cost:
            continue
        entering = _cost(scene, position)
        if entering is None or (not through_locks and _is_locked_without_key(scene, position)):
            continue
        cost[position] = so_far
        for s in steps:
            if position + s not in cost:
                heapq.heappush(heap, (so_far + entering, position + s))
    return cost


def _is_locked_without_key(scene: GridScene, position: int) -> bool:
    return scene.codes[position] == sc.LOCKED and not act.has_key(scene, position)


def _cost(scene: GridScene, position: int) -> int | None:
    """Return the cost of entering a cell; None: it cannot be entered."""
    code = scene.codes[position]
    if code == sc.LOCKED and not _is_locked_without_key(scene, position):
        return UNLOCK_COST
    return COSTS.get(code)


def cheapest_path(scene: GridScene, start: int, cost: dict[int, int]) -> list[int]:
    """Return the cheapest path from `start`, excluded, to the last cell before the target."""
    steps = [sc.delta(scene.stride, heading) for heading in range(4)]
    at = start
    passed = []
    while cost.get(at, 0) > 0:
        at = min(
            (at + s for s in steps if at + s in cost),
            key=lambda p: (cost[p] + (_cost(scene, p) or 0), p),
        )
        if at in passed:
            break
        passed.append(at)
    return passed


def first_errand(
    scene: GridScene,
    target: FacingTarget,
    *,
    kept_free: frozenset[int] = frozenset(),
    num_errands: int = 0,
) -> FacingTarget | None:
    """Return the target itself, or an errand that must come first; None if there is no way.

    Errands: fetch the key of a locked door, unlock it, carry an object out of the way, and empty
    the hand before a pickup. An errand may need another one first, up to `MAX_ERRANDS` deep.

    Args:
        scene: the map.
        target: the wanted target.
        kept_free: cells of the paths that this errand serves; nothing is dropped there.
        num_errands: nesting depth of this errand.
    """
    if not target.positions or num_errands > MAX_ERRANDS:
        return None
    deeper = num_errands + 1
    if target.kinds == OPENING:
        ready = _openable(scene, target)
        if not ready.positions:
            keys = [_key_of(scene, door) for door in sorted(target.positions)]
            # A key may lie behind its own door while another equal key is reachable.
            return _first_possible(_walled(scene, target.positions), keys, kept_free, deeper)
        target = ready
    cost = distances(scene, target)
    if scene.at not in cost:
        return None
    passed = cheapest_path(scene, scene.at, cost)
    reserved = kept_free | frozenset(passed)
    errand = _obstacle(scene, passed)
    if errand is None and target.then is not None:
        passed = _onward(scene, target, passed[-1] if passed else scene.at)
        reserved |= frozenset(passed)
        errand = _obstacle(scene, passed)
    if errand is not None:
        nested = first_errand(scene, errand, kept_free=reserved, num_errands=deeper)
        if nested is not None or errand.kinds != OPENING:
            return nested
        # The door cannot be unlocked. Try a path around it.
        around = _walled(scene, errand.positions)
        return first_errand(around, target, kept_free=kept_free, num_errands=deeper)
    if target.kinds == PICKING_UP and scene.carrying is not None:
        return _drop_beside(scene, target, reserved)
    return target


def _first_possible(
    scene: GridScene, errands: list[FacingTarget], kept_free: frozenset[int], num_errands: int
) -> FacingTarget | None:
    """Return the first errand that can be done; None if there is none."""
    candidates = (
        first_errand(scene, errand, kept_free=kept_free, num_errands=num_errands)
        for errand in errands
    )
    return next((errand for errand in candidates if errand is not None), None)


def _walled(scene: GridScene, positions: frozenset[int]) -> GridScene:
    """Return the scene with walls at these positions."""
    codes = scene.codes.copy()
    for position in positions:
        codes[position] = sc.WALL
    return replace(scene, codes=codes)


def _openable(scene: GridScene, target: FacingTarget) -> FacingTarget:
    """Return the target without doors that cannot be opened."""
    return FacingTarget(
        frozenset(p for p in target.positions if not _is_locked_without_key(scene, p)), OPENING
    )


def _onward(scene: GridScene, target: FacingTarget, standing: int) -> list[int]:
    """Return the path from the pickup of an object to its destination."""
    assert target.then is not None
    steps = [sc.delta(scene.stride, heading) for heading in range(4)]
    picked = next((standing + s for s in steps if standing + s in target.positions), standing)
    codes = scene.codes.copy()
    codes[picked] = sc.FREE
    without = replace(scene, codes=codes)
    cost = distances(without, target.then)
    return cheapest_path(without, standing, cost) if standing in cost else []


def _obstacle(scene: GridScene, passed: list[int]) -> FacingTarget | None:
    """Return the errand for the first obstacle on a path; None if it is clear."""
    for position in passed:
        code = scene.codes[position]
        if code == sc.THING:
            return FacingTarget(frozenset({position}), PICKING_UP)
        if code == sc.LOCKED:
            return FacingTarget(frozenset({position}), OPENING)
    return None


def _key_of(scene: GridScene, door: int) -> FacingTarget:
    """Return the errand for the key of a door: the key itself, or a box that may contain it."""
    key = (scene.things[door][0], "key")
    places = frozenset(p for p, thing in scene.things.items() if thing == key)
    if not places and scene.opens_boxes:
        boxes = frozenset(p for p, (_, kind) in scene.things.items() if kind == "box")
        return FacingTarget(boxes, (ActionEffect.TOGGLE,))
    return FacingTarget(places, PICKING_UP, then=FacingTarget(frozenset({door}), OPENING))


def _drop_beside(scene: GridScene, target: FacingTarget, kept_free: frozenset[int]) -> FacingTarget:
    """Return the cells to drop the carried object on, away from paths and doors."""
    steps = [sc.delta(scene.stride, heading) for heading in range(4)]
    before_doors = {
        position + s
        for position in scene.things
        if scene.codes[position] in sc.DOOR_STATE
        for s in steps
    }
    wanted = target.then.positions if target.then is not None else frozenset()
    free = {p for p, code in enumerate(scene.codes) if code == sc.FREE and p not in kept_free}
    for unwanted in (wanted | before_doors, before_doors, frozenset()):
        if free - unwanted:
            return FacingTarget(frozenset(free - unwanted), DROPPING)
    return FacingTarget(frozenset(), DROPPING)


MAX_EXPANSIONS = 48
PRIMITIVES_PER_ACTION = 3.0  # Estimated primitives of one action, for the search heuristic.


class Expert:
    """Chooses actions for one level. It keeps its plan while the state matches the plan.

    A search of at most `MAX_EXPANSIONS` scenes bounds the time of a decision. If no target is
    found, the expert walks to the nearest scene of the search from which no earlier plan began.
    This rules out endless circles.
    """

    def __init__(self, level) -> None:
        self._level = level
        self._plan: deque[tuple[tuple, str]] = deque()  # Pairs (state before, action).
        self._visited: set[tuple] = set()

    def choose(self, scene: GridScene, by_name: Mapping[str, GridAction]) -> str | None:
        """Return the name of the next action in `scene`; None if no plan exists."""
        here = _key(scene)
        if not self._plan or self._plan[0][0] != here or self._plan[0][1] not in by_name:
            self._plan = self._make_plan(scene)
        if not self._plan:
            return None
        return self._plan.popleft()[1]

    def _make_plan(self, scene: GridScene) -> deque[tuple[tuple, str]]:
        """Return the planned actions, each with its state before; empty: there is no plan."""
        wanted = current_targets(self._level, scene)
        targets = [t for t in (first_errand(scene, w) for w in wanted) if t is not None]
        if any(w.kinds in (PICKING_UP, DROPPING) for w in wanted):
            # Only one part at a time: the parts would compete for the one hand.
            targets = targets[:1]
        self._visited.add(_key(scene))
        if not targets:
            return deque()
        return deque(search(scene, targets, self._visited))


def _key(scene: GridScene) -> tuple:
    """Return the planner's key of a scene, unique within an episode."""
    return scene.at, scene.heading, scene.carrying, bytes(scene.codes)


def finishes(scene: GridScene, action: GridAction, target: FacingTarget) -> bool:
    """Return whether one of an action's primitives meets the target."""
    if target.kinds:
        return action.kind in target.kinds and action.position in target.positions
    passed = act.poses(scene, action)
    return any(at + sc.delta(scene.stride, h) in target.positions for at, h in passed)


def search(
    scene: GridScene, targets: list[FacingTarget], visited: set[tuple]
) -> list[tuple[tuple, str]]:
    """Return the actions to a target, or to the nearest scene, each with the state before it.

    Weighted best-first search; ties go to fewer primitives, then to the order of the action list.
    """
    ranges = [distances(scene, target, through_locks=False) for target in targets]

    def remaining(at: int) -> int:
        """Return the cost of the way to the nearest target."""
        return min(r.get(at, UNREACHABLE) for r in ranges)

    counter = 0
    start = (_key(scene), scene, [])
    frontier = [(remaining(scene.at) / PRIMITIVES_PER_ACTION, 0, counter, start)]
    seen_states = {start[0]}
    best = (UNREACHABLE, [])
    for _ in range(MAX_EXPANSIONS):
        if not frontier:
            break
        _, num_primitives, _, (state, here, path) = heapq.heappop(frontier)
        if path and state not in visited:
            best = min(best, (remaining(here.at), path), key=lambda b: b[0])
        objects, _ = sc.see(here)
        options = act.list_actions(here, objects)
        final = [a for a in options if any(finishes(here, a, t) for t in targets)]
        if final:
            return [*path, (state, min(final, key=lambda a: len(a.primitives)).name)]
        for action in options:
            if action.kind not in (ActionEffect.MOVE, ActionEffect.TOGGLE_THROUGH):
                continue
            following = act.after(here, action)
            key = _key(following)
            if key in seen_states:
                continue
            seen_states.add(key)
            counter += 1
            total = num_primitives + len(action.primitives)
            guess = len(path) + 1 + remaining(following.at) / PRIMITIVES_PER_ACTION
            step = (key, following, [*path, (state, action.name)])
            heapq.heappush(frontier, (guess, total, counter, step))
    return best[1]


# minigrid's step count lowers the reward and truncates episodes. Here the caller limits the turns.
ENDLESS_STEPS = 1_000_000_000
SUBSETS = levels.subsets()


class BabyAiEnv(TextEnv):
    """One BabyAI episode.

    It differs from AgentGym's server on purpose:
    - The reward is 1.0, whatever the step count. The episode ends at the primitive that completes
      the mission, and nothing else ends it.
    - The mission keeps its `then` and `after you`; `agentgym_goals` hides them.
    - An unsolvable layout is drawn again; `agentgym_layouts` keeps it.
    - An object has the same number in actions and in the description.
    - Only actions that change the state are valid.
    - `toggle` closes an open door if a mission of several parts contains opening a door. In
      KeyInBox it opens a box. These missions can need it.
    """

    def __init__(self, style: Style, *, options: BabyaiOptions | None = None) -> None:
        super().__init__(style)
        self._options = options or BabyaiOptions()
        self._level_name = ""

    def reset(self, item_id: str, seed: int = 0) -> str:
        """Start an item. `seed` is unused: the item determines the whole level."""
        item = parse_item(item_id, SUBSETS)
        self._start(item)
        return self._first_observation()

    def _start(self, item: ItemId) -> None:
        """Draw the level of an item, and read its first view."""
        level_name, seed = self._locate(item)
        if level_name != self._level_name:
            self._level = levels.make_level(
                level_name, keeps_unsolvable=self._options.agentgym_layouts
            )
            # Our view replaces the level's own, which would be drawn at every primitive.
            self._level.gen_obs = dict
            self._level_name = level_name
        else:  # A level with a fixed limit does not compute it again.
            self._level.max_steps = self._max_steps
        self._level.reset(seed=seed)
        self._performed: list[int] = []  # All primitives of the episode.
        self._max_steps = self._level.max_steps
        self._level.max_steps = ENDLESS_STEPS
        self._fingerprint = _fingerprint(self._level)
        self._expert = Expert(self._level)
        self._begin()
        self._scene = read_scene(self._level)
        self._update_view()

    def _locate(self, item: ItemId) -> tuple[str, int]:
        return levels.locate(item)

    def _step(self, action: str) -> StepResult:
        """Perform an action, and describe the result."""
        name = act.normalize(action_text(action))
        chosen = self._by_name.get(name)
        if chosen is None:
            return StepResult(
                observation=self._refusal(name),
                reward=0.0,
                done=False,
                is_valid=name == text.CHECK and self._style is Style.AGENTGYM,
            )
        is_won = self._perform(chosen)
        return StepResult(
            observation=self._observation(),
            reward=self._success_reward() if is_won else 0.0,
            done=self._done,
            is_valid=True,
            is_success=is_won,
        )

    def _perform(self, action: GridAction) -> bool:
        """Run the primitives until the mission ends or one has no effect.

        Return whether the mission was completed.
        """
        is_won = False
        for primitive in action.primitives:
            before = self._pose()
            self._performed.append(int(primitive))
            _, reward, has_ended, _, _ = self._level.step(primitive)
            # minigrid's debugging levels also end on a wrong object. Here the episode continues.
            if has_ended and float(reward) > 0:
                is_won = self._done = True
                break
            if primitive <= sc.FORWARD and before == self._pose():
                break
        if action.kind is ActionEffect.MOVE:
            self._scene.at, self._scene.heading = _pose(self._level, self._scene.stride)
        else:
            self._scene = read_scene(self._level)
        self._update_view()
        return is_won

    def save(self) -> list[int]:
        """Return the primitives so far: the mission refers to the level's objects themselves."""
        return self._performed

    def load(self, state: list[int]) -> None:
        """Repeat saved primitives. They take some 20 microseconds each."""
        for primitive in state:
            self._level.step(primitive)
        self._performed = state
        if state:  # AgentGym's first view differs from the level.
            self._scene = read_scene(self._level)
            self._update_view()

    def state_text(self) -> str:
        """Return a hash of the map, pose, carried object and completed mission parts."""
        parts = vars(self._level.instrs)  # pyright: ignore[reportAttributeAccessIssue]
        done = [parts.get(name) for name in ("a_done", "b_done")]
        scene = self._scene
        digest = hashlib.blake2b(bytes(scene.codes), digest_size=16)
        digest.update(
            repr(
                (sorted(scene.things.items()), scene.at, scene.heading, scene.carrying, done)
            ).encode()
        )
        return digest.hexdigest()

    def _success_reward(self) -> float:
        """Return 1, or minigrid's reward with `shaped_reward`; never below 0."""
        if not self._options.shaped_reward:
            return 1.0
        return max(0.0, self._minigrid_reward())

    def _minigrid_reward(self) -> float:
        """Return minigrid's reward for a success now; below 0 beyond 1.1 times its step limit."""
        # The order of operations gives minigrid's rounding.
        return 1.0 - 0.9 * (self._level.step_count / self._max_steps)

    def _pose(self) -> tuple[int, int]:
        return _pose(self._level, self._scene.stride)

    def _update_view(self) -> None:
        """Read the view and the actions of the current scene."""
        self._objects, self._view = sc.see(self._scene)
        self._actions = act.list_actions(self._scene, self._objects)
        self._by_name = {action.name: action for action in self._actions}

    def _first_observation(self) -> str:
        """Return the mission and the first view."""
        if self._is_compact:
            return f"goal: {self._level.mission}\n{self._observation()}"
        return f"Your goal: {self._goal()}\n{self._observation()}"

    def _goal(self) -> str:
        """Return the mission. AgentGym's optional wording hides the order of its parts."""
        if not self._options.agentgym_goals:
            return self._level.mission
        return self._level.mission.replace("then", "and").replace("after you", "and")

    def _observation(self) -> str:
        """Return the text of the current view."""
        if self._is_compact:
            return text.compact_view(self._scene, self._objects, self._view)
        return text.agentgym_view(
            self._scene, self._objects, self._view, self._actions, is_over=self._done
        )

    def _refusal(self, name: str) -> str:
        """Return the observation after an action that is unavailable."""
        if self._is_compact:
            return f"{text.INVALID}, {self._observation()}"
        answer = text.refusal(self._scene, self._objects, self._actions, name)
        return f"{answer}\n{text.available(self._actions)}"

    def _valid_actions(self) -> list[str]:
        return [action.name for action in self._actions]

    def _expert_action(self) -> str | None:
        """Return the scripted expert's action. The expert has the whole map and the instruction."""
        return self._expert.choose(self._scene, self._by_name)

    def render(self) -> str:
        """Return the mission and the whole map, two characters per cell."""
        return f"{self._level.mission}\n{self._level.pprint_grid()}"

    def detail(self, what: str) -> str | None:
        """Return the `picture` of the whole map as a data URL; None for anything else."""
        if what != "picture":
            return None
        pixels = self._level.get_frame(highlight=False, tile_size=32)  # [height, width, 3] uint8
        return f"data:image/png;base64,{b64encode(as_png(pixels)).decode()}"

    def fingerprint(self) -> str:
        """Return the hash of the complete initial state."""
        return self._fingerprint


def as_png(pixels) -> bytes:
    """Return an image [height, width, 3], uint8, as a PNG file, without an image library."""
    height, width, _ = pixels.shape
    # Each row has the filter type 0: none.
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)

    def chunk(kind: bytes, content: bytes) -> bytes:
        head = struct.pack(">I", len(content)) + kind
        return head + content + struct.pack(">I", zlib.crc32(kind + content))

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", size), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _fingerprint(level) -> str:
    """Return a hash of the complete state of a level."""
    carried = level.carrying.encode() if level.carrying else ()
    pose = tuple(int(v) for v in (*level.agent_pos, level.agent_dir, *carried))
    digest = hashlib.sha256(level.grid.encode().tobytes())
    digest.update(f"{pose} {level.mission}".encode())
    return digest.hexdigest()


def _pose(level, stride: int) -> tuple[int, int]:
    x, y = level.agent_pos
    return (int(y) + sc.PAD) * stride + int(x) + sc.PAD, int(level.agent_dir)


def read_scene(level) -> GridScene:
    """Return a snapshot of a minigrid level."""
    grid = level.grid
    stride = grid.width + 2 * sc.PAD
    codes = [sc.WALL] * (stride * (grid.height + 2 * sc.PAD))
    things: dict[int, tuple[str, str]] = {}
    for i, thing in enumerate(grid.grid):
        position = (i // grid.width + sc.PAD) * stride + i % grid.width + sc.PAD
        if thing is None or thing.type == "floor":
            codes[position] = sc.FREE
        elif thing.type != "wall":
            codes[position] = _code(thing)
            things[position] = (thing.color, thing.type)
    at, heading = _pose(level, stride)
    carried = level.carrying
    carrying = (carried.color, carried.type) if carried else None
    return GridScene(
        codes,
        things,
        stride,
        at,
        heading,
        carrying,
        closes_doors=closes_doors(level),
        opens_boxes=isinstance(level, KeyInBox),
    )


def _code(thing) -> int:
    """Return the code of an object in a snapshot."""
    if thing.type == "door":
        return sc.OPEN if thing.is_open else sc.LOCKED if thing.is_locked else sc.CLOSED
    return {"goal": sc.GOAL, "lava": sc.LAVA}.get(thing.type, sc.THING)
