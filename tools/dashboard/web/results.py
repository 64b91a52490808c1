"""Statistics over a run's episodes: evaluations and subsets with intervals, ends, samples."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from common.wire.messages import EndReason
from tools.dashboard.reading.rows import EpisodeRows
from tools.evaluate.intervals import seeds_interval, wilson_interval

INFRASTRUCTURE = [each.value for each in EndReason if each.is_infrastructure_failure]
NOTABLE = (("best", "reward", -1), ("worst", "reward", 1), ("most surprising", "logprob", 1))
MIN_SAMPLES = 10
MAX_SAMPLES = 45


def played(rows: EpisodeRows, kind: str) -> np.ndarray:
    """Return the newest row of each episode of one kind."""
    newest = np.array(list(rows.row_of.values()), np.int64)
    return newest[rows.column("kind")[newest] == rows.names["kind"].codes.get(kind, -1)]


def evaluations(rows: EpisodeRows) -> dict[str, dict[str, Any]]:
    """Return the scores by evaluation, in the order of their start, each also by subset."""
    found: dict[str, dict[str, Any]] = {}
    for name, selected in _by_name(rows, "group", played(rows, "eval")):
        whole = score(rows, selected)
        whole["by_subset"] = {each: score(rows, part) for each, part in _by_subset(rows, selected)}
        found[name.removeprefix("eval-")] = whole
    return found


def subsets(rows: EpisodeRows) -> dict[str, dict[str, Any]]:
    """Return the scores of all training episodes by subset."""
    selected = played(rows, "train")
    return {name: score(rows, part) for name, part in _by_subset(rows, selected)}


def score(rows: EpisodeRows, selected: np.ndarray) -> dict[str, Any]:
    """Return success with its 95 % interval (Wilson), without infrastructure failures."""
    good = selected[~_has_failed(rows, selected)]
    num = len(good)
    num_solved = int(rows.column("success")[good].sum())
    return {
        "num": num,
        "failed": len(selected) - num,
        "success": num_solved / num if num else None,
        "ci95": wilson_interval(num_solved, num) if num else None,
    }


def pooled_score(scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the score of several seeds: the mean of their scores, with its interval.

    A single seed keeps its own interval, which does not cover the variance between seeds.
    """
    known = [each for each in scores if each["num"]]
    if len(known) < 2:
        return {**(known[0] if known else scores[0]), "seeds": len(known)}
    shares = [each["success"] for each in known]
    num = sum(each["num"] for each in known)
    return {
        "num": num,
        "success": fmean(shares),
        "ci95": seeds_interval(shares, num),
        "seeds": len(known),
    }


def ends(rows: EpisodeRows) -> dict[str, int]:
    """Return the number of training episodes by end reason, the most frequent first."""
    counts = {name: len(part) for name, part in _by_name(rows, "end", played(rows, "train"))}
    return dict(sorted(counts.items(), key=lambda each: -each[1]))


def samples(rows: EpisodeRows, *, group: str = "") -> list[dict[str, Any]]:
    """Return the notable episodes, with `why`: best, worst, most surprising by subset.

    They come from all episodes, or from one group, such as an evaluation. The subset with the
    lowest success comes first. There are at least `MIN_SAMPLES` rows if enough episodes exist: with
    few subsets, each subset has several.
    """
    selected = np.concatenate([played(rows, "train"), played(rows, "eval")])
    if group:
        selected = selected[
            rows.column("group")[selected] == rows.names["group"].codes.get(group, -1)
        ]
    selected = selected[~_has_failed(rows, selected) & (rows.column("sampled")[selected] > 0)]
    parts = sorted(
        _by_subset(rows, selected), key=lambda p: float(rows.column("success")[p[1]].mean())
    )
    picked: dict[int, str] = {}
    for rank in range(MIN_SAMPLES):
        for _, part in parts:
            for why, column, sign in NOTABLE:
                order = part[np.argsort(sign * rows.column(column)[part], kind="stable")]
                fresh = next((int(row) for row in order if int(row) not in picked), None)
                if fresh is not None and len(picked) < MAX_SAMPLES:
                    picked[fresh] = why if rank == 0 else f"{why} #{rank + 1}"
        if len(picked) >= MIN_SAMPLES:
            break
    chosen = [{**rows.get(row), "why": why} for row, why in picked.items()]
    hardest = [name for name, _ in parts]
    return sorted(chosen, key=lambda each: (hardest.index(each["subset"]), each["why"]))


def _has_failed(rows: EpisodeRows, selected: np.ndarray) -> np.ndarray:
    """Return which rows ended with an infrastructure failure, bool."""
    codes = [rows.names["end"].codes.get(name, -1) for name in INFRASTRUCTURE]
    return np.isin(rows.column("end")[selected], codes)


def _by_subset(rows: EpisodeRows, selected: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Return the rows of each subset."""
    return _by_name(rows, "subset", selected)


def _by_name(rows: EpisodeRows, column: str, selected: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Return (name, rows) for each value of a name column, in order of first occurrence."""
    codes = rows.column(column)[selected]
    texts = rows.names[column].texts
    return [(texts[code], selected[codes == code]) for code in np.unique(codes)]
