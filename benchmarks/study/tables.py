"""The tables and pictures of the studies of training."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from benchmarks.study.horizon import (
    AXES,
    budget_of,
    distance_svg,
    distance_tables,
    horizon_table,
    success_at,
    success_svg,
)
from benchmarks.study.intervals import by_arm, gap, over_runs, over_seeds
from benchmarks.study.outcome import SeedResult, interval, markdown, success_at_tokens
from benchmarks.study.plan import LagArm
from benchmarks.study.plot import SuccessCurve, lines_svg
from common.evaluation.intervals import wilson_interval

Table = Callable[[list[SeedResult]], str]
Pictures = Callable[[list[SeedResult]], dict[str, str]]  # Pictures by file name.
DEFAULT = "default"
NONE = "none"
BARS = {4: 0.02, 16: 0.05}  # Lag -> success that the default may lose against lag 0.


def algorithms_table(outcomes: list[SeedResult]) -> str:
    """Return a row for every arm: the mean over its seeds before and after, at equal spending."""
    budgets = {axis: budget_of(outcomes, axis) for axis in AXES}
    heads = [f"at {budget:,.0f} {axis} [95 %]" for axis, budget in budgets.items()]
    rows: list[list[str]] = []
    for arm, runs in by_arm(outcomes).items():
        cells = [arm, str(len(runs)), _mean([each.before for each in runs])]
        for axis, budget in budgets.items():
            cells.append(_mean([float(success_at(each, axis, budget)) for each in runs]))
        gains = over_runs([each.gain for each in runs])
        by_seed = ", ".join(f"{each.after:.3f}" for each in runs)
        cells += [interval(*gains, is_gain=True), by_seed]
        rows.append([*cells, f"{np.mean([each.cpu_s for each in runs]):.0f}"])
    header = ["arm", "seeds", "before [95 %]", *heads, "gain, points [95 %]", "after, by seed"]
    return markdown([*header, "CPU s per run"], rows)


def recipes_table(outcomes: list[SeedResult]) -> str:
    """Return a row for every recipe: its success, and its gain over the same initial policy."""
    rows: list[list[str]] = []
    for arm, runs in by_arm(outcomes).items():
        gains = over_runs([each.gain for each in runs])
        by_seed = ", ".join(f"{each.after:.3f}" for each in runs)
        after = _mean([each.after for each in runs])
        rows.append([arm, str(len(runs)), after, interval(*gains, is_gain=True), by_seed])
    return markdown(["recipe", "seeds", "after [95 %]", "gain, points [95 %]", "by seed"], rows)


def _mean(values: Sequence[float]) -> str:
    return interval(*over_runs(values))


def credit_table(outcomes: list[SeedResult]) -> str:
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
    """Return the fraction of all episodes with Wilson's interval, without variance over seeds."""
    num = sum(n for _, n in shares)
    num_solved = round(sum(share * n for share, n in shares))
    return interval(num_solved / num, wilson_interval(num_solved, num))


def context_table(outcomes: list[SeedResult]) -> str:
    """Return a row for every arm: success of all seeds together, before and after training."""
    return _contexts(outcomes, {"CPU s per run": "cpu_s"})


def branches_table(outcomes: list[SeedResult]) -> str:
    """Return the table of contexts, with the final size of held-out episodes over all segments."""
    sizes = {"segments": "num_segments", "tokens": "num_row_tokens", "CPU s per run": "cpu_s"}
    return _contexts(outcomes, sizes)


def _contexts(outcomes: list[SeedResult], sizes: dict[str, str]) -> str:
    header = ["context", "before [95 %]", "after [95 %]", "after, by seed", *sizes]
    rows: list[list[str]] = []
    for arm, own in by_arm(outcomes).items():
        before, after = (
            _pooled([(share, each.num_after) for share, each in zip(shares, own, strict=True)])
            for shares in ([each.before for each in own], [each.after for each in own])
        )
        by_seed = ", ".join(f"{each.after:.3f}" for each in own)
        means = [np.mean([getattr(each, name) for each in own]) for name in sizes.values()]
        told = [f"{mean:.1f}" if mean < 10 else f"{mean:.0f}" for mean in means]
        rows.append([arm, before, after, by_seed, *told])
    return markdown(header, rows)


def staleness_table(outcomes: list[SeedResult]) -> str:
    """Return a table for each rate, with a row for every lag, and the default's loss to lag 0."""
    arms = {LagArm.of(name): runs for name, runs in by_arm(outcomes).items()}
    parts: list[str] = []
    for rate in dict.fromkeys(arm.rate for arm in arms):
        own = {arm: runs for arm, runs in arms.items() if arm.rate == rate}
        kinds = list(dict.fromkeys((arm.kind, arm.is_controlled) for arm in own))
        heads = [f"{kind}, controller {_state(is_on)}" for kind, is_on in kinds]
        rows: list[list[str]] = []
        for lag in sorted({arm.lag for arm in own}):
            found = [own.get(LagArm(rate, lag, kind, is_on), []) for kind, is_on in kinds]
            measured = next(runs[0].lag_mean for runs in found if runs)
            cells = [_cell(runs) for runs in found]
            rows.append([str(lag), f"{measured:.1f}", *cells])
        parts += [f"Rates {rate}:\n", markdown(["lag", "measured", *heads], rows)]
    return "\n".join([*parts, "What the default loses:\n", _losses(arms), _same_text(outcomes)])


