"""Experts for pages where the mouse draws, drags or points between elements."""

import math
import re
from collections.abc import Callable

from envhub.envs.miniwob.experts.click import submit
from envhub.envs.miniwob.view import PageView, click, hold
from envhub.web.actions import WebActionType
from envhub.web.tree import PageNode

Point = tuple[float, float]
# Points of a drawing area. It is at the left of the page, and `AREA_TOP` is its distance from the
# top.
AREA_TOP = 50
AREA = [(x, y) for x in range(4, 146, 2) for y in range(4, 120, 2)]
MIN_LEG = 15
STROKE = 40
TOWARDS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
# Every point of the page is near one of these.
PROBES = [(x, y) for y in (83, 142) for x in (30, 80, 130)]
PLACES = ["top left", "top center", "top right", "center left", "center", "center right",
          "bottom left", "bottom center", "bottom right"]  # fmt: skip
LANE = 3  # Half of the space between two tiles.
GRID_WAYS = {"up": -3, "down": 3, "left": -1, "right": 1}


def middle(node: PageNode) -> Point:
    """Return the middle of a node."""
    return node.x + node.width / 2, node.y + node.height / 2


def _circles(page: PageView, fill: str) -> list[Point]:
    """Return the positions of all circles of a colour."""
    return [(x, y) for colour, x, y in page.inside if colour == fill]


def _angle(a: Point, vertex: Point, b: Point) -> float:
    """Return the angle at the vertex, in degrees within [0, 180]."""
    turn = math.atan2(a[1] - vertex[1], a[0] - vertex[0])
    turn -= math.atan2(b[1] - vertex[1], b[0] - vertex[0])
    return abs((math.degrees(turn) + 180) % 360 - 180)


def _point_out(page: PageView, worth: Callable[[Point], float]) -> str | None:
    """Click the point of the drawing area with the highest worth, then submit."""
    if any(action.kind is WebActionType.MOUSE_CLICK for action in page.taken):
        return submit(page)
    x, y = max(AREA, key=worth)
    return f"mouse_click [{x},{y + AREA_TOP}]"


def midpoint(page: PageView) -> str | None:
    """Click the middle between two points, and submit."""
    (ax, ay), (bx, by) = _circles(page, "black")[:2]
    return _point_out(page, lambda p: -math.dist(p, ((ax + bx) / 2, (ay + by) / 2)))


def right_angle(page: PageView) -> str | None:
    """Click a point whose line to the blue point is perpendicular to the given line; submit."""
    end, vertex = _circles(page, "black")[0], _circles(page, "blue")[0]

    def worth(p: Point) -> float:
        return -abs(90 - _angle(end, vertex, p)) if math.dist(p, vertex) > MIN_LEG else -180

    return _point_out(page, worth)


def bisector(page: PageView) -> str | None:
    """Click a point whose line to the blue point bisects the angle; submit."""
    (a, b), vertex = _circles(page, "black")[:2], _circles(page, "blue")[0]

    def worth(p: Point) -> float:
        return -max(_angle(a, vertex, p), _angle(b, vertex, p)) if p != vertex else -360

    return _point_out(page, worth)


def draw_circle(page: PageView) -> str | None:
    """Draw a circle around the point, and submit."""
    if page.taken:
        return submit(page)
    x, y = middle(next(n for n in page.all("circle")))
    area = next(n for n in page.nodes if n.role == "clickable")
    radius = min(x - area.x, area.x + area.width - x, y - area.y, area.y + area.height - y, 25) - 3
    turns = [2 * math.pi * i / 12 for i in range(13)]
    return hold(*[(x + radius * math.cos(t), y + radius * math.sin(t)) for t in turns])


def draw_line(page: PageView) -> str | None:
    """Draw a horizontal or vertical line through the point, and submit."""
    if page.taken:
        return submit(page)
    x, y = middle(page.all("circle")[0])
    if "horizontal" in page.goal:
        return hold((x - STROKE / 2, y), (x + STROKE / 2, y))
    return hold((x, y - STROKE / 2), (x, y + STROKE / 2))


def drag_aside(page: PageView) -> str | None:
    """Drag the figure in the goal's direction, and submit."""
    if page.taken:
        return submit(page)
    figure = next(n for n in page.nodes if n.role in ("circle", "rect", "polygon"))
    across, down = TOWARDS[page.goal_part(r"Drag the \w+ (\w+)")]
    x, y = middle(figure)
    return hold((x, y), (x + across * STROKE / 2, y + down * STROKE / 2))


FIGURES = {"rectangles": "rect", "circles": "circle", "triangles": "polygon"}


def _is_in(figure: PageNode, box: PageNode) -> bool:
    """Whether the upper left corner of a figure is inside a box."""
    return box.x < figure.x < box.x + box.width and box.y < figure.y < box.y + box.height


