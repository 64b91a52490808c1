"""Filters, orders and counts of the episodes of a journal."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from common.errors import ConfigError
from learner.journal.index import NAMES, EpisodeRows

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
