"""The state of an episode has one writer."""

import ast

from common.repository import ROOT

WRITER = "lifecycle.py"
# What changes of a record, and is the name of nothing else that is written.
OWN_NAMES = {
    *("num_issues", "num_turns", "lease_number", "is_revoked", "settled"),
    *("granted_at", "deadline", "listed_at", "num_missed", "num_settled"),
}
SHARED_NAMES = {"state", "actor", "incarnation"}  # Members and groups share these names.


def test_only_the_lifecycle_writes_episode_state() -> None:
    written: dict[str, list[str]] = {}
    for path in (ROOT / "scheduler").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)):
                continue
            base = node.value.id if isinstance(node.value, ast.Name) else ""
            is_own = node.attr in OWN_NAMES and base != "self"
            if is_own or (node.attr in SHARED_NAMES and base in ("episode", "each", "e")):
                written.setdefault(path.name, []).append(node.attr)
    assert set(written) == {WRITER}
    assert set(written[WRITER]) >= {"state", "settled", "deadline", "actor"}
