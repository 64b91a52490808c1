"""The protocol has no message or field without a sender and a reader."""

import ast
import dataclasses
import typing
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.repository import ROOT
from common.wire.codec import MESSAGE_TYPES as MESSAGES
from common.wire.messages import EpisodeIdentity

PACKAGES = ("actor", "common", "envhub", "learner", "scheduler", "tools")
DEFINED_IN = [ROOT / "common" / name for name in ("wire/messages.py", "weights/messages.py")]
FORMER = {"WeightsOffer.folder"}  # Fields that only code of the release before requires.
PASSED_ON = {  # Read outside the handler, like nested messages.
    "Trajectory",  # journal, batches, reports and offline training read it
    "LeaseGrant",  # the actor's loop reads what its client received
}


class Uses:
    """Places that construct or handle messages, and the fields that are read there."""

    def __init__(self) -> None:
        self.written: dict[str, set[str]] = defaultdict(set)  # message -> fields set by keyword
        self.made: set[str] = set()
        self.handled: set[str] = set()
        self.read_where_handled: dict[str, set[str]] = defaultdict(set)
        self.read: set[str] = set()  # anywhere
        for path in _sources():
            self._add(list(ast.walk(ast.parse(path.read_text(encoding="utf-8")))))

    def _add(self, nodes: list[ast.AST]) -> None:
        callees: set[int] = set()
        kept = dict(_kept_fields(nodes))
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                callees.add(id(node.func))
                self._add_call(node.func.id, set(_keywords(node, kept)))
        named = {
            node.id
            for node in nodes
            if isinstance(node, ast.Name) and node.id in MESSAGES and id(node) not in callees
        }
        read = set(_reads(nodes))
        self.read |= read
        self.handled |= named
        for name in named:
            self.read_where_handled[name] |= read

    def _add_call(self, name: str, keywords: set[str]) -> None:
        if name in MESSAGES:
            self.made.add(name)
            self.written[name] |= keywords
        elif name == "replace":  # The type of the message is unknown.
            for each in MESSAGES:
                self.written[each] |= keywords


def _sources() -> Iterator[Path]:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if path not in DEFINED_IN and "bench" not in path.parts:
                yield path


def _kept_fields(nodes: list[ast.AST]) -> Iterator[tuple[str, list[str]]]:
    """Yield attributes that hold fields of several messages, with the names of the fields."""
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Attribute(attr=name)], value=ast.Dict(keys=keys)):
                yield name, [str(key.value) for key in keys if isinstance(key, ast.Constant)]


def _keywords(call: ast.Call, kept: dict[str, list[str]]) -> Iterator[str]:
    """Yield the keywords of a call, and those that `**` stands for."""
    for keyword in call.keywords:
        match keyword:
            case ast.keyword(arg=str(name)):
                yield name
            case ast.keyword(value=ast.Call(func=ast.Attribute(attr="identity"))):
                yield from (field.name for field in dataclasses.fields(EpisodeIdentity))
            case ast.keyword(value=ast.Attribute(attr=name)):
                yield from kept.get(name, [])


def _reads(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield attributes of local values, and keys: an offer goes to another process as a map."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cfg")):
                yield node.attr
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            yield str(node.slice.value)


def _nested() -> set[str]:
    """The messages that travel in others: they are read wherever those are handed on."""
    kinds = [kind for cls in MESSAGES.values() for kind in typing.get_type_hints(cls).values()]
    found = {
        getattr(each, "__name__", "") for kind in kinds for each in (kind, *typing.get_args(kind))
    }
    return found & set(MESSAGES)


@pytest.fixture(scope="module")
def uses() -> Uses:
    return Uses()


def test_every_message_is_sent_and_handled(uses: Uses) -> None:
    assert set(MESSAGES) - uses.made == set()
    assert set(MESSAGES) - uses.handled - _nested() == set()


def test_every_message_field_is_written_and_read(uses: Uses) -> None:
    unwritten: set[str] = set()
    unread: set[str] = set()
    for name, cls in MESSAGES.items():
        read = uses.read if name in _nested() | PASSED_ON else uses.read_where_handled[name]
        fields = {field.name for field in dataclasses.fields(cls)}
        unwritten |= {f"{name}.{field}" for field in fields - uses.written[name]}
        unread |= {f"{name}.{field}" for field in fields - read}
    assert (unwritten - FORMER, unread) == (set(), FORMER)
