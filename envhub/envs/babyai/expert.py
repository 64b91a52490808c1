"""The scripted expert: it plans high-level actions on the whole map, then follows the plan."""

import heapq
from collections import deque
from collections.abc import Mapping

from envhub.envs.babyai import actions as act
from envhub.envs.babyai import scene as sc
from envhub.envs.babyai.actions import ActionEffect, GridAction
from envhub.envs.babyai.paths import UNREACHABLE, distances, first_errand
from envhub.envs.babyai.scene import GridScene
from envhub.envs.babyai.targets import DROPPING, PICKING_UP, FacingTarget, current_targets

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
