"""Scores of an evaluation with their intervals, and its tables as Markdown.

The tables are laid out like Tables 1-5 of arXiv 2509.08755, one for each scenario.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from common.config.eval import EvalSplit
from common.wire.messages import Trajectory
from learner.intervals import clustered_interval

ABSENT = "-"
Entry = Mapping[str, Any]  # One evaluated policy of eval.json.


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredEpisode:
    """One episode without an infrastructure failure."""

    is_success: bool
    score: float  # The last reward, in [0, 1].
    num_turns: int
    end: str  # Value of the EndReason.


@dataclass(slots=True, kw_only=True)
class ItemPlays:
    """Results of the k samples of one item."""

    env: str
    subset: str
    item_id: str
    samples: list[ScoredEpisode] = field(default_factory=list[ScoredEpisode])
    failures: list[str] = field(default_factory=list[str])  # End reasons of failed episodes.
    num_missing: int = 0  # Number of samples that were not played yet.

    def add(self, trajectory: Trajectory) -> None:
        """Add an episode to the samples or the failures."""
        end = trajectory.end_reason
        if end.is_infrastructure_failure:
            self.failures.append(end.value)
            return
        is_success = trajectory.is_success
        num_turns = trajectory.num_turns
        score = trajectory.reward
        self.samples.append(
            ScoredEpisode(is_success=is_success, score=score, num_turns=num_turns, end=end.value)
        )

    @property
    def num_solved(self) -> int:
        """Number of samples that solved the item."""
        return sum(sample.is_success for sample in self.samples)


def pass_at(k: int, *, num_samples: int, num_solved: int) -> float:
    """Return the chance that k samples, drawn without replacement, contain a solved one.

    `num_samples` must be k or more.

    Source: Chen et al., arXiv 2107.03374, equation 1; unbiased for 1 - (1 - p)^k.
    """
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def scores(items: Iterable[ItemPlays], *, k: int) -> dict[str, Any]:
    """Return all scores of some items as JSON. A mean over no values is null.

    Returns:
        num_items, num_episodes, num_failed, num_missing, failures (by reason);
        success: share of solved episodes among those without a failure. Its interval is clustered
            by item, because samples of one item are correlated;
        avg_at_k, score: means over items, with intervals clustered by item;
        pass_at: for k and each power of two up to k, the mean over items with enough samples.
    """
    items = list(items)
    played = [item for item in items if item.samples]
    samples = [sample for item in played for sample in item.samples]
    num_solved = sum(sample.is_success for sample in samples)
    powers = {1 << i for i in range(k.bit_length())}
    failures = Counter(reason for item in items for reason in item.failures)
    return {
        "num_items": len(items),
        "num_episodes": len(samples),
        "num_failed": failures.total(),
        "num_missing": sum(item.num_missing for item in items),
        "failures": dict(sorted(failures.items())),
        "success": {
            "mean": num_solved / len(samples) if samples else None,
            "ci95": _success_interval(played) if played else None,
            "num_episodes": len(samples),
        },
        "avg_at_k": {"k": k, **_mean([i.num_solved / len(i.samples) for i in played])},
        "score": _mean([sum(s.score for s in i.samples) / len(i.samples) for i in played]),
        "pass_at": {str(each): _pass(played, each) for each in sorted(powers | {k})},
        "num_turns": _plain_mean([float(sample.num_turns) for sample in samples]),
        "ends": dict(sorted(Counter(sample.end for sample in samples).items())),
    }


def all_scores(items: Sequence[ItemPlays], *, k: int) -> dict[str, Any]:
    """Return `scores` of all items, of each environment, and of each subset in it."""
    by_subset: dict[tuple[str, str], list[ItemPlays]] = defaultdict(list)
    by_env: dict[str, list[ItemPlays]] = defaultdict(list)
    for item in items:
        by_subset[item.env, item.subset].append(item)
        by_env[item.env].append(item)
    subsets: dict[str, dict[str, Any]] = defaultdict(dict)
    for (env, subset), some in by_subset.items():
        subsets[env][subset] = scores(some, k=k)
    envs: Mapping[str, Any] = {
        env: {**scores(some, k=k), "by_subset": subsets[env]} for env, some in by_env.items()
    }
    return {"overall": scores(items, k=k), "by_env": envs}


def _pass(played: list[ItemPlays], k: int) -> dict[str, Any]:
    """Return the mean pass@k of the items with at least k samples."""
    enough = [item for item in played if len(item.samples) >= k]
    return _mean([pass_at(k, num_samples=len(i.samples), num_solved=i.num_solved) for i in enough])


def _success_interval(played: list[ItemPlays]) -> list[float]:
    """Return the interval of success, clustered by item."""
    counts = [len(item.samples) for item in played]
    shares = [item.num_solved / num for item, num in zip(played, counts, strict=True)]
    return list(clustered_interval(shares, counts))


def _mean(values: list[float]) -> dict[str, Any]:
    """Return a mean over items with its interval."""
    return {
        "mean": _plain_mean(values),
        "ci95": list(clustered_interval(values)) if values else None,
        "num_items": len(values),
    }


def _plain_mean(values: list[float]) -> float | None:
    """Return the mean; None without values."""
    return sum(values) / len(values) if values else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioColumns:
    """Columns of one scenario's table, each with its name and the subsets that it pools."""

    title: str
    columns: dict[str, list[str]]


