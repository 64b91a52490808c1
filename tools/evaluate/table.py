"""Evaluations as Markdown: a table per scenario, laid out like Tables 1-5 of arXiv 2509.08755."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

ABSENT = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioColumns:
    """Columns of one scenario's table, each with its name and the subsets that it pools."""

    title: str
    columns: dict[str, list[str]]


LAYOUTS = {  # Layout of the paper's table, by environment.
    env: ScenarioColumns(**each)
    for env, each in json.loads(
        Path(__file__).with_name("layouts.json").read_text(encoding="utf-8")
    ).items()
}
Entry = Mapping[str, Any]  # One evaluated policy of eval.json.


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
        label = _label(entry) + (f" [{notes.index(note) + 1}]" if note else "")
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
        _row([_label(entry), name, _cell(_at(entry["overall"], pick))])
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
    found = [_at(each, path) for each in scores]
    found = [each for each in found if each["mean"] is not None]
    if not found:
        return ABSENT
    if len(found) == 1:
        return _cell(found[0])
    weights = [each.get("num_items") or each["num_episodes"] for each in found]
    pairs = zip(found, weights, strict=True)
    return f"{100 * sum(each['mean'] * w for each, w in pairs) / sum(weights):.2f}"


def _cell(value: Mapping[str, Any]) -> str:
    """Return a mean and its interval in percent."""
    if value["mean"] is None:
        return ABSENT
    low, high = value["ci95"]
    return f"{100 * value['mean']:.2f} [{100 * low:.1f}, {100 * high:.1f}]"


def _runs(entries: Sequence[Entry]) -> str:
    """Return the section of episode counts: played, failed and missing episodes per policy."""
    heads = ["Model", "Policy", "k", "Items", "Episodes", "Failed", "Not played", "Turns"]
    lines = [_row(heads), _row(["---", "---", *("---:" for _ in heads[2:])])]
    for entry in entries:
        overall = entry["overall"]
        causes = ", ".join(f"{reason} {num}" for reason, num in overall["failures"].items())
        failed = f"{overall['num_failed']} ({causes})" if causes else "0"
        turns = overall["num_turns"]
        who = [_label(entry), str(entry["policy"]["source"]).replace("|", "/"), entry["k"]]
        counts = [overall["num_items"], overall["num_episodes"], failed, overall["num_missing"]]
        lines.append(_row([*who, *counts, ABSENT if turns is None else f"{turns:.1f}"]))
    note = (
        "Failed: episodes that an error of the environment, the hub or the endpoint ended. The"
        " values above include neither failed episodes nor those that were not played."
    )
    return "## Episodes\n\n" + "\n".join(lines) + "\n\n" + note


def _label(entry: Entry) -> str:
    return str(entry["label"]).replace("|", "/")


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
