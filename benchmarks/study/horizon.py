"""What a study of horizons says: success at equal episodes, tokens and seconds, over seeds."""

from collections.abc import Sequence

import numpy as np

from benchmarks.study.intervals import by_arm, gap, over_seeds
from benchmarks.study.outcome import BINS, Outcome, interval, markdown
from benchmarks.study.plot import Line, lines_svg

COLLAPSE_FRAC = 0.5  # of the best evaluation; a run whose last one is below has collapsed
MIN_BEST = 0.1  # success below it is too little to lose
AXES = {"episodes": "num_episodes", "tokens": "num_tokens", "seconds": "spent_s"}
GRID = 24  # points of a curve
BASE = "fixed-long"  # what an effect is measured against


def success_at(outcome: Outcome, axis: str, at: np.ndarray | float) -> np.ndarray:
    """Return success where so much had been spent, linear between two evaluations."""
    spent = [float(getattr(point, AXES[axis])) for point in outcome.points]
    return np.asarray(np.interp(at, spent, [point.success for point in outcome.points]))


def budget_of(outcomes: Sequence[Outcome], axis: str) -> float:
    """Return what every run has spent: the least of their ends."""
    return min(float(getattr(each.points[-1], AXES[axis])) for each in outcomes)


def has_collapsed(outcome: Outcome) -> bool:
    """Return whether the last evaluation is below half of the best one, which was no accident."""
    best = max(point.success for point in outcome.points)
    return best >= MIN_BEST and outcome.points[-1].success < COLLAPSE_FRAC * best


def horizon_table(outcomes: list[Outcome]) -> str:
    """Return a row for every arm: success at equal spending, the least fortunate run, collapses."""
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


def distance_tables(outcomes: Sequence[Outcome]) -> str:
    """Return for every distance a table of success after so many steps, a row for every arm.

    Bold is what differs from `BASE` after as many steps, with 95 % over seeds.
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


def _along(runs: Sequence[Outcome], band: int) -> list[tuple[int, list[float]]]:
    """Return (step, success of each run at a distance) of every evaluation that all have."""
    found: list[tuple[int, list[float]]] = []
    for points in zip(*(each.points for each in runs), strict=False):
        counts = [each.by_distance[band] for each in points]
        found.append((points[0].step, [solved / max(num, 1) for num, solved in counts]))
    return found


def distance_svg(outcomes: Sequence[Outcome]) -> str:
    """Return a picture of the last success against distance, of runs that tell it."""
    lines: list[Line] = []
    for arm, runs in by_arm(outcomes).items():
        ends = [_along(runs, band)[-1][1] for band in range(len(BINS))]
        lines.append(Line(arm, np.array(BINS, dtype=float), *over_seeds(np.array(ends))))
    return lines_svg(lines, x_title="turns that the expert needs, at most", ticks=BINS)


def success_svg(outcomes: Sequence[Outcome], axis: str = "tokens") -> str:
    """Return a picture of success against what was spent: the mean of each arm in its interval."""
    lines: list[Line] = []
    for arm, runs in by_arm(outcomes).items():
        at = np.linspace(0, budget_of(runs, axis), GRID)
        values = np.stack([success_at(each, axis, at) for each in runs], axis=-1)  # [grid, runs]
        lines.append(Line(arm, at, *over_seeds(values)))
    return lines_svg(lines, x_title=axis)
