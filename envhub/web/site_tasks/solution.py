"""The solution of a task: its steps as actions on the current page."""

from typing import Any

from envhub.web.actions import WebAction, WebActionType
from envhub.web.tree import PageNode


class Solution:
    """The expert of one episode. It has one solution, and stops when the agent leaves it.

    Args:
        steps: {"do": click|type|stop, "role", "name", "text", "enter", "answer"}; empty if the
            solution is unknown.
    """

    def __init__(self, steps: list[dict[str, Any]]) -> None:
        self._steps = steps
        self._at = 0
        self._is_lost = not steps

    def next(self, nodes: tuple[PageNode, ...], *, only_in_view: bool) -> WebAction | None:
        """Return the next action; None if the solution was left or does not fit the page."""
        if self._is_lost or self._at >= len(self._steps):
            return None
        step = self._steps[self._at]
        if step["do"] == "stop":
            return WebAction(kind=WebActionType.STOP, text=str(step.get("answer", "")))
        node = _find(nodes, step)
        if node is None:
            return None
        if only_in_view and not node.is_in_view:
            return WebAction(kind=WebActionType.SCROLL, text=_direction(node, nodes))
        if step["do"] == "type":
            enter = bool(step.get("enter", False))
            return WebAction(
                kind=WebActionType.TYPE, element=node.id, text=step["text"], enter=enter
            )
        return WebAction(kind=WebActionType.CLICK, element=node.id)

    def follow(self, taken: WebAction, expected: WebAction | None) -> None:
        """Record a performed action, and the expert's action before it."""
        if taken.kind in (WebActionType.SCROLL, WebActionType.HOVER) and taken != expected:
            return
        if taken != expected:
            self._is_lost = True
        elif taken.kind is not WebActionType.SCROLL:
            self._at += 1


def _find(nodes: tuple[PageNode, ...], step: dict[str, Any]) -> PageNode | None:
    """Return the element with a step's role and name."""
    name = " ".join(str(step.get("name", "")).split())
    found = [node for node in nodes if node.role == step["role"]]
    exact = [node for node in found if node.name == name]
    partial = [node for node in found if name and name in node.name]
    return next(iter(exact), None) or (partial[0] if len(partial) == 1 else None)


def _direction(node: PageNode, nodes: tuple[PageNode, ...]) -> str:
    """Return the direction in which to scroll to a node."""
    seen = [other.y for other in nodes if other.is_in_view]
    return "up" if seen and node.y < min(seen) else "down"
