"""Episodes as columns of numbers and name codes, so that 100,000 rows are filtered fast."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

INTS: tuple[str, ...] = (
    "segment",
    "offset",
    "member",
    "attempt",
    "horizon",
    "stage",
    "version",
    "first_version",
    "last_version",
    "turns",
    "invalid",
    "tokens",
    "sampled",
    "success",
    "trained_at",
)
FLOATS: tuple[str, ...] = ("reward", "wall_s", "generate_s", "env_s", "logprob")
NAMES = ("env", "subset", "item", "group", "kind", "policy", "actor", "end", "outcome", "cause")
FIRST_CAPACITY = 1024


@dataclass(slots=True)
class ValueDictionary:
    """The distinct values of one column, with their codes."""

    texts: list[str] = field(default_factory=list[str])
    codes: dict[str, int] = field(default_factory=dict[str, int])

    def code(self, text: str) -> int:
        """Return the code of a text. A new text gets a new code."""
        code = self.codes.setdefault(text, len(self.texts))
        if code == len(self.texts):
            self.texts.append(text)
        return code


class EpisodeRows:
    """Rows that one thread appends while others read. Readers get complete rows only.

    Example: add({...}) -> row 0; column("reward") -> array of all rewards so far.
    """

    def __init__(self) -> None:
        self.num = 0
        self.ids: list[str] = []
        self.row_of: dict[str, int] = {}  # The newest row of each episode.
        self.names = {name: ValueDictionary() for name in NAMES}
        self._columns: dict[str, np.ndarray] = {
            **{name: np.zeros(FIRST_CAPACITY, np.int64) for name in INTS},
            **{name: np.zeros(FIRST_CAPACITY, np.float64) for name in FLOATS},
            **{name: np.zeros(FIRST_CAPACITY, np.int32) for name in NAMES},
        }

    def add(self, episode_id: str, values: Mapping[str, Any]) -> int:
        """Append a row with a value for every column; return its number."""
        row = self.num
        if row == len(self._columns["reward"]):
            self._columns = {n: np.concatenate([c, c]) for n, c in self._columns.items()}
        for name, column in self._columns.items():
            value = values[name]
            column[row] = self.names[name].code(value) if name in self.names else value
        self.ids.append(episode_id)
        self.num = row + 1  # `num` must grow before `row_of` refers to the row.
        self.row_of[episode_id] = row
        return row

    def settle(self, row: int, *, outcome: str, cause: str, trained_at: int) -> None:
        """Set the outcome of an episode."""
        self._columns["outcome"][row] = self.names["outcome"].code(outcome)
        self._columns["cause"][row] = self.names["cause"].code(cause)
        self._columns["trained_at"][row] = trained_at

    @property
    def column_names(self) -> list[str]:
        """The names of all columns."""
        return [*self._columns]

    def restore(
        self, ids: list[str], columns: Mapping[str, np.ndarray], names: Mapping[str, list[str]]
    ) -> None:
        """Load complete columns. Raises: ValueError: their lengths differ."""
        num = len(ids)
        if any(columns[name].shape != (num,) for name in self._columns):
            raise ValueError(f"a column does not have {num} rows")
        room = max(FIRST_CAPACITY, num + num // 2)
        for name, column in self._columns.items():
            self._columns[name] = np.zeros(room, column.dtype)
            self._columns[name][:num] = columns[name]
        for name, own in self.names.items():
            own.texts, own.codes = names[name], {t: i for i, t in enumerate(names[name])}
        self.ids, self.row_of, self.num = ids, {each: i for i, each in enumerate(ids)}, num

    def column(self, name: str) -> np.ndarray:
        """Return a column over all rows; name columns hold codes."""
        return self._columns[name][: self.num]

    def get(self, row: int) -> dict[str, Any]:
        """Return a row as a dict, with names in place of codes."""
        found: dict[str, Any] = {"id": self.ids[row]}
        for name, column in self._columns.items():
            value = column[row].item()
            found[name] = self.names[name].texts[value] if name in self.names else value
        return found
