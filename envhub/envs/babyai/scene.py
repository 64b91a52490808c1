"""A flat snapshot of the grid, the agent's view of it, and walking within the view.

Positions are indices into a grid padded by the view size, so that views need no bounds checks. A
view is 49 cells in rows ahead of the agent: `cell = forward * 7 + right + 3`, right in -3..3.
"""

from collections import deque
from dataclasses import dataclass
from functools import lru_cache

VIEW = 7
HALF = VIEW // 2
NUM_CELLS = VIEW * VIEW
PAD = VIEW

FREE, WALL, THING, CLOSED, OPEN, LOCKED, GOAL, LAVA = range(8)
IS_WALKABLE = (True, False, False, False, True, False, True, False)
IS_CLEAR = (True, False, True, False, True, False, True, True)  # Whether light passes.
DOOR_STATE = {CLOSED: "closed", OPEN: "open", LOCKED: "locked"}

LEFT, RIGHT, FORWARD, PICKUP, DROP, TOGGLE = range(6)
HEADINGS = ((1, 0), (0, 1), (-1, 0), (0, -1))  # East, south, west, north: minigrid's order.


@dataclass(slots=True)
class GridScene:
    """The whole map and the agent; `things` has colour and type of every object.

    `closes_doors` and `opens_boxes` allow the toggling of an open door or a box. They are set only
    for missions that can need it.
    """

    codes: list[int]  # [padded height * stride]
    things: dict[int, tuple[str, str]]
    stride: int
    at: int
    heading: int
    carrying: tuple[str, str] | None
    closes_doors: bool = False
    opens_boxes: bool = False

    def front(self) -> int:
        """Return the position directly ahead of the agent."""
        return self.at + delta(self.stride, self.heading)


@dataclass(frozen=True, slots=True)
class Seen:
    """One visible object; `path` ends facing it, or is None if no visible path exists."""

    name: str
    number: int
    code: int
    position: int
    forward: int
    right: int
    path: tuple[int, ...] | None
    path_onto: tuple[int, ...] | None


def delta(stride: int, heading: int) -> int:
    """Return the change of position by one step in a heading."""
    dx, dy = HEADINGS[heading & 3]
    return dx + dy * stride


@lru_cache(maxsize=256)
def _offsets(stride: int, heading: int) -> tuple[int, ...]:
    """Return the position of each view cell relative to the agent."""
    ahead = delta(stride, heading)
    side = delta(stride, heading + 1)
    return tuple(f * ahead + r * side for f in range(VIEW) for r in range(-HALF, HALF + 1))


@lru_cache(maxsize=1 << 14)
def _spread(lit: int, clear: int) -> tuple[int, int]:
    """Return the lit cells of a view row, and the cells they light in the next row, as bit sets.

    The two sweeps run in minigrid's order, so the result equals minigrid's own view.
    """
    ahead = 0
    for i in range(VIEW - 1):
        if lit >> i & 1 and clear >> i & 1:
            lit |= 2 << i
            ahead |= 3 << i
    for i in range(VIEW - 1, 0, -1):
        if lit >> i & 1 and clear >> i & 1:
            lit |= 1 << (i - 1)
            ahead |= 3 << (i - 1)
    return lit, ahead


def view_positions(scene: GridScene) -> list[int]:
    """Return the positions of the 49 view cells."""
    return [scene.at + offset for offset in _offsets(scene.stride, scene.heading)]


def visible_codes(scene: GridScene) -> list[int | None]:
    """Return the codes of the 49 view cells; None for unseen cells."""
    codes = scene.codes
    at = scene.at
    view: list[int | None] = [codes[at + o] for o in _offsets(scene.stride, scene.heading)]
    lit = 1 << HALF
    for row in range(0, NUM_CELLS, VIEW):
        clear = 0
        for i in range(VIEW):
            if IS_CLEAR[view[row + i]]:  # type: ignore[index]
                clear |= 1 << i
        lit, ahead = _spread(lit, clear)
        for i in range(VIEW):
            if not lit >> i & 1:
                view[row + i] = None
        lit = ahead
    return view


