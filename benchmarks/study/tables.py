"""The tables of the studies of training."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from benchmarks.study.intervals import gap, over_runs
from benchmarks.study.outcome import AXES, BINS, SeedResult, budget_of, success_at
from benchmarks.study.plan import LagArm
from common.evaluation.intervals import wilson_interval

Runs = list[SeedResult]
Columns = dict[str, Callable[[Runs], str]]  # A cell of an arm, by the head of the column.
DEFAULT = "default"
NONE = "none"
BARS = {4: 0.02, 16: 0.05}  # Lag -> success that the default may lose against lag 0.
# A run has collapsed if its last evaluation is below this fraction of its best.
COLLAPSE_FRAC = 0.5
MIN_BEST = 0.1  # A smaller success is too small for a collapse.
BASE = "fixed-long"  # The baseline arm of an effect.
SAME_TEXT = (
    "In brackets the least effective sample size of a step. `n =`: so many runs are those with\n"
    "the controller, which never acted in them, and were not made again ({num} in all). At lag 0\n"
    "every batch of one update is on-policy: all but decoupled are one run there, with or without\n"
    "the controller.\n"
)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def interval(value: float, ci95: tuple[float, float]) -> str:
    """Return a fraction with its interval: `0.512 [0.463, 0.561]`."""
    return f"{value:.3f} [{ci95[0]:.3f}, {ci95[1]:.3f}]"


def points(value: float, ci95: tuple[float, float]) -> str:
    """Return a gain with its interval, in points."""
    return f"{100 * value:+.1f} [{100 * ci95[0]:.1f}, {100 * ci95[1]:.1f}]"


def by_arm(outcomes: Sequence[SeedResult]) -> dict[str, Runs]:
    """Return the runs of each arm, in the order of the study."""
    arms: defaultdict[str, Runs] = defaultdict(list)
    for each in outcomes:
        arms[each.arm].append(each)
    return dict(arms)


def _arm_table(outcomes: Runs, first: str, columns: Columns) -> str:
    """Return a table with a row for every arm; `first` is the head of the arms' names."""
    arms = by_arm(outcomes).items()
    rows = [[arm, *(cell(runs) for cell in columns.values())] for arm, runs in arms]
    return markdown([first, *columns], rows)


def _mean_of(key: str) -> Callable[[Runs], str]:
    return lambda runs: interval(*over_runs([getattr(each, key) for each in runs]))


def _gain(runs: Runs) -> str:
    return points(*over_runs([each.gain for each in runs]))


def _by_seed(key: str) -> Callable[[Runs], str]:
    return lambda runs: ", ".join(f"{getattr(each, key):.3f}" for each in runs)


def _plain_mean(key: str) -> Callable[[Runs], str]:
    def cell(runs: Runs) -> str:
        mean = np.mean([getattr(each, key) for each in runs])
        return f"{mean:.1f}" if mean < 10 else f"{mean:.0f}"

    return cell


def _pooled(key: str, num: str) -> Callable[[Runs], str]:
    """Return a cell with all episodes and Wilson's interval, without variance over seeds."""

    def cell(runs: Runs) -> str:
        num_plays = sum(getattr(each, num) for each in runs)
        num_solved = round(sum(getattr(each, key) * getattr(each, num) for each in runs))
        return interval(num_solved / num_plays, wilson_interval(num_solved, num_plays))

    return cell


def _at_equal_spending(outcomes: Runs) -> Columns:
    def column(axis: str, budget: float) -> Callable[[Runs], str]:
        return lambda runs: interval(
            *over_runs([float(success_at(each, axis, budget)) for each in runs])
        )

    budgets = {axis: budget_of(outcomes, axis) for axis in AXES}
    return {f"at {num:,.0f} {axis} [95 %]": column(axis, num) for axis, num in budgets.items()}


def _num_seeds(runs: Runs) -> str:
    return str(len(runs))


def algorithms_table(outcomes: Runs) -> str:
    """Return a row for every arm: the mean over its seeds before and after, at equal spending."""
    columns: Columns = {
        "seeds": _num_seeds,
        "before [95 %]": _mean_of("before"),
        **_at_equal_spending(outcomes),
        "gain, points [95 %]": _gain,
        "after, by seed": _by_seed("after"),
        "CPU s per run": lambda runs: f"{np.mean([each.cpu_s for each in runs]):.0f}",
    }
    return _arm_table(outcomes, "arm", columns)


