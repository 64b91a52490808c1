"""Snapshots of pages: nodes, and their text as an accessibility tree."""

import json
import re
from dataclasses import dataclass
from itertools import zip_longest

from envhub.tables import read_table

STATIC = "StaticText"
_ROLES = {kind: frozenset(r.split()) for kind, r in read_table(__file__, "roles.yaml").items()}
LEAF_ROLES = _ROLES["leaf"]
INTERACTIVE = _ROLES["interactive"]
STRUCTURE = _ROLES["structure"]
FRAMES = _ROLES["frames"]
# Fields of a node in the page script's report. The flag `is_in_view` follows them.
ROW = (
    "parent",
    "depth",
    "role",
    "name",
    "states",
    "dom_id",
    "dom_class",
    "block",
    "x",
    "y",
    "width",
    "height",
)
CLOSING_NOTE = "... ({} more lines are not shown)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageNode:
    """One node of a page.

    Attributes:
        id: index in the snapshot; actions refer to it.
        parent: id of the parent node; -1 at the top.
        states: further properties, such as `checked: true value: "a"`.
        dom_id, dom_class: attributes in the document, for experts only; agents never see them. A
            text has those of its surrounding element.
        block: number of a text's block; the texts of one block form a sentence.
        x, y, width, height: bounding box in CSS pixels of the document.
    """

    id: int
    parent: int
    depth: int
    role: str
    name: str
    states: str
    dom_id: str
    dom_class: str
    block: int
    x: int
    y: int
    width: int
    height: int
    is_in_view: bool

    @property
    def value(self) -> str:
        """The text of a field, or the chosen option of a closed list."""
        match = re.search(r'\bvalue: ("(?:[^"\\]|\\.)*")', self.states)
        return json.loads(match[1]) if match else ""

    @property
    def is_checked(self) -> bool:
        """Whether a checkbox or radio button is checked."""
        return "checked: true" in self.states

    @property
    def is_selected(self) -> bool:
        """Whether an option or tab is selected."""
        return "selected: True" in self.states


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A page at one moment; `state` is the value of the page's `__lsState`, if defined."""

    url: str
    title: str
    nodes: tuple[PageNode, ...]
    state: dict | None = None


def read_snapshot(message: dict) -> Snapshot:
    """Return the snapshot in a page script's report."""
    nodes = tuple(_node(i, row) for i, row in enumerate(message["rows"]))
    return Snapshot(url=message["url"], title=message["title"], nodes=nodes, state=message["state"])


def _node(index: int, row: list) -> PageNode:
    """Return a node of a script's report."""
    *values, is_in_view = row
    facts = dict(zip(ROW, values, strict=True))
    return PageNode(id=index, is_in_view=bool(is_in_view), **facts)


def shown_nodes(nodes: tuple[PageNode, ...], *, only_in_view: bool) -> list[PageNode]:
    """Return the displayed nodes: named, not repeating another node, and optionally in view."""
    busy = _with_interactive_children(nodes)
    displayed: list[PageNode] = []
    for node in nodes:
        if only_in_view and not node.is_in_view:
            continue
        if node.role == STATIC:
            is_empty = _is_repeated(node, nodes, busy, displayed)
        elif node.role in STRUCTURE and not node.name and not node.states:
            is_empty = True
        else:
            is_empty = node.role in FRAMES and node.id in busy
        if not is_empty:
            displayed.append(node)
    return displayed


def _with_interactive_children(nodes: tuple[PageNode, ...]) -> set[int]:
    """Return the nodes with interactive descendants, whose names would repeat these."""
    busy: set[int] = set()
    for node in nodes:
        if node.role in INTERACTIVE or node.role in ("img", "heading"):
            at = node.parent
            while at >= 0 and at not in busy:
                busy.add(at)
                at = nodes[at].parent
    return busy


