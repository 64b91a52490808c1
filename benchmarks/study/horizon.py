"""Results of a study of horizons: success at equal episodes, tokens and seconds, over seeds."""

from collections.abc import Sequence

import numpy as np

from benchmarks.study.intervals import by_arm, gap, over_seeds
from benchmarks.study.outcome import BINS, SeedResult, interval, markdown
from benchmarks.study.plot import SuccessCurve, lines_svg

# A run has collapsed if its last evaluation is below this fraction of its best.
COLLAPSE_FRAC = 0.5
MIN_BEST = 0.1  # A smaller success is too small for a collapse.
AXES = {"episodes": "num_episodes", "tokens": "num_tokens", "seconds": "spent_s"}
GRID = 24  # Points of a curve.
BASE = "fixed-long"  # The baseline arm of an effect.


def success_at(outcome: SeedResult, axis: str, at: np.ndarray | float) -> np.ndarray:
    """Return the success at a given spending, interpolated linearly between two evaluations."""
    spent = [float(getattr(point, AXES[axis])) for point in outcome.points]
    return np.asarray(np.interp(at, spent, [point.success for point in outcome.points]))


def budget_of(outcomes: Sequence[SeedResult], axis: str) -> float:
    """Return the spending that every run has reached: the minimum of their totals."""
    return min(float(getattr(each.points[-1], AXES[axis])) for each in outcomes)


def has_collapsed(outcome: SeedResult) -> bool:
    """Return whether the last evaluation is below half of the best, which must be significant."""
    best = max(point.success for point in outcome.points)
    return best >= MIN_BEST and outcome.points[-1].success < COLLAPSE_FRAC * best


def horizon_table(outcomes: list[SeedResult]) -> str:
    """Return a row for every arm: success at equal spending, lowest final success, collapses."""
    budgets = {axis: budget_of(outcomes, axis) for axis in AXES}
    heads = [f"at {budget:,.0f} {axis} [95 %]" for axis, budget in budgets.items()]
    rows: list[list[str]] = []
    for arm, runs in by_arm(outcomes).items():
        cells = [arm, str(len(runs))]
        for axis, budget in budgets.items():
            at = np.array([float(success_at(each, axis, budget)) for each in runs])
            mean, low, high = map(float, over_seeds(at))
            cells.append(interval(mean, (low, high)))
        num = sum(map(has_collapsed, runs))
        lowest = min(each.points[-1].success for each in runs)
        rows.append([*cells, f"{lowest:.3f}", f"{num}/{len(runs)}"])
    return markdown(["arm", "seeds", *heads, "lowest run's end", "collapsed"], rows)


def distance_tables(outcomes: Sequence[SeedResult]) -> str:
    """Return for every distance a table of success by number of steps, with a row for every arm.

    Bold cells differ from `BASE` at the same step, with 95 % confidence over seeds.
    """
    arms = by_arm([each for each in outcomes if each.points and each.points[0].by_distance])
    parts: list[str] = []
    for band, most in enumerate(BINS) if arms else ():
        base = {step: values for step, values in _along(arms.get(BASE, []), band)}
        rows: list[list[str]] = []
        for arm, runs in arms.items():
            cells: list[str] = []
            for step, values in _along(runs, band):
                mean, low, high = map(float, over_seeds(np.array(values)))
                text = interval(mean, (low, high))
                low, high = gap(values, base[step])[1] if step in base else (0.0, 0.0)
                cells.append(f"**{text}**" if low > 0 or high < 0 else text)
            rows.append([arm, *cells])
        steps = [str(step) for step, _ in _along(next(iter(arms.values())), band)]
        least = BINS[band - 1] + 1 if band else 1
        parts.append(f"\n{least} to {most} turns, success after so many steps:\n")
        parts.append(markdown(["arm", *steps], rows))
    return "\n".join(parts)


def _along(runs: Sequence[SeedResult], band: int) -> list[tuple[int, list[float]]]:
    """Return (step, success of each run at a distance) for every evaluation of all runs."""
    found: list[tuple[int, list[float]]] = []
    for points in zip(*(each.points for each in runs), strict=False):
        counts = [each.by_distance[band] for each in points]
        found.append((points[0].step, [solved / max(num, 1) for num, solved in counts]))
    return found


def distance_svg(outcomes: Sequence[SeedResult]) -> str:
    """Return a picture of the final success by distance, for runs with this measurement."""
    lines: list[SuccessCurve] = []
    for arm, runs in by_arm(outcomes).items():
        ends = [_along(runs, band)[-1][1] for band in range(len(BINS))]
        lines.append(SuccessCurve(arm, np.array(BINS, dtype=float), *over_seeds(np.array(ends))))
    return lines_svg(lines, x_title="turns that the expert needs, at most", ticks=BINS)


def success_svg(outcomes: Sequence[SeedResult], axis: str = "tokens") -> str:
    """Return a picture of success by spending: the mean of each arm with its interval."""
    lines: list[SuccessCurve] = []
    for arm, runs in by_arm(outcomes).items():
        at = np.linspace(0, budget_of(runs, axis), GRID)
        values = np.stack([success_at(each, axis, at) for each in runs], axis=-1)  # [grid, runs]
        lines.append(SuccessCurve(arm, at, *over_seeds(values)))
    return lines_svg(lines, x_title=axis)
