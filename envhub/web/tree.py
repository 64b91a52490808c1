"""What a page shows, as nodes and as the text of an accessibility tree."""

import json
import re
from dataclasses import dataclass
from itertools import zip_longest

from envhub.tables import read_table

STATIC = "StaticText"
_ROLES = {kind: frozenset(r.split()) for kind, r in read_table(__file__, "roles.yaml").items()}
LEAF_ROLES, INTERACTIVE = _ROLES["leaf"], _ROLES["interactive"]
STRUCTURE, FRAMES = _ROLES["structure"], _ROLES["frames"]
# What the page's script tells of each node, before whether it is in view.
ROW = (
    *("parent", "depth", "role", "name", "states", "dom_id", "dom_class", "block"),
    *("x", "y", "width", "height"),
)
CLOSING_NOTE = "... ({} more lines are not shown)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of a page.

    Attributes:
        id: its place in the snapshot; what actions name.
        parent: id of the node it is in; -1 at the top.
        states: what else is known of it, such as `checked: true value: "a"`.
        dom_id, dom_class: as in the document; experts may use them, agents never see them.
            Of a text they are those of the element around it.
        block: number of the block that a text flows in; texts of one block make one sentence.
        x, y, width, height: its box in CSS pixels of the document.
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
        """Whether a checkbox or radio button is on."""
        return "checked: true" in self.states

    @property
    def is_selected(self) -> bool:
        """Whether an option or tab is the chosen one."""
        return "selected: True" in self.states


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A page at one moment; `state` is what a script of ours in the page tells besides."""

    url: str
    title: str
    nodes: tuple[Node, ...]
    state: dict | None = None


def read_snapshot(message: dict) -> Snapshot:
    """Return the snapshot that the page's script reported."""
    nodes = tuple(_node(i, row) for i, row in enumerate(message["rows"]))
    return Snapshot(url=message["url"], title=message["title"], nodes=nodes, state=message["state"])


def _node(index: int, row: list) -> Node:
    *values, is_in_view = row
    facts = dict(zip(ROW, values, strict=True))
    return Node(id=index, is_in_view=bool(is_in_view), **facts)


def shown_nodes(nodes: tuple[Node, ...], *, only_in_view: bool) -> list[Node]:
    """Return the nodes worth a line: in view if asked for, named, and not repeating another."""
    busy = _with_interactive_children(nodes)
    kept: list[Node] = []
    for node in nodes:
        if only_in_view and not node.is_in_view:
            continue
        if node.role == STATIC:
            is_empty = _is_told(node, nodes, busy, kept)
        elif node.role in STRUCTURE and not node.name and not node.states:
            is_empty = True
        else:
            is_empty = node.role in FRAMES and node.id in busy
        if not is_empty:
            kept.append(node)
    return kept


def _with_interactive_children(nodes: tuple[Node, ...]) -> set[int]:
    """Return the nodes that hold something to act on; their own name would only repeat it."""
    busy: set[int] = set()
    for node in nodes:
        if node.role in INTERACTIVE or node.role in ("img", "heading"):
            at = node.parent
            while at >= 0 and at not in busy:
                busy.add(at)
                at = nodes[at].parent
    return busy


def _is_told(node: Node, nodes: tuple[Node, ...], busy: set[int], kept: list[Node]) -> bool:
    """Whether a text is part of a name that stands in the tree already, or among the last lines."""
    at = node.parent
    while at >= 0:
        above = nodes[at]
        is_shown = above.role in LEAF_ROLES and not (above.role in FRAMES and above.id in busy)
        if is_shown and node.name in above.name:
            return True
        at = above.parent
    return bool(kept) and kept[-1].name == node.name and kept[-1].role != STATIC


def agentgym_lines(nodes: list[Node]) -> list[str]:
    """Return one line per node: tabs for depth, id, role, quoted name, states."""
    depths = _depths(nodes)
    lines = []
    for node in nodes:
        name = node.name.replace("'", "\\'") if "'" in node.name else node.name
        states = f" {node.states}" if node.states else ""
        lines.append("\t" * depths[node.id] + f"[{node.id}] {node.role} '{name}'{states}")
    return lines


def _depths(nodes: list[Node]) -> dict[int, int]:
    depths: dict[int, int] = {}
    above: list[Node] = []
    for node in nodes:
        while above and above[-1].depth >= node.depth:
            above.pop()
        depths[node.id] = len(above)
        if node.role != STATIC:
            above.append(node)
    return depths


def compact_lines(nodes: list[Node], all_nodes: tuple[Node, ...], *, ids: bool) -> list[str]:
    """Return short lines: ids only where there is something to do, a table row on one line.

    Args:
        ids: True gives every node its id, also plain text.
    """
    lines: list[str] = []
    last, last_row = None, -1
    for node, following in zip_longest(nodes, nodes[1:]):
        if node.role == "row":
            continue
        if following is not None and following.parent == node.id and following.name == node.name:
            continue
        words = _compact(node, ids)
        row = _row_of(node, all_nodes)
        if row >= 0 and row == last_row:
            lines[-1] += " | " + words
        elif not ids and last is not None and _is_same_sentence(last, node):
            lines[-1] += " " + words
        else:
            lines.append(words)
        last, last_row = node, row
    return lines


def _is_same_sentence(a: Node, b: Node) -> bool:
    return a.role == b.role == STATIC and (a.parent, a.block) == (b.parent, b.block)


def _row_of(node: Node, nodes: tuple[Node, ...]) -> int:
    at = node.parent
    while at >= 0:
        if nodes[at].role == "row":
            return at
        at = nodes[at].parent
    return -1


def _compact(node: Node, ids: bool) -> str:
    states = f" {node.states}" if node.states else ""
    if node.role in INTERACTIVE:
        return f"[{node.id}] {node.role} '{node.name}'{states}"
    prefix = f"[{node.id}] " if ids else ""
    if node.role in (STATIC, "cell", "gridcell", "columnheader", "LabelText", "rowheader"):
        return f"{prefix}{node.name}{states}"
    return f"{prefix}{node.role} '{node.name}'{states}"


def cut(lines: list[str], max_words: int) -> str:
    """Return the lines joined; what is beyond `max_words` words is left out, and counted."""
    budget = max_words
    for i, line in enumerate(lines):
        budget -= line.count(" ") + 1
        if budget < 0:
            return "\n".join([*lines[:i], CLOSING_NOTE.format(len(lines) - i)])
    return "\n".join(lines)