LAYOUTS = {  # Layout of the paper's table, by environment.
    env: ScenarioColumns(**layout)
    for env, layout in json.loads(
        Path(__file__).with_name("layouts.json").read_text(encoding="utf-8")
    ).items()
}


def layout_of(env: str, subsets: Sequence[str]) -> ScenarioColumns:
    """Return the columns for the played subsets.

    They are the scenario's columns if these contain all subsets, otherwise one for each subset.
    """
    layout = LAYOUTS.get(env) or ScenarioColumns(title=env, columns={})
    if set(subsets) <= {subset for pooled in layout.columns.values() for subset in pooled}:
        return layout
    return ScenarioColumns(title=layout.title, columns={subset: [subset] for subset in subsets})


def as_markdown(entries: Sequence[Entry]) -> str:
    """Return eval.md: a table per scenario with its policies, then a table of episode counts."""
    envs = list(dict.fromkeys(env for entry in entries for env in entry["by_env"]))
    head = (
        "# Evaluation\n\nThe values are percent of held-out items at the full horizon, with 95 %"
        " intervals in brackets. Overall is weighted by items."
    )
    parts = [head, *(_scenario(env, entries) for env in envs)]
    parts += [_overall(entries)] if len(envs) > 1 else []
    return "\n\n".join([*parts, _runs(entries)]) + "\n"


def _scenario(env: str, entries: Sequence[Entry]) -> str:
    """Return the table of one scenario: a row for each policy."""
    rows = [entry for entry in entries if env in entry["by_env"]]
    played = dict.fromkeys(s for entry in rows for s in entry["by_env"][env]["by_subset"])
    layout = layout_of(env, list(played))
    lines = [_row(["Model", "", *layout.columns, "Overall"])]
    lines.append(_row(["---", "---", *("---:" for _ in range(len(layout.columns) + 1))]))
    notes = list(dict.fromkeys(filter(None, (_note(entry, env) for entry in rows))))
    for entry in rows:
        scores = entry["by_env"][env]
        note = _note(entry, env)
        label = _label(entry, entries) + (f" [{notes.index(note) + 1}]" if note else "")
        for name, pick in _measures(entry).items():
            cells = [
                _pooled([scores["by_subset"][s] for s in pooled if s in scores["by_subset"]], pick)
                for pooled in layout.columns.values()
            ]
            lines.append(_row([label, name, *cells, _cell(_at(scores, pick))]))
    footnotes = [
        f"[{i}] The tasks differ from the published ones: {note}."
        for i, note in enumerate(notes, 1)
    ]
    return "\n\n".join([f"## {layout.title}", "\n".join(lines), *footnotes])


def _note(entry: Entry, env: str) -> str:
    """Return the difference between the tasks of a row and the published ones, "" without one."""
    return str(entry.get("notes", {}).get(env, ""))


