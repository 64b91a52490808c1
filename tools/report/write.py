"""Writes report.json and report.html at the end of a run, from the files of its directory."""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from common.config.envs import own_tasks
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.store.run_dir import RunDir, write_atomically, write_json
from common.text import counted
from learner.journal.metrics import MetricsLine, read_metrics
from learner.policy.precision_choice import recorded_precision
from tools.dashboard.reading.run_source import RunSource
from tools.report.command import title_of
from tools.report.curve import eval_curve
from tools.report.model import Baselines, HeldOut, PeakMemory, Report, Score, Selection, TokenRates
from tools.report.page import render
from tools.report.results import (
    Evaluation,
    HeldOutEpisode,
    lag_histogram,
    mean,
    paired_gain,
    peak,
    read_totals,
    score,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")


def write_report(
    run_dir: RunDir,
    cfg: RunConfig,
    *,
    wall_s: float | None = None,
    peak_memory_bytes: int | None = None,
) -> Report:
    """Write both files and return the content of report.json.

    Args:
        wall_s: seconds of the whole run; None: the time of the last step in metrics.jsonl.
        peak_memory_bytes: peak of the sum over all roles; None: not measured.

    Raises: WireError, ValueError: the journal or metrics.jsonl is damaged before its end.
    """
    lines = read_metrics(run_dir.metrics)
    peak_bytes = peak_memory_bytes or None
    report = build_report(run_dir, lines, cfg, wall_s=wall_s, peak_memory_bytes=peak_bytes)
    write_json(run_dir.report, asdict(report))
    source = RunSource(run_dir.root.resolve(), name=cfg.run.name)
    while source.refresh(budget_s=1.0):
        pass
    page = render([source], title=title_of([cfg.run.name]))
    write_atomically(run_dir.root / "report.html", page)
    logger.info("wrote report folder=%s", run_dir.root)
    return report


def summary(report: Report) -> str:
    """Return the outcome of a run in one line."""
    parts: list[str] = []
    for name, found in report.evaluations.items():
        low, high = found.ci95
        interval = f" [{low:.3f}, {high:.3f}]" if name in ("before", "after") else ""
        parts.append(f"{name} {found.success:.3f}{interval}")
    if not parts:
        return "no held-out evaluation was configured"
    scored = report.after or report.before
    return f"held-out success ({counted(scored.n if scored else 0, 'item')}): " + ", ".join(parts)


def build_report(
    run_dir: RunDir,
    lines: list[MetricsLine],
    cfg: RunConfig,
    *,
    wall_s: float | None,
    peak_memory_bytes: int | None,
) -> Report:
    """Return the report. An absent evaluation is None; `absent` has the reason."""
    totals = read_totals(run_dir.journal)
    evals = totals.evaluations
    absent: dict[str, str] = {}
    ledger = _read(run_dir.ledger, dict[str, Any])
    has_baselines = cfg.eval.baselines
    return Report(
        before=_score(evals, "before-model", cfg.eval.before, absent),
        after=_score(evals, "after-model", cfg.eval.after, absent),
        baselines=Baselines(
            random_valid=_score(evals, "before-random_valid", has_baselines, absent),
            expert=_score(evals, "before-expert", has_baselines, absent),
        ),
        gain=paired_gain(_plays(evals, "before-model"), _plays(evals, "after-model")),
        absent=absent,
        failed_evals={name: len(evaluation.failed) for name, evaluation in evals.items()},
        eval_curve=eval_curve(run_dir.journal),
        mode=cfg.train.mode.value,
        seed=cfg.run.seed,
        precision=recorded_precision(run_dir.precision),
        steps=int(peak(lines, "step") or 0),
        episodes=(ledger or {}).get("issued", len(totals.train_episodes)),
        cut_observations=mean(lines, "episodes/cut_observations_mean"),
        wall_s=wall_s if wall_s is not None else peak(lines, "time_s"),
        tokens_per_s=TokenRates(
            actor=mean(lines, "actor/tokens_per_s"), learner=mean(lines, "train/tokens_per_s")
        ),
        peak_memory_bytes=PeakMemory(all_roles=peak_memory_bytes, by_role=_peak_by_role(lines)),
        lag_histogram=lag_histogram(lines),
        ledger=ledger,
        heldout=HeldOut(
            num_train_items_drawn=len(totals.train_items),
            num_test_items=len(totals.test_items),
            num_shared_item_ids=len(totals.train_items & totals.test_items),
        ),
        selection=_read(run_dir.selection, Selection),
        notes={t.subset: note for t in cfg.tasks if (note := own_tasks(t.env, cfg.envs))},
    )


def _score(
    evals: dict[str, Evaluation], name: str, is_wanted: bool, absent: dict[str, str]
) -> Score | None:
    """Return the score of an evaluation; None without plays, with the reason in `absent`."""
    if plays := _plays(evals, name):
        return score(plays)
    num_failed = len(evals[name].failed) if name in evals else 0
    if num_failed:
        absent[name] = f"all played episodes ({num_failed}) ended with an infrastructure failure"
    else:
        absent[name] = "no episode was played" if is_wanted else "not configured"
    return None


def _plays(evals: dict[str, Evaluation], name: str) -> list[HeldOutEpisode]:
    return list(evals[name].plays.values()) if name in evals else []


def _peak_by_role(lines: list[MetricsLine]) -> dict[str, int]:
    """Return the peak memory of each role in bytes."""
    names = sorted({name for line in lines for name in line if name.startswith("memory/")})
    return {
        name.removeprefix("memory/").removesuffix("_rss_bytes"): int(value)
        for name in names
        if (value := peak(lines, name)) is not None
    }


def _read(path: Path, kind: type[T]) -> T | None:
    """Return the parsed content of a scheduler's file; None if there is no file.

    Raises: ConfigError: it is damaged; names the file.
    """
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes()) if path.exists() else None
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        remedy = "Remove it: the report is then written without it."
        raise ConfigError(f"{path} is damaged ({problem}). {remedy}") from error