def _forward_table() -> tuple[int, ...]:
    """Return for each pose `cell * 4 + turn` the cell one step ahead, or -1 outside the view."""
    steps = ((1, 0), (0, 1), (-1, 0), (0, -1))  # (forward, right) for turns 0..3, clockwise.
    table = []
    for cell in range(NUM_CELLS):
        for df, dr in steps:
            f = cell // VIEW + df
            r = cell % VIEW + dr
            table.append(f * VIEW + r if 0 <= f < VIEW and 0 <= r < VIEW else -1)
    return tuple(table)


_AHEAD = _forward_table()
_FACING = tuple(
    tuple(pose for pose in range(NUM_CELLS * 4) if _AHEAD[pose] == cell)
    for cell in range(NUM_CELLS)
)
START = HALF * 4


def walk(view: list[int | None]) -> dict[int, tuple[int, int, int]]:
    """Return the poses reachable in the view: pose -> (previous pose, primitive, distance)."""
    reached = {START: (-1, -1, 0)}
    queue: deque[int] = deque((START,))
    while queue:
        pose = queue.popleft()
        distance = reached[pose][2] + 1
        cell = pose >> 2
        turn = pose & 3
        ahead = _AHEAD[pose]
        if ahead >= 0:
            code = view[ahead]
            if code is not None and IS_WALKABLE[code] and (ahead << 2) + turn not in reached:
                reached[(ahead << 2) + turn] = (pose, FORWARD, distance)
                queue.append((ahead << 2) + turn)
        for turned, primitive in (((turn - 1) & 3, LEFT), ((turn + 1) & 3, RIGHT)):
            following = (cell << 2) + turned
            if following not in reached:
                reached[following] = (pose, primitive, distance)
                queue.append(following)
    return reached


def _shortest(
    reached: dict[int, tuple[int, int, int]], poses: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the primitives to the nearest of `poses`; None if none was reached."""
    there = [(reached[pose][2], pose) for pose in poses if pose in reached]
    if not there:
        return None
    pose = min(there)[1]
    path: list[int] = []
    while pose != START:
        pose, primitive, _ = reached[pose]
        path.append(primitive)
    return tuple(reversed(path))


def see(scene: GridScene) -> tuple[list[Seen], list[int | None]]:
    """Return the visible objects, nearest first, and the view.

    Objects of one name are numbered from 1 in that order; text and actions share the numbers.
    """
    view = visible_codes(scene)
    offsets = _offsets(scene.stride, scene.heading)
    reached = walk(view)
    visible = []
    for cell in range(NUM_CELLS):
        code = view[cell]
        if code is not None and code > WALL and cell != HALF:
            f = cell // VIEW
            r = cell % VIEW - HALF
            visible.append((f + abs(r), abs(r), r, f, cell, code))
    visible.sort()
    counts: dict[str, int] = {}
    objects = []
    for _, _, r, f, cell, code in visible:
        position = scene.at + offsets[cell]
        name = name_of(scene, position, code)
        counts[name] = counts.get(name, 0) + 1
        onto = None
        if IS_WALKABLE[code]:
            onto = _shortest(reached, tuple(range(cell * 4, cell * 4 + 4)))
        path = _shortest(reached, _FACING[cell])
        objects.append(Seen(name, counts[name], code, position, f, r, path, onto))
    return objects, view


def name_of(scene: GridScene, position: int, code: int) -> str:
    """Return an object's name as text and actions use it, such as `blue closed door`."""
    color, kind = scene.things[position]
    if code in DOOR_STATE:
        return f"{color} {DOOR_STATE[code]} door"
    return kind if code in (GOAL, LAVA) else f"{color} {kind}"
