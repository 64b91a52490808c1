"""Data of the Run and Compare views: state, verdict, ledger, and the charts."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tools.dashboard.web.results import ends, evaluations, pooled_score, subsets

from common.cpu import cpu_seconds
from common.store.run_dir import as_map, json_object
from learner.policy.precision_choice import recorded_precision
from tools.dashboard.reading.run_source import RunSource
from tools.dashboard.verdict import Bottleneck

# Title, unit and metrics of each chart. A name that ends in "*" is a prefix.
CHARTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Success", "share", ("reward/success", "tasks/success/*")),
    ("Truncation", "share", ("episodes/truncated_frac", "episodes/context_full_frac")),
    ("Reward", "", ("reward/mean",)),
    ("Turns and invalid actions", "", ("episodes/turns_mean", "episodes/invalid_frac")),
    ("Cut observations of an episode", "", ("episodes/cut_observations_mean",)),
    ("Distance of the items", "turns of the expert", ("distance/value", "distance/mean")),
    ("Entropy", "nats", ("policy/entropy",)),
    ("Mutual information of prompt and answer", "nats", ("policy/mutual_information",)),
    ("Effective sample size", "share", ("offpolicy/ess_frac",)),
    ("Lag", "versions", ("offpolicy/lag_mean", "offpolicy/lag_max")),
    (
        "Importance ratio: quantiles",
        "",
        ("offpolicy/ratio_p01", "offpolicy/ratio_p50", "offpolicy/ratio_p99"),
    ),
    ("Importance ratio: noise and drift", "nats", ("offpolicy/noise_*", "offpolicy/drift_*")),
    ("KL to the sampling policy", "nats", ("policy/kl_sampler", "policy/kl_*")),
    ("Loss", "", ("loss/*",)),
    ("Loss of training on examples", "nats", ("sft/loss", "dpo/loss", "evolve/loss")),
    ("Pairs with the chosen episode first", "share", ("dpo/accuracy",)),
    ("Clipped and masked tokens", "share", ("policy/clipped_frac", "policy/masked_frac")),
    ("Gradient norm", "", ("train/grad_norm",)),
    ("Updates hidden by rounding to bf16", "share", ("train/vanished_update_frac",)),
    ("Tokens per second", "tokens/s", ("actor/tokens_per_s", "train/tokens_per_s")),
    ("Seconds of a step", "s", ("wait/batch_s", "train/step_s", "publish/total_s")),
    (
        "Seconds of an episode",
        "s",
        ("episodes/generate_s_mean", "episodes/env_s_mean", "episodes/wall_s_mean"),
    ),
)
HORIZON = "horizon/value"
STAGE = "horizon/stage"
SETTINGS = (
    "model.path",
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


def overview(run: RunSource) -> dict[str, Any]:
    """Return the data of the Run view, without the series."""
    status = run.status()
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
    return {"tasks": ", ".join(named)} | {key: flat[key] for key in SETTINGS if key in flat}


def _precision(run: RunSource) -> dict[str, str]:
    """Return the precision that the learner has settled, with its reason."""
    precision = recorded_precision(run.run_dir.precision)
    return {"learner.precision": precision} if precision else {}


def _lags(run: RunSource) -> dict[str, float]:
    """Return the number of trained tokens by lag, over all steps."""
    found: dict[str, float] = {}
    for name, column in list(run.metrics.columns.items()):
        if match := LAGS.match(name):
            found[match[1]] = sum(value for value in column if value == value)
    return dict(sorted(found.items(), key=lambda each: int(each[0])))


def charts(names: Mapping[str, object]) -> list[dict[str, Any]]:
    """Return the charts with at least one metric, each with the names of its series."""
    found: list[dict[str, Any]] = []
    for title, unit, wanted in CHARTS:
        series: list[str] = []
        for each in wanted:
            own = [each] if each in names else []
            if each.endswith("*"):
                own = sorted(n for n in names if n.startswith(each[:-1]) and n.count("/") < 4)
            series += [name for name in own if name not in series]
        if series:
            found.append({"title": title, "unit": unit, "series": series[:12]})
    return found


def drawn_names(names: Mapping[str, object]) -> set[str]:
    """Return the names of the metrics in the Run view's charts."""
    return {name for chart in charts(names) for name in chart["series"]} | {HORIZON}


def horizon_marks(series: Mapping[str, Sequence[float | None]]) -> list[dict[str, float]]:
    """Return the steps at which the horizon changed, including the first step.

    Within a stage the largest horizon counts: a batch of short tasks alone is no change.
    """
    marks: list[dict[str, float]] = []
    known = None
    columns = [series.get(name, ()) for name in ("step", HORIZON, STAGE)]
    for step, value, stage in itertools.zip_longest(*columns):
        if step is None or value is None:
            continue
        if marks and stage is not None and stage == known:
            marks[-1]["horizon"] = max(marks[-1]["horizon"], value)
        elif not marks or marks[-1]["horizon"] != value:
            marks.append({"step": step, "horizon": value})
        known = stage
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
    return {
        "runs": [run.summary() | {"seed": flat[run.name].get("run.seed", "")} for run in runs],
        "pools": pools(flat),
        "evaluations": _pooled_evaluations(runs, pools(flat)),
        "charts": shown,
        "series": {run.name: run.metrics.series(wanted) for run in runs},
        "config": differing,
    }


def _pooled_evaluations(
    runs: Sequence[RunSource], pooled: Sequence[Sequence[str]]
) -> list[dict[str, Any]]:
    """Return the evaluations of each pool of runs, averaged over seeds."""
    own = {run.name: evaluations(run.rows) for run in runs}
    found: list[dict[str, Any]] = []
    for names in pooled:
        known = {name: None for run in names for name in own[run]}
        scores = {e: pooled_score([own[run][e] for run in names if e in own[run]]) for e in known}
        found.append({"runs": names, "scores": scores})
    return found


def pools(flat: Mapping[str, Mapping[str, str]]) -> list[list[str]]:
    """Return the runs grouped into pools that differ in seed and name only."""
    found: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, config in flat.items():
        own = {k: v for k, v in config.items() if k not in ("run.seed", "run.name")}
        found.setdefault(tuple(sorted(own.items())), []).append(name)
    return list(found.values())


def flat_config(tree: object, prefix: str = "") -> dict[str, str]:
    """Return a configuration by dotted keys; secrets are hidden."""
    if branches := as_map(tree):
        found: dict[str, str] = {}
        for key, value in branches.items():
            found |= flat_config(value, f"{prefix}{key}.")
        return found
    key = prefix.removesuffix(".")
    if SECRET.search(key) and tree:
        return {key: "hidden"}
    return {key: URL_USER.sub("hidden@", str(tree))}
