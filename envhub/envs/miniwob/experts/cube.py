"""The expert for the cube that keeps turning after a drag."""

import math
from dataclasses import dataclass, replace

from envhub.envs.miniwob.experts.click import submit
from envhub.envs.miniwob.view import PageView, hold
from envhub.web.performing import DRAG_STEPS

START = (80, 120)
STROKES = [(x, y) for x in range(-60, 61, 6) for y in range(-60, 61, 6) if x or y]
NUM_FREE_TICKS = 50  # Ticks within the second before the next snapshot.
PULL = 0.1
FADE = 0.93
SPEED = 2.0
REST = 1.0
TOP = 6
BOTTOM = 1
# The front side by the angle around the vertical axis: for an upright cube, and upside down.
SIDES = ((42, (2, 4)), (131, (5, 3)), (224, (4, 2)), (315, (3, 5)), (math.inf, (2, 4)))


@dataclass(frozen=True, slots=True)
class Cube:
    """Angles (degrees) and speeds (degrees per tick) of the cube, and its front side."""

    x: float
    y: float
    spin_x: float
    spin_y: float
    side: int


def turn(page: PageView) -> str | None:
    """Drag so that the cube stops with the quoted side in front, and submit."""
    wanted = int(page.quoted()[0])
    cube = Cube(**page.inside)
    if cube.side == wanted:
        return submit(page)
    # Choose the successful stroke with the most successful neighbours.
    good = {stroke for stroke in STROKES if _after(cube, stroke).side == wanted}
    if not good:
        return hold(START, (START[0] + STROKES[0][0], START[1] + STROKES[0][1]))

    def num_neighbours(stroke: tuple[int, int]) -> int:
        return sum(abs(stroke[0] - x) + abs(stroke[1] - y) <= 12 for x, y in good)

    x, y = max(sorted(good), key=num_neighbours)
    return hold(START, (START[0] + x, START[1] + y))


def _after(cube: Cube, stroke: tuple[int, int]) -> Cube:
    """Return the cube after a drag, once it has stopped."""
    # The clock advances once before the first move.
    for share in (0.0, *[SPEED / DRAG_STEPS] * DRAG_STEPS):
        spin_x = cube.spin_x * FADE + (stroke[0] * share - cube.spin_x) * PULL
        spin_y = cube.spin_y * FADE + (stroke[1] * share - cube.spin_y) * PULL
        cube = _ticked(replace(cube, spin_x=spin_x, spin_y=spin_y), is_held=True)
    for _ in range(NUM_FREE_TICKS):
        cube = _ticked(cube, is_held=False)
    return cube


def _ticked(cube: Cube, *, is_held: bool) -> Cube:
    """Return the cube after one tick of the page's clock."""
    if max(abs(cube.spin_x), abs(cube.spin_y)) <= REST:
        return cube
    fade = 1.0 if is_held else FADE
    spin_x = cube.spin_x * fade
    spin_y = cube.spin_y * fade
    y = _once_around(cube.y - spin_y)
    is_upside_down = 90 < y < 270
    x = _once_around(cube.x - spin_x if is_upside_down else cube.x + spin_x)
    return Cube(x, y, spin_x, spin_y, _side(x, y, is_upside_down=is_upside_down))


def _once_around(angle: float) -> float:
    """Return an angle, corrected by at most one turn, as in the page."""
    return angle - 360 if angle > 360 else angle + 360 if angle < 0 else angle


def _side(x: float, y: float, *, is_upside_down: bool) -> int:
    """Return the side of the cube that is in front."""
    if 46 <= y <= 130:
        return TOP
    if 220 <= y <= 308:
        return BOTTOM
    return next(sides[is_upside_down] for limit, sides in SIDES if x < limit)
