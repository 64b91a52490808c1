"""The pictures of the studies of training: lines with intervals, as SVG by file name."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks.study.intervals import over_seeds
from benchmarks.study.outcome import AXES, BINS, budget_of, success_at
from benchmarks.study.plan import LagArm
from benchmarks.study.tables import Runs, at_distance, by_arm, by_lag_arm, state

GRID = 24  # Points of a curve.
SIZE = (7.5, 4.0)  # Inches.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "longstride"}  # Text stays text; ids repeat.


@dataclass(frozen=True, slots=True)
class Line:
    """Success with its interval, [points] each."""

    name: str
    at: np.ndarray = field(repr=False)
    mean: np.ndarray = field(repr=False)
    low: np.ndarray = field(repr=False)
    high: np.ndarray = field(repr=False)


def lines_svg(
    lines: Sequence[Line], *, x_title: str, title: str = "", ticks: Sequence[float] = ()
) -> str:
    """Return the lines with their intervals as bands.

    Args:
        ticks: values with a mark on the axis; (): chosen by matplotlib.
    """
    with rc_context(cast(Any, STYLE)):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        for line in lines:
            axes.plot(line.at, line.mean, label=line.name, gid=f"line-{line.name}")
            axes.fill_between(line.at, line.low, line.high, alpha=0.15, gid=f"band-{line.name}")
        axes.set_ylim(0.0, 1.0)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel(f"{x_title}; bands: 95 % over seeds")
        axes.set_title(title)
        if len(ticks):
            axes.set_xticks(list(ticks))
        figure.legend(loc="outside right upper")
        picture = io.StringIO()
        figure.savefig(picture, format="svg", metadata={"Date": None})
    return picture.getvalue()


def pictures_of(study: str, outcomes: Runs) -> dict[str, str]:
    """Return the pictures of a study."""
    if study == "staleness":
        return lag_svgs(outcomes)
    measured = [each for each in outcomes if len(each.points) > 1]
    curves = {axis: success_svg(measured, axis) for axis in AXES} if measured else {}
    return curves | ({"distance": distance_svg(outcomes)} if study == "horizon" else {})


def success_svg(outcomes: Runs, axis: str) -> str:
    """Return a picture of success by spending: the mean of each arm with its interval."""
    lines: list[Line] = []
    for arm, runs in by_arm(outcomes).items():
        at = np.linspace(0, budget_of(runs, axis), GRID)
        values = np.stack([success_at(each, axis, at) for each in runs], axis=-1)  # [grid, runs]
        lines.append(Line(arm, at, *over_seeds(values)))
    return lines_svg(lines, x_title=axis)


def distance_svg(outcomes: Runs) -> str:
    """Return a picture of the final success by distance, for runs with this measurement."""
    lines: list[Line] = []
    for arm, runs in by_arm(outcomes).items():
        ends = [list(at_distance(runs, band).values())[-1] for band in range(len(BINS))]
        lines.append(Line(arm, np.array(BINS, dtype=float), *over_seeds(np.array(ends))))
    return lines_svg(lines, x_title="turns that the expert needs, at most", ticks=BINS)


def lag_svgs(outcomes: Runs) -> dict[str, str]:
    """Return a picture of success against lag for each rate and state of the controller."""
    arms = by_lag_arm(outcomes)
    pictures: dict[str, str] = {}
    for rate, is_on in dict.fromkeys((arm.rate, arm.is_controlled) for arm in arms):
        own = {a: r for a, r in arms.items() if (a.rate, a.is_controlled) == (rate, is_on)}
        lags = np.array(sorted({arm.lag for arm in own}), dtype=float)
        lines: list[Line] = []
        for kind in dict.fromkeys(arm.kind for arm in own):
            runs = [own.get(LagArm(rate, int(lag), kind, is_on), []) for lag in lags]
            if all(runs) and len({len(each) for each in runs}) == 1:
                values = np.array([[each.after for each in some] for some in runs])
                lines.append(Line(kind, lags, *over_seeds(values)))
        title = f"success after training, rates {rate}, controller {state(is_on)}"
        if lines:
            svg = lines_svg(lines, x_title="lag, steps", title=title, ticks=list(lags))
            pictures[f"lag-{rate}-{state(is_on)}"] = svg
    return pictures