def _overall(entries: Sequence[Entry]) -> str:
    """Return the table over all scenarios."""
    lines = [_row(["Model", "", "All items"]), _row(["---", "---", "---:"])]
    lines += [
        _row([_label(entry, entries), name, _cell(_at(entry["overall"], pick))])
        for entry in entries
        for name, pick in _measures(entry).items()
    ]
    return "## All scenarios\n\n" + "\n".join(lines)


def _measures(entry: Entry) -> dict[str, tuple[str, ...]]:
    """Return the rows of a policy: by name, the path of the value in its scores."""
    k = entry["k"]
    if k == 1:
        return {"success": ("success",), "score": ("score",)}
    return {f"avg@{k}": ("avg_at_k",), f"pass@{k}": ("pass_at", str(k)), "score": ("score",)}


def _at(scores: Mapping[str, Any], path: tuple[str, ...]) -> Mapping[str, Any]:
    """Return the value at a path of names in the scores."""
    return reduce(getitem, path, scores)


def _pooled(scores: Sequence[Mapping[str, Any]], path: tuple[str, ...]) -> str:
    """Return the cell of a column. Several subsets give the mean over items, without interval."""
    figures = [_at(each, path) for each in scores]
    figures = [each for each in figures if each["mean"] is not None]
    if not figures:
        return ABSENT
    if len(figures) == 1:
        return _cell(figures[0])
    weights = [each.get("num_items") or each["num_episodes"] for each in figures]
    pairs = zip(figures, weights, strict=True)
    return f"{100 * sum(each['mean'] * w for each, w in pairs) / sum(weights):.2f}"


def _cell(value: Mapping[str, Any]) -> str:
    """Return a mean and its interval in percent."""
    if value["mean"] is None:
        return ABSENT
    low, high = value["ci95"]
    return f"{100 * value['mean']:.2f} [{100 * low:.1f}, {100 * high:.1f}]"


def _runs(entries: Sequence[Entry]) -> str:
    """Return the section of episode counts: played, failed and missing episodes per policy."""
    names = ["Model", "Policy", "Settings", "Split", "Selection"]
    numbers = ["k", "Items", "Episodes", "Failed", "Not played", "Turns"]
    rules = [*("---" for _ in names), *("---:" for _ in numbers)]
    lines = [_row([*names, *numbers]), _row(rules)]
    for entry in entries:
        overall = entry["overall"]
        causes = ", ".join(f"{reason} {num}" for reason, num in overall["failures"].items())
        failed = f"{overall['num_failed']} ({causes})" if causes else "0"
        turns = overall["num_turns"]
        source = str(entry["policy"]["source"]).replace("|", "/")
        selection = [entry["digest"], entry.get("split", ABSENT), entry["items"], entry["k"]]
        counts = [overall["num_items"], overall["num_episodes"], failed, overall["num_missing"]]
        counts.append(ABSENT if turns is None else f"{turns:.1f}")
        lines.append(_row([_label(entry, entries), source, *selection, *counts]))
    note = (
        "Settings: digest of the policy, its options and those of the environments."
        " Failed: episodes that an error of the environment, the hub or the endpoint ended. The"
        " values above include neither failed episodes nor those that were not played."
    )
    return "## Episodes\n\n" + "\n".join(lines) + "\n\n" + note


def _label(entry: Entry, entries: Sequence[Entry]) -> str:
    """Return the name of a row, with its selection of items if that is no default.

    Rows with the same name and other settings have their digest.
    """
    digests = {each["digest"] for each in entries if _short_label(each) == _short_label(entry)}
    return _short_label(entry) + (f" {entry['digest']}" if len(digests) > 1 else "")


def _short_label(entry: Entry) -> str:
    """Return the name of a row with its split and its items, unless these are the defaults."""
    special = [
        value
        for name, usual in (("split", EvalSplit.TEST), ("items", "spread"))
        if (value := entry.get(name, usual)) != usual
    ]
    label = str(entry["label"]).replace("|", "/")
    return f"{label} ({', '.join(special)})" if special else label


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