def drag_figures(page: PageView) -> str | None:
    """Drag every figure into its box, and submit."""
    boxes = page.all("rect")
    boxes = [n for n in boxes if n.dom_id == "shape-container"]
    word = page.goal_part(r"all (\w+)")
    for figure in page.nodes:
        if figure.role not in FIGURES.values() or figure in boxes:
            continue
        is_meant = figure.role == FIGURES.get(word) or f"fill: {word} " in figure.states
        home = boxes[0] if is_meant else boxes[-1]
        is_astray = len(boxes) == 1 and not is_meant
        if not is_astray and not _is_in(figure, home):
            return f"drag [{figure.id}] [{home.id}]"
    return submit(page)


def _move_item(texts: list[PageNode], start: int, end: int) -> str:
    """Drag one item slightly beyond another's place, which makes the two swap."""
    x, y = middle(texts[start])
    left, top = middle(texts[end])
    return hold((x, y), (left + _sign(end, start) * 3, top + _sign(end, start) * 3))


def _sign(a: int, b: int) -> int:
    """Return 1, 0 or -1: whether a is larger, equal or smaller."""
    return (a > b) - (a < b)


def drag_in_list(page: PageView) -> str | None:
    """Drag a name to its place in the list."""
    texts = page.texts()
    name, way = re.findall(r"Drag (.+?) (to the .*|up .*|down .*)", page.goal)[0]
    start = [text.name for text in texts].index(name)
    ends = {"to the top": 0, "to the bottom": len(texts) - 1, "up by": start - 1,
            "down by": start + 1}  # fmt: skip
    place = re.search(r"(\d)", way)
    end = int(place[1]) - 1 if place else next(ends[w] for w in ends if way.startswith(w))
    return _move_item(texts, start, end)


def drag_in_grid(page: PageView) -> str | None:
    """Drag a name to its place in the grid."""
    texts = page.texts()
    name, way = re.findall(r"Drag (.+?) (to the .*|\w+ by one)", page.goal)[0]
    start = [text.name for text in texts].index(name)
    if way.endswith("by one"):
        end = start + GRID_WAYS[way.split()[0]]
    else:
        end = PLACES.index(way.removeprefix("to the ").rstrip("."))
    tiles = page.all("listitem")
    return _slip(tiles[start], tiles[end], is_later=end > start)


def _slip(tile: PageNode, goal: PageNode, *, is_later: bool) -> str:
    """Drag a tile between the other tiles to the near side of its goal, so that none moves away."""
    x, y = middle(tile)
    lane_y = tile.y - LANE
    lane_x = goal.x - LANE if is_later else goal.x + goal.width + LANE
    inside_x = goal.x + goal.width * (0.8 if is_later else 0.2)
    row = middle(goal)[1]
    return hold((x, y), (x, lane_y), (lane_x, lane_y), (lane_x, row), (inside_x, row))


def sort_numbers(page: PageView) -> str | None:
    """Drag the lowest misplaced number up, until all are sorted; submit."""
    texts = [t for t in page.texts() if re.fullmatch(r"-?\d+", t.name)]
    numbers = [int(text.name) for text in texts]
    for place, number in enumerate(sorted(numbers)):
        if numbers[place] != number:
            return _move_item(texts, numbers.index(number, place), place)
    return submit(page)


def resize(page: PageView) -> str | None:
    """Drag the corner of the field, and submit."""
    if page.taken:
        return submit(page)
    field = next(n for n in page.all("textbox"))
    grow = 20 if "larger" in page.goal else -20
    across, down = (grow, 0) if "width is" in page.goal else (0, grow)
    x = field.x + field.width - 6
    y = field.y + field.height - 6
    return hold((x, y), (x + across, y + down))


def highlight(page: PageView) -> str | None:
    """Drag over the text, or over the n-th paragraph, and submit."""
    if page.taken:
        return submit(page)
    texts = [t for t in page.texts() if t.name != "Submit"]
    text = texts[int(page.goal_part(r"the (\d)\w\w paragraph") or 1) - 1]
    end = (text.x + text.width + 4, text.y + text.height - 3)
    return hold((text.x, text.y + 3), end)


def hot_cold(page: PageView) -> str | None:
    """Try one point after another and click the first that is close."""
    words = [text.name for text in page.texts()]
    if page.taken and "ICE COLD" not in words:
        x, y = page.taken[-1].points[0]
        return f"mouse_click [{x},{y}]"
    x, y = PROBES[len(page.taken) % len(PROBES)]
    return f"mouse_move [{x},{y}]"


def follow_circle(page: PageView) -> str | None:
    """Move the mouse to the circle."""
    return f"hover [{page.all('circle')[0].id}]"


def catch(page: PageView) -> str | None:
    """Click a visible circle; wait while there is none."""
    seen = [c for c in page.all("circle") if -8 < c.x < 132]
    if seen:
        return click(min(seen, key=lambda c: abs(c.x + c.width / 2 - 80)))
    return f"hover [{page.nodes[0].id}]"


def drag_box(page: PageView) -> str | None:
    """Drag the small box into the middle of the large one, and submit; the boxes may overlap."""
    if any(action.kind is WebActionType.MOUSE_DRAG for action in page.taken):
        return submit(page)
    small = page.one("clickable", name="s")
    large = page.one("clickable", name="L")
    return hold(middle(small), middle(large)) if small and large else None