def _state(is_on: bool) -> str:
    return "on" if is_on else "off"


def _cell(runs: Sequence[SeedResult]) -> str:
    """Return success, minimum effective sample size, and number of copied outcomes."""
    if not runs:
        return "-"
    same = sum(bool(each.same_as) for each in runs)
    least = min(each.ess_min for each in runs)
    return f"{_mean([each.after for each in runs])} ({least:.2f}{f', {same} =' if same else ''})"


def losses(arms: Mapping[LagArm, list[SeedResult]]) -> dict[LagArm, tuple[float, ...]]:
    """Return for the default at every lag above 0 its loss: (against lag 0, low, high, none).

    Losses are fractions of success. `none` is the success of the arm `none` minus the default's;
    NaN without such an arm.
    """
    found: dict[LagArm, tuple[float, ...]] = {}
    for arm, runs in arms.items():
        base = arms.get(LagArm(arm.rate, 0, arm.kind, arm.is_controlled))
        if arm.kind != DEFAULT or arm.lag == 0 or base is None:
            continue
        lost, ends = gap([each.after for each in base], [each.after for each in runs])
        none = arms.get(LagArm(arm.rate, arm.lag, NONE, arm.is_controlled))
        ahead = gap([e.after for e in none], [e.after for e in runs])[0] if none else np.nan
        found[arm] = (lost, *ends, ahead)
    return found


def _losses(arms: Mapping[LagArm, list[SeedResult]]) -> str:
    rows = [
        [
            arm.rate,
            str(arm.lag),
            _state(arm.is_controlled),
            interval(lost, (low, high), is_gain=True),
            f"{100 * BARS[arm.lag]:.0f}" if arm.lag in BARS else "-",
            f"{-100 * ahead:+.1f}",
        ]
        for arm, (lost, low, high, ahead) in losses(arms).items()
    ]
    heads = ["loses to lag 0, points [95 %]", "may lose", "default less none, points"]
    return markdown(["rates", "lag", "controller", *heads], rows)


def _same_text(outcomes: Sequence[SeedResult]) -> str:
    num = sum(bool(each.same_as) for each in outcomes)
    return (
        "In brackets the least effective sample size of a step. `n =`: so many runs are those with"
        " the controller,\nwhich never acted in them, and were not made again"
        f" ({num} in all). At lag 0 every batch of one update is on-policy:\nall but decoupled"
        " are one run there, with or without the controller.\n"
    )


def staleness_svgs(outcomes: list[SeedResult]) -> dict[str, str]:
    """Return a picture of success against lag for each rate and state of the controller."""
    arms = {LagArm.of(name): runs for name, runs in by_arm(outcomes).items()}
    pictures: dict[str, str] = {}
    for rate, is_on in dict.fromkeys((arm.rate, arm.is_controlled) for arm in arms):
        own = {a: r for a, r in arms.items() if (a.rate, a.is_controlled) == (rate, is_on)}
        lags = np.array(sorted({arm.lag for arm in own}), dtype=float)
        lines: list[SuccessCurve] = []
        for kind in dict.fromkeys(arm.kind for arm in own):
            runs = [own.get(LagArm(rate, int(lag), kind, is_on), []) for lag in lags]
            if all(runs) and len({len(each) for each in runs}) == 1:
                values = np.array([[each.after for each in some] for some in runs])
                lines.append(SuccessCurve(kind, lags, *over_seeds(values)))
        title = f"success after training, rates {rate}, controller {_state(is_on)}"
        if lines:
            name = f"lag-{rate}-{_state(is_on)}"
            pictures[name] = lines_svg(lines, x_title="lag, steps", title=title, ticks=[*lags])
    return pictures


def curriculum_table(outcomes: list[SeedResult]) -> str:
    """Return success at equal episodes and at equal tokens, and then by step."""
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


def _along(outcome: SeedResult, steps: list[int]) -> list[str]:
    points = {point.step: point for point in outcome.points}
    return [
        f"{points[step].success:.3f} ({points[step].num_tokens / 1e3:.0f})"
        if step in points
        else "-"
        for step in steps
    ]


def horizons_text(outcomes: list[SeedResult]) -> str:
    """Return success at equal spending, and by distance over the steps."""
    return horizon_table(outcomes) + distance_tables(outcomes)


def horizon_svgs(outcomes: list[SeedResult]) -> dict[str, str]:
    """Return the curves, and success by distance at the end."""
    return curves(outcomes) | {"distance": distance_svg(outcomes)}


def curves(outcomes: list[SeedResult]) -> dict[str, str]:
    """Return success against episodes, tokens and seconds, for runs with several evaluations."""
    measured = [each for each in outcomes if len(each.points) > 1]
    return {axis: success_svg(measured, axis) for axis in AXES} if measured else {}


TABLES: dict[str, tuple[Table, Pictures]] = {
    "algorithms": (algorithms_table, curves),
    "limits": (algorithms_table, curves),
    "recipes": (recipes_table, curves),
    "credit": (credit_table, curves),
    "branches": (branches_table, curves),
    "branches-long": (branches_table, curves),
    "context": (context_table, curves),
    "staleness": (staleness_table, staleness_svgs),
    "curriculum": (curriculum_table, curves),
    "horizon": (horizons_text, horizon_svgs),
}
