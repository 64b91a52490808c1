"""What an item asks, whatever it was read or generated from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from envhub.env import SubsetSpec, UnknownItem
from envhub.envs.sqlgym.query import Database


@dataclass(frozen=True, slots=True, kw_only=True)
class TableView:
    """A table as the agent is told of it: columns as (name, type, label), and the key's names."""

    name: str
    columns: tuple[tuple[str, str, str], ...]
    key: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaView:
    """A database as the agent is told of it.

    `references` holds (table, column, table referred to, column referred to).
    """

    name: str
    tables: tuple[TableView, ...]
    references: tuple[tuple[str, str, str, str], ...]
    design: Mapping[str, Any] | None = field(default=None, repr=False)  # BIRD's own, of tables.json


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A question, its gold statement, and a way to its database.

    `evidence` is what else the asker lets know; it may be "".
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
