"""What a study of horizons says: success at equal episodes, tokens and seconds, over seeds.

Intervals are percentiles of a bootstrap over the seeds of each arm, of the interquartile mean.
Source: Agarwal et al., Deep RL at the Edge of the Statistical Precipice, arXiv 2108.13264, whose
strata are tasks; here each arm's runs are one stratum.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.store.journal import read_journal
from common.wire.ids import subset_of
from learner.bench.study import Outcome, interval, markdown

NUM_DRAWS = 2000
BINS = (4, 8, 16, 32)  # most turns that the expert needs
MAX_ROOMS = 32  # of the environment `rooms`, whose item i has 1 + i mod 32 of them
COLLAPSE_FRAC = 0.5  # of the best evaluation; a run whose last one is below has collapsed
MIN_BEST = 0.1  # success below it is too little to lose
AXES = {"episodes": "num_episodes", "tokens": "num_tokens", "seconds": "wall_s"}
GRID = 24  # points of a curve
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2", "#97bbf5")
WIDTH, HEIGHT, MARGIN = 640, 360, 44


def by_arm(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Return the runs of each arm, in the order of the study."""
    arms: defaultdict[str, list[Outcome]] = defaultdict(list)
    for each in outcomes:
        arms[each.arm].append(each)
    return dict(arms)


def iqm(values: np.ndarray) -> np.ndarray:
    """Return the mean over the last axis [..., runs] without its lowest and highest quarter."""
    num = values.shape[-1]
    cut = num // 4
    return np.sort(values, axis=-1)[..., cut : num - cut].mean(axis=-1)


def over_seeds(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (interquartile mean, low, high) of [..., runs], 95 % by a bootstrap over runs.

    Of one run alone low and high are its value.
    """
    rng = np.random.default_rng(0)
    draws = rng.integers(0, values.shape[-1], size=(NUM_DRAWS, values.shape[-1]))
    means = iqm(np.moveaxis(values[..., draws], -2, 0))  # [draws, ...]
    low, high = np.percentile(means, [2.5, 97.5], axis=0)
    return iqm(values), low, high


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


def distance_table(folders: dict[str, list[Path]]) -> str:
    """Return a row for every arm: success of the last evaluation by distance, of all its seeds."""
    rows: list[list[str]] = []
    for arm, runs in folders.items():
        counts = np.zeros((len(BINS), 2), dtype=int)
        for run in runs:
            for _, trajectory in read_journal(run / "journal"):
                if trajectory.group_id != "eval-after-model":
                    continue
                index = int(trajectory.item_id.removeprefix(subset_of(trajectory.item_id))[6:])
                far = next(i for i, most in enumerate(BINS) if index % MAX_ROOMS < most)
                counts[far] += (1, trajectory.is_success)
        rows.append([arm, *(f"{solved / max(num, 1):.3f} ({num})" for num, solved in counts)])
    return markdown(["arm", *(f"up to {most} turns" for most in BINS)], rows)


def success_svg(outcomes: Sequence[Outcome], axis: str = "tokens") -> str:
    """Return a picture of success against what was spent: the mean of each arm in its interval."""
    budget = max(float(getattr(each.points[-1], AXES[axis])) for each in outcomes)
    parts: list[str] = []
    for i, (arm, runs) in enumerate(by_arm(outcomes).items()):
        css = COLOURS[i % len(COLOURS)]
        end = budget_of(runs, axis)
        at = np.linspace(0, end, GRID)
        values = np.stack([success_at(each, axis, at) for each in runs], axis=-1)  # [grid, runs]
        mean, low, high = over_seeds(values)
        x = MARGIN + (WIDTH - 2 * MARGIN) * at / max(budget, 1)
        y, y_low, y_high = (HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * v for v in (mean, low, high))
        band = [*zip(x, y_low, strict=True), *zip(x[::-1], y_high[::-1], strict=True)]
        parts += [
            f'<polygon points="{_points(band)}" fill="{css}" opacity="0.15"/>',
            f'<polyline points="{_points([*zip(x, y, strict=True)])}" fill="none" stroke="{css}"/>',
            f'<text x="{MARGIN + 6}" y="{MARGIN + 14 * i}" fill="{css}">{arm}</text>',
        ]
    for share in (0.0, 0.5, 1.0):
        at_y = HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * share
        parts.append(f'<text x="4" y="{at_y:.0f}">{share:.0%}</text>')
    below = f"{axis}, up to {budget:,.0f}; bands: 95 % over seeds"
    parts.append(f'<text x="{MARGIN}" y="{HEIGHT - 8}">{below}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        f' font-family="sans-serif" font-size="12">{"".join(parts)}</svg>\n'
    )


def _points(pairs: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in pairs)
