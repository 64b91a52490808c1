"""State is derived from the fields of dataclasses, and comes back as it was."""

import json
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pytest

from common.errors import ConfigError
from scheduler.state import CONFIGURED, FIXED, VOLATILE, restore, save
from tests.scheduler.builders import Table


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    colour: Colour | None = None


@dataclass(slots=True)
class Record:
    name: str
    points: list[Point] = field(default_factory=list[Point])
    seen_at: float = field(default=0.0, metadata=VOLATILE)


@dataclass(slots=True)
class Child:
    weight: float = field(metadata=FIXED)
    num: int = 0


def _last_three() -> deque[str]:
    return deque(maxlen=3)


@dataclass(slots=True)
class Component:
    size: int = field(metadata=FIXED)
    child: Child = field(metadata={})
    children: dict[str, Child] = field(metadata=CONFIGURED)
    phase: Colour = Colour.RED
    records: OrderedDict[str, Record] = field(default_factory=OrderedDict[str, Record])
    counts: dict[Point, Counter[str]] = field(default_factory=dict[Point, Counter[str]])
    keyed: dict[tuple[str, int], list[float]] = field(
        default_factory=dict[tuple[str, int], list[float]]
    )
    last: deque[str] = field(default_factory=_last_three)
    beat_at: float = field(default=-1.0, metadata=VOLATILE)
    num_restored: int = field(default=0, metadata=FIXED)

    def after_restore(self) -> None:
        self.num_restored += 1


def _new(*keys: str) -> Component:
    return Component(7, Child(0.5), {key: Child(1.0) for key in keys})


def _used() -> Component:
    used = _new("a", "b")
    used.child.num, used.children["a"].num = 3, 4
    used.phase = Colour.BLUE
    used.records["z"] = Record("z", [Point(1, Colour.RED), Point(2)], seen_at=9.0)
    used.records["a"] = Record("a")
    used.counts[Point(1)] = Counter({"won": 2})
    used.keyed[("maze", 5)] = [1.5, 2.0]
    used.last.extend("wxyz")
    used.beat_at = 4.0
    return used


def _through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_component_restores_exactly_and_volatile_fields_on_request() -> None:
    for with_volatile in (False, True):
        used, other = _used(), _new("a", "b")
        restore(other, _through_json(save(used, with_volatile=with_volatile)))
        assert list(other.records) == ["z", "a"]
        assert other.last.maxlen == 3
        assert (other.beat_at, other.records["z"].seen_at) == (
            (4.0, 9.0) if with_volatile else (-1.0, 0.0)
        )
        assert other.num_restored == 1
        other.num_restored = 0
        if with_volatile:
            assert other == used
        assert save(other, with_volatile=with_volatile) == save(used, with_volatile=with_volatile)


def test_restore_overwrites_existing_values() -> None:
    other = _used()
    restore(other, _through_json(save(_new("a", "b"))))
    other.num_restored = 0
    assert other == _new("a", "b")


def test_restore_drops_removed_entries_and_starts_new_ones() -> None:
    other = _new("b", "c")
    restore(other, _through_json(save(_used())))
    assert {key: child.num for key, child in other.children.items()} == {"b": 0, "c": 0}


def test_snapshot_shares_no_data_with_the_live_state() -> None:
    used = _used()
    saved = save(used)
    before = _through_json(saved)
    used.last.append("more")
    used.keyed[("maze", 5)].append(3.0)
    used.counts[Point(1)]["won"] += 1
    assert saved == before


@pytest.mark.parametrize(("key", "value"), [("format", 2), ("seed", 7)])
def test_state_of_another_format_or_seed_is_refused(key: str, value: int) -> None:
    table = Table()
    state = table.core.snapshot() | {key: value}
    with pytest.raises(ConfigError, match=f"scheduler.json: {key}={value}, expected .*new run"):
        table.core.restore(state)
