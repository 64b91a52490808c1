"""Data of the dashboard's views: state, verdict, horizon, roles, comparisons."""

import itertools
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from common.cpu import cpu_seconds
from common.store.members import members_of
from common.store.run_dir import as_map, json_object
from learner.intervals import seeds_interval, student_quantile
from learner.journal.index import EpisodeRows
from learner.policy.precision_choice import recorded_precision
from learner.views import charts, evaluations, played, rows_by_name, rows_by_subset, score
from tools.dashboard.reading.run_source import RunSource
from tools.dashboard.run_state import is_part
from tools.dashboard.verdict import Bottleneck, ThroughputVerdict

HORIZON = "horizon/value"
STAGE = "horizon/stage"
SETTINGS = (
    "model.path",
    "model.quantised",
    "train.mode",
    "run.seed",
    "train.num_steps",
    "horizon.kind",
    "horizon.stages",
    "horizon.unit",
    "curriculum.kind",
    "curriculum.distance.stages",
    "groups.per_step",
    "groups.size",
    "learner.optimizer",
    "learner.lr",
    "learner.num_ranks",
    "actor.num_actors",
    "actor.max_concurrent",
    "scheduler.max_ahead_steps",
)
LAGS = re.compile(r"offpolicy/lag_(\d+)_tokens$")
SECRET = re.compile(r"(token|secret|password|api_key|key)$")
URL_USER = re.compile(r"(?<=://)[^/@\s]*@")
TIMELINE_STEPS = 60  # Number of steps of the timeline.
ON_THIS_DISK = ("scheduler", "envhub")  # Roles that write their state to the run's disk.
TAIL_BYTES = 1 << 16
MAX_EVENTS = 50
MAX_REPORT_CHARS = 20_000
ROLE_KEYS = (
    "name",
    "role",
    "node",
    "commit",
    "url",
    "envs",
    "version",
    "tokens_per_s",
    "running",
    "num_slots",
    "num_sessions",
    "max_sessions",
    "rss_bytes",
    "cpu_s",
    "waiting_for",
    "last_seen_s",
    "is_dead",
    "is_silent",
    "gone",
    "num_finished",
    "num_restarts",
)
_ENDED = re.compile(
    r"^(\S+ \S+) . .*(role ended|killing role|hangs|stands still"
    r"|changed the live configuration).*$"
)
_RESTART = re.compile(
    r"^(?P<at>\S+ \S+) . .*role ended role=(?P<role>\S+) exit=(?P<exit>.+?) restart=(?P<number>\S+)"
    r" in_s=\S+(?: last=(?P<last>.*))?$"
)
STEP_PARTS = {
    "waits for a batch": "wait/batch_s",
    "trains": "train/step_s",
    "publishes": "publish/total_s",
    "saves": "train/checkpoint_stall_s",
}
SLOTS = ("waits for the engine", "waits for the environment", "other work", "empty")


def subsets(rows: EpisodeRows) -> dict[str, dict[str, Any]]:
    """Return the scores of all training episodes by subset."""
    selected = played(rows, "train")
    return {name: score(rows, part) for name, part in rows_by_subset(rows, selected)}


