"""Ways over the whole map, and what must be done first when something stands in them."""

import heapq

from envhub.envs.babyai import actions as act
from envhub.envs.babyai import scene as sc
from envhub.envs.babyai.actions import Kind
from envhub.envs.babyai.scene import Scene
from envhub.envs.babyai.targets import OPENING, PICKING_UP, Target

# Cost of entering a cell, in primitives; an obstacle costs what clearing it would.
COSTS = {sc.FREE: 1, sc.OPEN: 1, sc.GOAL: 1, sc.CLOSED: 2, sc.THING: 15, sc.LOCKED: 40}
UNLOCK_COST = 2
UNREACHABLE = 1 << 20
MAX_ERRANDS = 4


def distances(scene: Scene, target: Target) -> dict[int, int]:
    """Returns for each position the cost of walking to where a target cell can be faced."""
    steps = [sc.delta(scene.stride, heading) for heading in range(4)]
    heap = [(0, position + s) for position in target.positions for s in steps]
    heapq.heapify(heap)
    cost: dict[int, int] = {}
    while heap:
        so_far, position = heapq.heappop(heap)
        if position in cost:
            continue
        entering = _cost(scene, position)
        if entering is None:
            continue
        cost[position] = so_far
        for s in steps:
            if position + s not in cost:
                heapq.heappush(heap, (so_far + entering, position + s))
    return cost


def _cost(scene: Scene, position: int) -> int | None:
    code = scene.codes[position]
    if code == sc.LOCKED and act.has_key(scene, position):
        return UNLOCK_COST
    return COSTS.get(code)


def way(scene: Scene, cost: dict[int, int]) -> list[int]:
    """Returns the cheapest positions from the agent's, excluded, to the last before the target."""
    steps = [sc.delta(scene.stride, heading) for heading in range(4)]
    at, passed = scene.at, []
    while cost.get(at, 0) > 0:
        at = min(
            (at + s for s in steps if at + s in cost),
            key=lambda p: (cost[p] + (_cost(scene, p) or 0), p),
        )
        if at in passed:
            break
        passed.append(at)
    return passed


def first_errand(scene: Scene, target: Target, *, num_errands: int = 0) -> Target | None:
    """Returns the target itself, or what must be met before it; None when there is no way.

    Errands: fetch the key of a locked door, unlock it, carry an object out of the way, and empty
    the hand before a pickup. An errand may need another one first, up to `MAX_ERRANDS` deep.
    """
    if not target.positions or num_errands > MAX_ERRANDS:
        return None
    cost = distances(scene, target)
    if scene.at not in cost:
        return None
    passed = way(scene, cost)
    errand = _obstacle(scene, passed) or _locked_target(scene, target)
    if errand is not None:
        return first_errand(scene, errand, num_errands=num_errands + 1)
    if target.kinds == PICKING_UP and scene.carrying is not None:
        return _drop_beside(scene, passed)
    return target


def _obstacle(scene: Scene, passed: list[int]) -> Target | None:
    """Returns the errand of the first obstacle on a way; None when the way is clear."""
    for position in passed:
        code = scene.codes[position]
        if code == sc.THING:
            return Target(frozenset({position}), PICKING_UP)
        if code == sc.LOCKED:
            if act.has_key(scene, position):
                return Target(frozenset({position}), OPENING)
            return _key_of(scene, position)
    return None


def _locked_target(scene: Scene, target: Target) -> Target | None:
    """Returns the errand for a key when the doors to be opened are all locked to the agent."""
    if target.kinds != OPENING:
        return None
    for position in target.positions:
        if scene.codes[position] != sc.LOCKED or act.has_key(scene, position):
            return None
    return _key_of(scene, min(target.positions))


def _key_of(scene: Scene, door: int) -> Target:
    key = (scene.things[door][0], "key")
    places = frozenset(p for p, thing in scene.things.items() if thing == key)
    return Target(places, PICKING_UP)


def _drop_beside(scene: Scene, passed: list[int]) -> Target:
    """Returns a target met by dropping what is carried off the way and away from doors."""
    steps = [sc.delta(scene.stride, heading) for heading in range(4)]
    kept_free = set(passed)
    for position in scene.things:
        if scene.codes[position] in sc.DOOR_STATE:
            kept_free.update(position + s for s in steps)
    free = {p for p, code in enumerate(scene.codes) if code == sc.FREE and p not in kept_free}
    return Target(frozenset(free), (Kind.DROP,))
