"""Episodes as columns of numbers and name codes: 100,000 rows are filtered and counted fast."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.errors import ConfigError

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
FACETS = ("env", "subset", "kind", "outcome", "cause", "end", "policy", "horizon")
MAX_FACET_VALUES = 50
# Columns with the filters min_X and max_X.
BOUNDS = ("reward", "turns", "tokens", "version", "horizon", "stage")
SORTS = {
    "newest": ("", -1),
    "oldest": ("", 1),
    "best": ("reward", -1),
    "worst": ("reward", 1),
    "longest": ("turns", -1),
    "most_tokens": ("tokens", -1),
    "slowest": ("wall_s", -1),
    "surprising": ("logprob", 1),  # The least probable actions come first.
}
KEYS = (
    *NAMES,
    *("success", "text", "sort", "horizon"),
    *(f"{side}_{name}" for name in BOUNDS for side in ("min", "max")),
)
PAGE = 100


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
        for name, values in self.names.items():
            values.texts, values.codes = names[name], {t: i for i, t in enumerate(names[name])}
        self.ids, self.row_of, self.num = ids, {each: i for i, each in enumerate(ids)}, num

    def column(self, name: str) -> np.ndarray:
        """Return a column over all rows; name columns hold codes."""
        return self._columns[name][: self.num]

    def get(self, row: int) -> dict[str, Any]:
        """Return a row as a dict, with names in place of codes."""
        values: dict[str, Any] = {"id": self.ids[row]}
        for name, column in self._columns.items():
            value = column[row].item()
            values[name] = self.names[name].texts[value] if name in self.names else value
        return values


def find(rows: EpisodeRows, wanted: Mapping[str, str]) -> np.ndarray:
    """Return the numbers of the matching rows, in the order of `sort`.

    Args:
        wanted: filter values by the names in `KEYS`. "" matches all rows. `text` matches a part of
            an item's or an episode's id.

    Raises: ConfigError: an unknown filter or sort, or a bound that is no number; names it.
    """
    if unknown := sorted(wanted.keys() - set(KEYS)):
        raise ConfigError(f"{unknown[0]}: unknown filter. Use one of: {', '.join(KEYS)}.")
    num = rows.num
    fits = np.ones(num, bool)
    for key, value in wanted.items():
        if value == "" or key in ("sort", "text"):
            continue
        if key in NAMES:
            fits &= rows.column(key)[:num] == rows.names[key].codes.get(value, -1)
        elif key in ("success", "horizon"):
            fits &= rows.column(key)[:num] == _number(key, value)
        else:
            side, _, name = key.partition("_")
            column = rows.column(name)[:num]
            bound = _number(key, value)
            fits &= column >= bound if side == "min" else column <= bound
    selected = np.flatnonzero(fits)
    if text := wanted.get("text", "").lower():
        items = rows.names["item"].texts
        has = np.array([text in item.lower() for item in items], bool)
        in_item = has[rows.column("item")[selected]] if len(items) else np.zeros(0, bool)
        ids = rows.ids
        keep = [bool(hit) or text in ids[row] for row, hit in zip(selected, in_item, strict=True)]
        selected = selected[np.array(keep, bool)]
    return _sorted(rows, selected, wanted.get("sort") or "newest")


def _sorted(rows: EpisodeRows, selected: np.ndarray, sort: str) -> np.ndarray:
    """Return the found rows in the order of `sort`."""
    if sort not in SORTS:
        raise ConfigError(f"sort={sort}: unknown order. Use one of: {', '.join(SORTS)}.")
    name, sign = SORTS[sort]
    if not name:
        return selected if sign > 0 else selected[::-1]
    return selected[np.argsort(sign * rows.column(name)[selected], kind="stable")]


def _number(key: str, value: str) -> float:
    """Return the number of a filter. Raises: ConfigError: it is none."""
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"{key}={value}: expects a number") from None


def facets(rows: EpisodeRows, selected: np.ndarray) -> dict[str, dict[str, int]]:
    """Return the count of each value in the rows, the most frequent first."""
    counted: dict[str, dict[str, int]] = {}
    for name in FACETS:
        counts = np.bincount(rows.column(name)[selected]) if selected.size else np.zeros(0, int)
        order = [i for i in np.argsort(-counts, kind="stable")[:MAX_FACET_VALUES] if counts[i]]
        texts = rows.names[name].texts if name in rows.names else None
        counted[name] = {(texts[i] if texts else str(i)): int(counts[i]) for i in order}
    return counted


def page(rows: EpisodeRows, wanted: Mapping[str, str], *, start: int, num: int) -> dict[str, Any]:
    """Return one page of the matching rows, their total number, and the counts of filter values."""
    selected = find(rows, wanted)
    return {
        "total": int(selected.size),
        "start": start,
        "rows": [rows.get(int(row)) for row in selected[start : start + num]],
        "facets": facets(rows, selected),
    }
