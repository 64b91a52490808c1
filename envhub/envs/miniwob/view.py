"""The input of a MiniWoB page's expert."""

import re
from dataclasses import dataclass
from typing import Any

from envhub.web.actions import WebAction
from envhub.web.tree import STATIC, PageNode


@dataclass(frozen=True, slots=True)
class PageView:
    """The goal, all nodes of the page, and the actions performed so far.

    `inside` is state of the page's own script, for experts that need it; None otherwise.
    """

    goal: str
    nodes: tuple[PageNode, ...]
    taken: tuple[WebAction, ...] = ()
    inside: Any = None

    def all(self, role: str = "", *, name: str | None = None, cls: str = "") -> list[PageNode]:
        """Return the nodes with the given role, exact name and class; each is optional."""
        return [
            node
            for node in self.nodes
            if (not role or node.role == role)
            and (name is None or node.name == name)
            and (not cls or cls in node.dom_class.split())
        ]

    def one(
        self, role: str = "", *, name: str | None = None, cls: str = "", dom_id: str = ""
    ) -> PageNode | None:
        """Return the first such node; None if there is none."""
        nodes = self.all(role, name=name, cls=cls)
        return next((node for node in nodes if not dom_id or node.dom_id == dom_id), None)

    def texts(self) -> list[PageNode]:
        """Return the plain texts in reading order."""
        return self.all(STATIC)

    def quoted(self) -> list[str]:
        """Return the texts in double quotes in the goal."""
        return re.findall(r'"([^"]*)"', self.goal)

    def goal_part(self, pattern: str) -> str:
        """Return the first group of a pattern in the goal; "" without a match."""
        match = re.search(pattern, self.goal)
        return match[1] if match else ""

    def inside_of(self, outer: PageNode) -> list[PageNode]:
        """Return the descendants of a node, in reading order."""
        ids = {outer.id}
        descendants = []
        for node in self.nodes:
            if node.parent in ids:
                ids.add(node.id)
                descendants.append(node)
        return descendants


def click(node: PageNode | None) -> str | None:
    """Return a click on a node; None for None."""
    return None if node is None else f"click [{node.id}]"


def write(node: PageNode | None, text: str, *, enter: bool = False) -> str | None:
    """Return the action that types a text into a node; None for None."""
    return None if node is None else f"type [{node.id}] [{text}] [{int(enter)}]"


def hold(*points: tuple[float, float]) -> str:
    """Return a mouse drag through points."""
    return "mouse_drag " + " ".join(f"[{round(x)},{round(y)}]" for x, y in points)