def recipes_table(outcomes: Runs) -> str:
    """Return a row for every recipe: its success, and its gain over the same initial policy."""
    columns: Columns = {
        "seeds": _num_seeds,
        "after [95 %]": _mean_of("after"),
        "gain, points [95 %]": _gain,
        "by seed": _by_seed("after"),
    }
    return _arm_table(outcomes, "recipe", columns)


def credit_table(outcomes: Runs) -> str:
    """Return a row for every arm: success of all seeds together, on training and held-out items."""
    columns: Columns = {
        "training, last steps, by seed": _by_seed("trained"),
        "together [95 %]": _pooled("trained", "num_trained"),
        "held out [95 %]": _pooled("after", "num_after"),
    }
    return _arm_table(outcomes, "credit", columns)


CONTEXT: Columns = {
    "before [95 %]": _pooled("before", "num_after"),
    "after [95 %]": _pooled("after", "num_after"),
    "after, by seed": _by_seed("after"),
}


def context_table(outcomes: Runs) -> str:
    """Return a row for every arm: success of all seeds together, before and after training."""
    columns = CONTEXT | {"CPU s per run": _plain_mean("cpu_s")}
    return _arm_table(outcomes, "context", columns)


def branches_table(outcomes: Runs) -> str:
    """Return the table of contexts, with the final size of held-out episodes over all segments."""
    columns = CONTEXT | {
        "segments": _plain_mean("num_segments"),
        "tokens": _plain_mean("num_row_tokens"),
        "CPU s per run": _plain_mean("cpu_s"),
    }
    return _arm_table(outcomes, "context", columns)


def curriculum_table(outcomes: Runs) -> str:
    """Return success at equal episodes and at equal tokens, and then by step."""
    budget = budget_of(outcomes, "tokens")
    header = ["horizon", "seed", "episodes", "tokens generated", "success at equal episodes [95 %]"]
    rows = [
        [
            each.arm,
            str(each.seed),
            f"{each.points[-1].num_episodes:,}",
            f"{each.points[-1].num_tokens:,}",
            interval(each.after, each.after_ci95),
            f"{float(success_at(each, 'tokens', budget)):.3f}",
        ]
        for each in outcomes
    ]
    steps = sorted({point.step for each in outcomes for point in each.points})
    along: list[list[str]] = []
    for each in outcomes:
        cells = {p.step: f"{p.success:.3f} ({p.num_tokens / 1e3:.0f})" for p in each.points}
        along.append([f"{each.arm} {each.seed}", *(cells.get(step, "-") for step in steps)])
    return (
        markdown([*header, f"at {budget:,.0f} tokens"], rows)
        + "\nSuccess (thousands of tokens generated) after so many steps:\n\n"
        + markdown(["horizon, seed", *map(str, steps)], along)
    )


def has_collapsed(outcome: SeedResult) -> bool:
    """Return whether the last evaluation is below half of the best, which must be significant."""
    best = max(point.success for point in outcome.points)
    return best >= MIN_BEST and outcome.points[-1].success < COLLAPSE_FRAC * best


def horizon_table(outcomes: Runs) -> str:
    """Return success at equal spending, the lowest final success, collapses; then by distance."""
    columns: Columns = {
        "seeds": _num_seeds,
        **_at_equal_spending(outcomes),
        "lowest run's end": lambda runs: f"{min(each.points[-1].success for each in runs):.3f}",
        "collapsed": lambda runs: f"{sum(map(has_collapsed, runs))}/{len(runs)}",
    }
    return _arm_table(outcomes, "arm", columns) + distance_tables(outcomes)


def distance_tables(outcomes: Runs) -> str:
    """Return for every distance a table of success by number of steps, with a row for every arm.

    Bold cells differ from `BASE` at the same step, with 95 % confidence over seeds.
    """
    arms = by_arm([each for each in outcomes if each.points and each.points[0].by_distance])
    parts: list[str] = []
    for band, most in enumerate(BINS) if arms else ():
        curves = {arm: at_distance(runs, band) for arm, runs in arms.items()}
        rows: list[list[str]] = []
        for arm, curve in curves.items():
            cells: list[str] = []
            for step, values in curve.items():
                text = interval(*over_runs(values))
                base = curves.get(BASE, {}).get(step, values)
                low, high = gap(values, base)[1]
                cells.append(f"**{text}**" if low > 0 or high < 0 else text)
            rows.append([arm, *cells])
        least = BINS[band - 1] + 1 if band else 1
        parts.append(f"\n{least} to {most} turns, success after so many steps:\n")
        parts.append(markdown(["arm", *map(str, next(iter(curves.values())))], rows))
    return "\n".join(parts)


