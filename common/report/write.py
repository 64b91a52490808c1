"""Writes report.json and report.html at the end of a run, from the files of its directory."""

import json
import logging
from dataclasses import asdict
from typing import Any, cast

from common.config.run_config import RunConfig
from common.report.eval_curve import eval_curve
from common.report.page import render_page
from common.report.results import (
    Evaluation,
    JournalTotals,
    Play,
    has,
    lag_histogram,
    mean,
    paired_gain,
    peak,
    read_totals,
    score,
)
from common.store.metrics import MetricsLine, read_metrics
from common.store.run_dir import RunDir, write_atomically, write_json

logger = logging.getLogger(__name__)


def write_report(
    run_dir: RunDir,
    cfg: RunConfig,
    *,
    wall_s: float | None = None,
    peak_memory_bytes: int | None = None,
) -> dict[str, object]:
    """Write both files and return what report.json holds.

    Args:
        wall_s: seconds of the whole run; None: the time of the last step in metrics.jsonl.
        peak_memory_bytes: of all roles together; None: not measured.

    Raises:
        WireError: the journal is damaged before its end.
        ValueError: metrics.jsonl is damaged before its last line.
    """
    lines = read_metrics(run_dir.metrics)
    totals = read_totals(run_dir.journal)
    report = build_report(lines, totals, _read_ledger(run_dir), cfg, wall_s=wall_s)
    report["eval_curve"] = [asdict(point) for point in eval_curve(run_dir.journal)]
    if run_dir.selection.exists():
        report["selection"] = json.loads(run_dir.selection.read_text())
    if peak_memory_bytes is not None:
        roles = _peak_memory(lines) or {}
        report["peak_memory_bytes"] = {**roles, "all_roles": float(peak_memory_bytes)}
    write_json(run_dir.root / "report.json", report)
    write_atomically(run_dir.root / "report.html", render_page(report, lines, cfg))
    logger.info("wrote report folder=%s", run_dir.root)
    return report


def summary(report: dict[str, Any]) -> str:
    """Return the outcome of a run in one line of words."""
    parts: list[str] = []
    for name in ("before", "after"):
        if (score := report[name]) is not None:
            low, high = score["ci95"]
            parts.append(f"{name} {score['success']:.3f} [{low:.3f}, {high:.3f}]")
    for name, score in report["baselines"].items():
        if score is not None:
            parts.append(f"{name} {score['success']:.3f}")
    if not parts:
        return "no held-out evaluation was asked for"
    scored = report["after"] or report["before"]
    return f"held-out success ({scored['n'] if scored else 0} items): " + ", ".join(parts)


def build_report(
    lines: list[MetricsLine],
    totals: JournalTotals,
    ledger: dict[str, object] | None,
    cfg: RunConfig,
    *,
    wall_s: float | None = None,
) -> dict[str, object]:
    """Return the content of report.json. An absent evaluation is null; `absent` says why."""
    evals = totals.evaluations
    absent: dict[str, str] = {}
    before = _score(evals, "before-model", cfg.eval.before, absent)
    after = _score(evals, "after-model", cfg.eval.after, absent)
    baselines = {
        name: _score(evals, f"before-{name}", cfg.eval.baselines, absent)
        for name in ("random_valid", "expert")
    }
    issued = (ledger or {}).get("issued")
    return {
        "before": before,
        "after": after,
        "baselines": baselines,
        "mode": cfg.train.mode.value,
        "steps": int(peak(lines, "step") or 0),
        "episodes": issued if isinstance(issued, int) else len(totals.train_episodes),
        "wall_s": wall_s if wall_s is not None else peak(lines, "time_s"),
        "seed": cfg.run.seed,
        "absent": absent,
        "failed_evals": {name: len(evaluation.failed) for name, evaluation in evals.items()},
        "gain": paired_gain(_plays(evals, "before-model"), _plays(evals, "after-model")),
        "ledger": ledger,
        "tokens_per_s": {
            "actor": mean(lines, "actor/tokens_per_s"),
            "learner": mean(lines, "train/tokens_per_s"),
        },
        "peak_memory_bytes": _peak_memory(lines),
        "lag_histogram": lag_histogram(lines),
        "heldout": {
            "num_train_items_drawn": len(totals.train_items),
            "num_test_items": len(totals.test_items),
            "num_shared_item_ids": len(totals.train_items & totals.test_items),
        },
    }


def _score(
    evals: dict[str, Evaluation], name: str, is_wanted: bool, absent: dict[str, str]
) -> dict[str, object] | None:
    if plays := _plays(evals, name):
        return score(plays)
    num_failed = len(evals[name].failed) if name in evals else 0
    if num_failed:
        absent[name] = f"all {num_failed} episodes failed in the infrastructure"
    else:
        absent[name] = "no episode was played" if is_wanted else "not asked for by the config"
    return None


def _plays(evals: dict[str, Evaluation], name: str) -> list[Play]:
    return list(evals[name].plays.values()) if name in evals else []


def _peak_memory(lines: list[MetricsLine]) -> dict[str, float] | None:
    names = sorted({name for line in lines for name in line if name.startswith("memory/")})
    if not names:
        return None
    roles = {name: name.removeprefix("memory/").removesuffix("_rss_bytes") for name in names}
    return {roles[name]: peak(lines, name) or 0.0 for name in names if has(lines, name)}


def _read_ledger(run_dir: RunDir) -> dict[str, object] | None:
    """Return the books as the scheduler left them; None if it never wrote any."""
    if not run_dir.ledger.exists():
        return None
    ledger = json.loads(run_dir.ledger.read_text(encoding="utf-8"))
    return cast("dict[str, object]", ledger) if isinstance(ledger, dict) else None