def _is_repeated(
    node: PageNode, nodes: tuple[PageNode, ...], busy: set[int], displayed: list[PageNode]
) -> bool:
    """Whether a text repeats the name of a displayed ancestor or of the last displayed node."""
    at = node.parent
    while at >= 0:
        above = nodes[at]
        is_shown = above.role in LEAF_ROLES and not (above.role in FRAMES and above.id in busy)
        if is_shown and node.name in above.name:
            return True
        at = above.parent
    return bool(displayed) and displayed[-1].name == node.name and displayed[-1].role != STATIC


def agentgym_lines(nodes: list[PageNode]) -> list[str]:
    """Return one line per node: tabs for depth, id, role, quoted name, states."""
    depths = _depths(nodes)
    lines = []
    for node in nodes:
        name = node.name.replace("'", "\\'") if "'" in node.name else node.name
        states = f" {node.states}" if node.states else ""
        lines.append("\t" * depths[node.id] + f"[{node.id}] {node.role} '{name}'{states}")
    return lines


def _depths(nodes: list[PageNode]) -> dict[int, int]:
    """Return the depth of each displayed node below the others."""
    depths: dict[int, int] = {}
    above: list[PageNode] = []
    for node in nodes:
        while above and above[-1].depth >= node.depth:
            above.pop()
        depths[node.id] = len(above)
        if node.role != STATIC:
            above.append(node)
    return depths


def compact_lines(
    nodes: list[PageNode], all_nodes: tuple[PageNode, ...], *, ids: bool
) -> list[str]:
    """Return short lines: ids only for interactive nodes, and a table row on one line.

    Example: a heading and the link inside it have one name, so the link's line is enough. The same
    holds for a link and the picture inside it.

    Args:
        ids: True gives every node its id, including plain text.
    """
    lines: list[str] = []
    last = None
    last_row = -1
    covered = -1  # Id of a node whose name and place are those of the target around it.
    for node, following in zip_longest(nodes, nodes[1:]):
        if node.role == "row" or node.id == covered:
            continue
        if following is not None and following.parent == node.id and following.name == node.name:
            is_target = node.role in INTERACTIVE and following.role not in INTERACTIVE
            if ids or not is_target:
                continue
            covered = following.id
        words = _compact(node, ids)
        row = _row_of(node, all_nodes)
        if row >= 0 and row == last_row:
            lines[-1] += " | " + words
        elif not ids and last is not None and _is_same_sentence(last, node):
            lines[-1] += " " + words
        else:
            lines.append(words)
        last = node
        last_row = row
    return lines


def _is_same_sentence(a: PageNode, b: PageNode) -> bool:
    """Return whether two nodes are parts of one line of text."""
    return a.role == b.role == STATIC and (a.parent, a.block) == (b.parent, b.block)


def _row_of(node: PageNode, nodes: tuple[PageNode, ...]) -> int:
    """Return the id of the table row that contains a node; -1 for none."""
    at = node.parent
    while at >= 0:
        if nodes[at].role == "row":
            return at
        at = nodes[at].parent
    return -1


def _compact(node: PageNode, ids: bool) -> str:
    """Return a node in a few words."""
    states = f" {node.states}" if node.states else ""
    if node.role in INTERACTIVE:
        return f"[{node.id}] {node.role} '{node.name}'{states}"
    prefix = f"[{node.id}] " if ids else ""
    if node.role in (STATIC, "cell", "gridcell", "columnheader", "LabelText", "rowheader"):
        return f"{prefix}{node.name}{states}"
    return f"{prefix}{node.role} '{node.name}'{states}"


def cut(lines: list[str], max_words: int) -> str:
    """Return the first `max_words` words as whole lines, and the number of omitted lines."""
    budget = max_words
    for i, line in enumerate(lines):
        budget -= line.count(" ") + 1
        if budget < 0:
            return "\n".join([*lines[:i], CLOSING_NOTE.format(len(lines) - i)])
    return "\n".join(lines)