def at_distance(runs: Runs, band: int) -> dict[int, list[float]]:
    """Return the success of each run at a distance, by step of the evaluations of all runs."""
    found: dict[int, list[float]] = {}
    for evaluated in zip(*(each.points for each in runs), strict=False):
        counts = [each.by_distance[band] for each in evaluated]
        found[evaluated[0].step] = [solved / max(num, 1) for num, solved in counts]
    return found


def by_lag_arm(outcomes: Runs) -> dict[LagArm, Runs]:
    """Return the runs of each arm of the study of staleness."""
    return {LagArm.of(name): runs for name, runs in by_arm(outcomes).items()}


def staleness_table(outcomes: Runs) -> str:
    """Return a table for each rate, with a row for every lag, and the default's loss to lag 0."""
    arms = by_lag_arm(outcomes)
    parts: list[str] = []
    for rate in dict.fromkeys(arm.rate for arm in arms):
        own = {arm: runs for arm, runs in arms.items() if arm.rate == rate}
        kinds = list(dict.fromkeys((arm.kind, arm.is_controlled) for arm in own))
        heads = [f"{kind}, controller {state(is_on)}" for kind, is_on in kinds]
        rows: list[list[str]] = []
        for lag in sorted({arm.lag for arm in own}):
            found = [own.get(LagArm(rate, lag, kind, is_on), []) for kind, is_on in kinds]
            measured = next(runs[0].lag_mean for runs in found if runs)
            rows.append([str(lag), f"{measured:.1f}", *map(_lag_cell, found)])
        parts += [f"Rates {rate}:\n", markdown(["lag", "measured", *heads], rows)]
    same = SAME_TEXT.format(num=sum(bool(each.same_as) for each in outcomes))
    return "\n".join([*parts, "What the default loses:\n", _losses_table(arms), same])


def state(is_on: bool) -> str:
    """Return the word for the controller's state."""
    return "on" if is_on else "off"


def _lag_cell(runs: Runs) -> str:
    """Return success, minimum effective sample size, and number of copied outcomes."""
    if not runs:
        return "-"
    num_same = sum(bool(each.same_as) for each in runs)
    same = f", {num_same} =" if num_same else ""
    return f"{_mean_of('after')(runs)} ({min(each.ess_min for each in runs):.2f}{same})"


def losses(arms: Mapping[LagArm, Runs]) -> dict[LagArm, tuple[float, ...]]:
    """Return for the default at every lag above 0 its loss: (against lag 0, low, high, none).

    Losses are fractions of success. `none` is the success of the arm `none` minus the default's;
    NaN without such an arm.
    """
    found: dict[LagArm, tuple[float, ...]] = {}
    for arm, runs in arms.items():
        base = arms.get(LagArm(arm.rate, 0, arm.kind, arm.is_controlled))
        if arm.kind != DEFAULT or arm.lag == 0 or base is None:
            continue
        lost, ends = _gap_after(base, runs)
        none = arms.get(LagArm(arm.rate, arm.lag, NONE, arm.is_controlled))
        found[arm] = (lost, *ends, _gap_after(none, runs)[0] if none else np.nan)
    return found


def _gap_after(ours: Runs, theirs: Runs) -> tuple[float, tuple[float, float]]:
    return gap([each.after for each in ours], [each.after for each in theirs])


def _losses_table(arms: Mapping[LagArm, Runs]) -> str:
    rows = [
        [
            arm.rate,
            str(arm.lag),
            state(arm.is_controlled),
            points(lost, (low, high)),
            f"{100 * BARS[arm.lag]:.0f}" if arm.lag in BARS else "-",
            f"{-100 * ahead:+.1f}",
        ]
        for arm, (lost, low, high, ahead) in losses(arms).items()
    ]
    heads = ["loses to lag 0, points [95 %]", "may lose", "default less none, points"]
    return markdown(["rates", "lag", "controller", *heads], rows)


TABLES: dict[str, Callable[[Runs], str]] = {
    "algorithms": algorithms_table,
    "limits": algorithms_table,
    "recipes": recipes_table,
    "credit": credit_table,
    "branches": branches_table,
    "branches-long": branches_table,
    "context": context_table,
    "staleness": staleness_table,
    "curriculum": curriculum_table,
    "horizon": horizon_table,
}
