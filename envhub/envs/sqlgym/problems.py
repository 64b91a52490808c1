"""The problem of an item, from BIRD or generated."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from envhub.env import SubsetSpec, UnknownItem
from envhub.envs.sqlgym.query import Database


@dataclass(frozen=True, slots=True, kw_only=True)
class TableView:
    """A table in the agent's view: columns as (name, type, label), and the names of the key."""

    name: str
    columns: tuple[tuple[str, str, str], ...]
    key: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaView:
    """A database in the agent's view.

    `references` holds (table, column, referenced table, referenced column).
    """

    name: str
    tables: tuple[TableView, ...]
    references: tuple[tuple[str, str, str, str], ...]
    # BIRD's design from tables.json.
    design: Mapping[str, Any] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A question, its gold statement, and a function that opens its database.

    `evidence` is an additional hint from the question's author; it may be "".
    """

    schema: SchemaView
    question: str
    evidence: str
    gold: str
    open: Callable[[], Database]


def numbered(subsets: Mapping[str, SubsetSpec], index: int) -> str:
    """Return the item of a running number: all training items, then all test items.

    Raises: UnknownItem: there are fewer.
    """
    left = index
    for split in ("train", "test"):
        for subset, spec in subsets.items():
            num_items = spec.num_train if split == "train" else spec.num_test
            if 0 <= left < num_items:
                return f"{subset}-{split}-{left}"
            left -= num_items
    last = sum(spec.num_train + spec.num_test for spec in subsets.values()) - 1
    raise UnknownItem(f"no data index {index}; the last is {last}")
