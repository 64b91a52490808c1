"""The studies of training that `bench --suite NAME` runs, and their tables."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from common.report.bench_table import BenchTable
from common.report.results import wilson_interval
from common.repository import ROOT
from common.store.run_dir import write_atomically
from learner.bench.horizon import AXES, distance_table, horizon_table, success_svg
from learner.bench.study import (
    Arm,
    Outcome,
    Study,
    folders_of,
    interval,
    markdown,
    run_study,
    success_at_tokens,
)

CORRECTIONS = {
    "uncorrected": ("algorithm.correction=none", "algorithm.proximal=reused"),
    "corrected": (),  # clipped ratio to the sampler, truncated importance weights: the default
    "decoupled": ("algorithm.proximal=recomputed",),
}


def read_study(name: str) -> Study:
    written: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("studies.yaml").read_text())
    own = written[name]
    arms = own.get("arms") or _lag_arms(own["lags"], own["corrections"])
    return Study(
        name=f"study-{name}",
        arms=tuple(Arm(name=arm, overrides=tuple(each)) for arm, each in arms.items()),
        seeds=tuple(own["seeds"]),
        overrides=(*written["all"]["overrides"], *own.get("overrides", ())),
        num_at_once=own.get("num_at_once", 1),
    )


def _lag_arms(lags: Sequence[int], corrections: Sequence[str]) -> dict[str, list[str]]:
    return {
        f"lag{lag}-{name}": [
            f"learner.hold_back_steps={lag}",
            f"learner.max_lag_steps={max(4, lag)}",
            *CORRECTIONS[name],
        ]
        for lag in lags
        for name in corrections
    }


def algorithms_table(outcomes: list[Outcome]) -> str:
    """Return a row for every run: success before and after, and the paired gain."""
    header = ["algorithm", "seed", "before", "after [95 %]", "gain, points [95 %]", "mean lag"]
    rows = [
        [
            each.arm,
            str(each.seed),
            f"{each.before:.3f}",
            interval(each.after, each.after_ci95),
            interval(each.gain, each.gain_ci95, is_gain=True),
            f"{each.lag_mean:.2f}",
        ]
        for each in outcomes
    ]
    return markdown(header, rows)


def credit_table(outcomes: list[Outcome]) -> str:
    """Return a row for every arm: success of all seeds together, on training and held-out items."""
    header = ["credit", "training, last steps, by seed", "together [95 %]", "held out [95 %]"]
    rows: list[list[str]] = []
    for arm in dict.fromkeys(each.arm for each in outcomes):
        own = [each for each in outcomes if each.arm == arm]
        by_seed = ", ".join(f"{each.trained:.3f}" for each in own)
        trained = _pooled([(each.trained, each.num_trained) for each in own])
        held_out = _pooled([(each.after, each.num_after) for each in own])
        rows.append([arm, by_seed, trained, held_out])
    return markdown(header, rows)


def _pooled(shares: list[tuple[float, int]]) -> str:
    """Return the share of all plays with Wilson's interval; it leaves out what seeds add to it."""
    num = sum(n for _, n in shares)
    num_solved = round(sum(share * n for share, n in shares))
    return interval(num_solved / num, wilson_interval(num_solved, num))


def staleness_table(outcomes: list[Outcome]) -> str:
    """Return a row for every lag: success after training for every way to deal with it."""
    by_name = {each.arm: each for each in outcomes}
    lags = sorted({int(name.removeprefix("lag").partition("-")[0]) for name in by_name})
    kinds = [kind for kind in CORRECTIONS if f"lag{lags[0]}-{kind}" in by_name]
    header = ["lag", "measured", *(cell for kind in kinds for cell in (kind, "gain", "least ESS"))]
    rows: list[list[str]] = []
    for lag in lags:
        arms = [by_name[f"lag{lag}-{kind}"] for kind in kinds]
        cells = [
            cell
            for each in arms
            for cell in (
                interval(each.after, each.after_ci95),
                interval(each.gain, each.gain_ci95, is_gain=True),
                f"{each.ess_min:.2f}",
            )
        ]
        rows.append([str(lag), f"{arms[0].lag_mean:.1f}", *cells])
    return markdown(header, rows)


def curriculum_table(outcomes: list[Outcome]) -> str:
    """Return success at equal episodes and at equal tokens, and then along the way."""
    budget = min(each.points[-1].num_tokens for each in outcomes)
    header = ["horizon", "seed", "episodes", "tokens generated", "success at equal episodes [95 %]"]
    rows = [
        [
            each.arm,
            str(each.seed),
            f"{each.points[-1].num_episodes:,}",
            f"{each.points[-1].num_tokens:,}",
            interval(each.after, each.after_ci95),
            f"{success_at_tokens(each, budget):.3f}",
        ]
        for each in outcomes
    ]
    steps = sorted({point.step for each in outcomes for point in each.points})
    along = [[f"{each.arm} {each.seed}", *_along(each, steps)] for each in outcomes]
    return (
        markdown([*header, f"at {budget:,} tokens"], rows)
        + "\nSuccess (thousands of tokens generated) after so many steps:\n\n"
        + markdown(["horizon, seed", *(str(step) for step in steps)], along)
    )


def _along(outcome: Outcome, steps: list[int]) -> list[str]:
    points = {point.step: point for point in outcome.points}
    return [
        f"{points[step].success:.3f} ({points[step].num_tokens / 1e3:.0f})"
        if step in points
        else "-"
        for step in steps
    ]


TABLES: dict[str, Callable[[list[Outcome]], str]] = {
    "algorithms": algorithms_table,
    "credit": credit_table,
    "staleness": staleness_table,
    "staleness-fast": staleness_table,
    "curriculum": curriculum_table,
    "horizon": horizon_table,
    "horizon-large": horizon_table,
}


def _measure(name: str, table: BenchTable) -> None:
    study = read_study(name)
    folder = ROOT / "runs" / study.name
    table.title(f"{len(study.arms) * len(study.seeds)} runs below {folder}")
    outcomes = run_study(study, folder=folder)
    for each in outcomes:
        gain = f"gain {interval(each.gain, each.gain_ci95, is_gain=True)} points"
        gain = gain if each.gain == each.gain else f"{each.trained:.3f} of the last training steps"
        table.figure(f"{each.arm}, seed {each.seed}: success after", each.after, "", gain)
    text = TABLES[name](outcomes).rstrip()
    if TABLES[name] is horizon_table:
        by_distance = distance_table(folders_of(study, folder=folder))
        text += f"\n\nHeld-out success by distance (episodes):\n\n{by_distance.rstrip()}"
        write_atomically(folder / "table.md", f"{text}\n")
        for axis in AXES:
            write_atomically(folder / f"{axis}.svg", success_svg(outcomes, axis))
    table.title(text)


SUITES: dict[str, Callable[[BenchTable], None]] = {name: partial(_measure, name) for name in TABLES}