def pooled_score(scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the score of several seeds: the mean of their scores, with its interval.

    A single seed keeps its own interval, which does not cover the variance between seeds.
    """
    played_scores = [each for each in scores if each["num"]]
    if len(played_scores) < 2:
        return {**(played_scores[0] if played_scores else scores[0]), "seeds": len(played_scores)}
    shares = [each["success"] for each in played_scores]
    num = sum(each["num"] for each in played_scores)
    return {
        "num": num,
        "success": fmean(shares),
        "ci95": seeds_interval(shares, num),
        "seeds": len(played_scores),
    }


def ends(rows: EpisodeRows) -> dict[str, int]:
    """Return the number of training episodes by end reason, the most frequent first."""
    counts = {name: len(part) for name, part in rows_by_name(rows, "end", played(rows, "train"))}
    return dict(sorted(counts.items(), key=lambda each: -each[1]))


def overview(run: RunSource) -> dict[str, Any]:
    """Return the data of the Run view, without the series."""
    status = run.status()
    verdict = ThroughputVerdict(bound=Bottleneck.UNKNOWN, sentence="")
    if not is_part(run.path):
        verdict = run.verdict()
    # Before the first steps the first batches close the gate, which is no limit.
    is_early = verdict.bound is Bottleneck.UNKNOWN
    return {
        **run.summary(),
        **run.flow(),
        "verdict": asdict(verdict),
        "phase": status.get("phase"),
        "gate": "" if is_early else status.get("gate") or "",
        "curriculum": status.get("curriculum") or {},
        "evaluations": evaluations(run.rows),
        "subsets": subsets(run.rows),
        "ends": ends(run.rows),
        "lags": _lags(run),
        "marks": horizon_marks(run.metrics.series((HORIZON, STAGE))),
        "charts": charts(run.metrics.columns),
        "report": json_object(run.run_dir.report),
        "selection": json_object(run.run_dir.selection),
        "settings": _settings(run.config()) | _precision(run),
        "cpu": cpu_seconds(run.run_dir),
    }


def _settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the most important settings of a run."""
    flat = flat_config(config)
    listed: list[object] = config.get("tasks") or []
    tasks = [as_map(each) for each in listed]
    named = [f"{each.get('weight', 1)} x {each.get('subset') or each.get('env')}" for each in tasks]
    return {"tasks": ", ".join(named)} | {
        key: flat[key] for key in SETTINGS if flat.get(key, "") != ""
    }


def _precision(run: RunSource) -> dict[str, str]:
    """Return the precision that the learner has settled, with its reason."""
    precision = recorded_precision(run.run_dir.precision)
    return {"learner.precision": precision} if precision else {}


def _lags(run: RunSource) -> dict[str, float]:
    """Return the number of trained tokens by lag, over all steps."""
    tokens: dict[str, float] = {}
    for name, column in list(run.metrics.columns.items()):
        if match := LAGS.match(name):
            tokens[match[1]] = sum(value for value in column if value == value)
    return dict(sorted(tokens.items(), key=lambda each: int(each[0])))


def drawn_names(names: Mapping[str, object]) -> set[str]:
    """Return the names of the metrics in the Run view's charts."""
    return {name for chart in charts(names) for name in chart["series"]} | {HORIZON}


def horizon_marks(series: Mapping[str, Sequence[float | None]]) -> list[dict[str, float]]:
    """Return the steps at which the horizon changed, including the first step.

    Within a stage the largest horizon counts: a batch of short tasks alone is no change.
    """
    marks: list[dict[str, float]] = []
    current = None
    columns = [series.get(name, ()) for name in ("step", HORIZON, STAGE)]
    for step, value, stage in itertools.zip_longest(*columns):
        if step is None or value is None:
            continue
        if marks and stage is not None and stage == current:
            marks[-1]["horizon"] = max(marks[-1]["horizon"], value)
        elif not marks or marks[-1]["horizon"] != value:
            marks.append({"step": step, "horizon": value})
        current = stage
    return marks


def compare(runs: Sequence[RunSource]) -> dict[str, Any]:
    """Return the series of several runs, and the differing keys of their configurations."""
    flat = {run.name: flat_config(run.config()) for run in runs}
    keys = sorted({key for each in flat.values() for key in each} - {"run.name"})
    differing = {
        key: {name: each.get(key, "(not set)") for name, each in flat.items()}
        for key in keys
        if len({each.get(key, "(not set)") for each in flat.values()}) > 1
    }
    names = {name: None for run in runs for name in run.metrics.columns}
    shown = charts(names)
    wanted = {name for chart in shown for name in chart["series"]}
    # Equal bins in all runs, so that seeds of different lengths have points at the same steps.
    longest = max((run.metrics.num for run in runs), default=0)
    return {
        "runs": [run.summary() | {"seed": flat[run.name].get("run.seed", "")} for run in runs],
        "pools": pools(flat),
        "evaluations": _pooled_evaluations(runs, pools(flat)),
        "charts": shown,
        "series": {run.name: run.metrics.series(wanted, num_steps=longest) for run in runs},
        "quantiles": [student_quantile(degrees) for degrees in range(1, len(runs))],
        "config": differing,
    }


def _pooled_evaluations(
    runs: Sequence[RunSource], pooled: Sequence[Sequence[str]]
) -> list[dict[str, Any]]:
    """Return the evaluations of each pool of runs, averaged over seeds."""
    by_run = {run.name: evaluations(run.rows) for run in runs}
    pooled_scores: list[dict[str, Any]] = []
    for names in pooled:
        evaluation_names = {name: None for run in names for name in by_run[run]}
        scores = {
            e: pooled_score([by_run[run][e] for run in names if e in by_run[run]])
            for e in evaluation_names
        }
        pooled_scores.append({"runs": names, "scores": scores})
    return pooled_scores


def pools(flat: Mapping[str, Mapping[str, str]]) -> list[list[str]]:
    """Return the runs grouped into pools that differ in seed and name only."""
    by_settings: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, config in flat.items():
        settings = {k: v for k, v in config.items() if k not in ("run.seed", "run.name")}
        by_settings.setdefault(tuple(sorted(settings.items())), []).append(name)
    return list(by_settings.values())


def flat_config(tree: object, prefix: str = "") -> dict[str, str]:
    """Return a configuration by dotted keys; secrets are hidden."""
    if branches := as_map(tree):
        flat: dict[str, str] = {}
        for key, value in branches.items():
            flat |= flat_config(value, f"{prefix}{key}.")
        return flat
    key = prefix.removesuffix(".")
    if SECRET.search(key) and tree:
        return {key: "hidden"}
    return {key: URL_USER.sub("hidden@", str(tree))}


def fleet(run: RunSource) -> dict[str, Any]:
    """Return the roles, the parts of the last steps in seconds, restarts, and stall reports."""
    status = run.status()
    events = _events(run.run_dir.logs)
    roles = {each["name"]: {key: each.get(key) for key in ROLE_KEYS} for each in members_of(status)}
    for name in ON_THIS_DISK:
        if activity := _own_activity(run, name):
            reported = {k: v for k, v in roles.get(name, {}).items() if v is not None}
            roles[name] = activity | reported
    for name, role in roles.items():
        restarted = role["role"] if role["role"] == "learner" else name
        restarts = sum(each["role"] == restarted for each in events["restarts"])
        role["num_restarts"] = max(restarts, role.get("num_restarts") or 0)
    try:
        silent_s = max(0.0, time.time() - run.run_dir.status.stat().st_mtime)
    except OSError:
        silent_s = None
    lines = run.metrics.tail(TIMELINE_STEPS)
    return {
        "state": run.state(),
        "roles": list(roles.values()),
        "silent_s": silent_s,
        "gate": status.get("gate") or "",
        "steps": [line.get("step") for line in lines],
        "parts": {
            name: [line.get(key) or 0.0 for line in lines] for name, key in STEP_PARTS.items()
        },
        "slots": slots(lines),
        **events,
        "stalls": _stalls(run.run_dir.stalls),
    }


def _own_activity(run: RunSource, role: str) -> dict[str, Any]:
    """Return the state that a role wrote to the run's disk; {} if there is none."""
    path = run.run_dir.alive / f"{role}.json"
    try:
        age_s = max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return {}
    doing = as_map(as_map(json_object(path).get("lines")).get("main"))
    activity = {"waiting_for": doing.get("waits_for"), "cpu_s": cpu_seconds(run.run_dir).get(role)}
    return {"name": role, "role": role, "last_seen_s": age_s, **activity}


def slots(lines: Sequence[Mapping[str, float | None]]) -> dict[str, list[float]]:
    """Return the shares of the slots' time by activity for each step; 0 for the first step."""
    shares: dict[str, list[float]] = {name: [] for name in SLOTS}
    for i, line in enumerate(lines):
        took_s = (line.get("time_s") or 0.0) - (lines[i - 1].get("time_s") or 0.0) if i else 0.0
        whole_s = took_s * (line.get("actor/concurrency") or 0.0)
        num = line.get("episodes/arrived") or 0.0
        used = [num * (line.get(f"episodes/{each}_s_mean") or 0.0) for each in ("generate", "env")]
        wall_s = max(sum(used), num * (line.get("episodes/wall_s_mean") or 0.0))
        parts = [*used, wall_s - sum(used), max(0.0, whole_s - wall_s)]
        total = sum(parts) if whole_s > 0 else 0.0
        for name, part in zip(SLOTS, parts, strict=True):
            shares[name].append(round(part / total, 4) if total else 0.0)
    return shares


def _events(logs: Path) -> dict[str, Any]:
    """Return the restarts, and other log lines about roles that ended or hung, the newest last."""
    lines: list[str] = []
    for path in sorted(logs.glob("*.log")):
        try:
            with path.open("rb") as handle:
                handle.seek(max(0, path.stat().st_size - TAIL_BYTES))
                text = handle.read().decode(errors="replace")
        except OSError:
            continue
        lines += [line[:500] for line in text.splitlines() if _ENDED.match(line)]
    matches = {line: _RESTART.match(line) for line in sorted(set(lines))[-MAX_EVENTS:]}
    return {
        "restarts": [match.groupdict() for match in matches.values() if match],
        "events": [line for line, match in matches.items() if match is None],
    }


def _stalls(folder: Path) -> list[dict[str, str]]:
    """Return the newest stall reports."""
    reports: list[dict[str, str]] = []
    for path in sorted(folder.glob("*.txt"))[-5:]:  # Their names begin with the time.
        try:
            text = path.read_text(errors="replace", encoding="utf-8")[:MAX_REPORT_CHARS]
        except OSError:
            continue
        reports.append({"name": path.name, "text": text})
    return reports[::-1]
