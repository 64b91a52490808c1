"""Experts for pages with drawn figures that the goal describes."""

import re

from envhub.envs.miniwob.view import PageView, click
from envhub.web.tree import PageNode

SHAPE_ROLES = {"rect": "rectangle", "circle": "circle", "polygon": "triangle"}
LARGE_PX = 15


def _describes(words: list[str], node: PageNode) -> bool:
    """Return whether all words fit a figure."""
    is_text = node.role == "text"
    kind = ("digit" if node.name.isdigit() else "letter") if is_text else "shape"
    names = {kind, node.name if is_text else SHAPE_ROLES.get(node.role, ""), "item"}
    fill = re.search(r"fill: (\w+)", node.states)
    # The font of a large letter is twice that of a small letter.
    is_large = node.height > (17 if is_text else LARGE_PX)
    tests = {"large": is_large, "small": not is_large}
    for word in words:
        if word in tests:
            if not tests[word]:
                return False
        elif word not in names and not (fill and fill[1] == word):
            return False
    return True


def _drawn(page: PageView) -> list[PageNode]:
    """Return the figures of a drawing."""
    return [n for n in page.nodes if n.role in (*SHAPE_ROLES, "text")]


def described_shape(page: PageView) -> str | None:
    """Click a figure that matches the description; prefer one without a figure on top of it."""
    words = page.goal_part(r"Click on an? (.*)").split()
    figures = [n for n in _drawn(page) if _describes(words, n)]
    free = [n for n in figures if not any(_covers(o, n) for o in _drawn(page) if o.id > n.id)]
    return click((free or figures or [None])[0])


def _covers(upper: PageNode, lower: PageNode) -> bool:
    """Return whether a figure covers the middle of another one."""
    x = lower.x + lower.width / 2
    y = lower.y + lower.height / 2
    return (
        upper.x - 1 <= x <= upper.x + upper.width + 1
        and upper.y - 1 <= y <= upper.y + upper.height + 1
    )


def count_shapes(page: PageView) -> str | None:
    """Click the button with the number of figures that fit the description."""
    words = page.goal_part(r"How many (.*)s are there").split()
    count = sum(_describes(words, n) for n in _drawn(page))
    return click(page.one("button", name=str(count)))


def name_shape(page: PageView) -> str | None:
    """Click the kind of the figure."""
    figure = next(iter(_drawn(page)), None)
    if figure is None:
        return None
    names = {"rect": "Rectangle", "circle": "Circle", "polygon": "Triangle"}
    text = "Number" if figure.name.isdigit() else "Letter"
    return click(page.one("button", name=names.get(figure.role, text)))
