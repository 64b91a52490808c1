"""The card of the curriculum: success, cut episodes and the horizon, one below the other."""

from collections.abc import Sequence
from functools import partial
from itertools import groupby, pairwise

from common.report.charts import Point, Series, line_chart
from common.store.metrics import MetricsLine

SMOOTH_STEPS = 10
MAX_ENVS = 5  # that get a line of their own
_SHARES = (("success", "reward/success", "c1"), ("cut", "episodes/truncated_frac", "c3"))
_ENV_COLOURS = ("c4", "c5", "c2", "c1", "c3")
MAX_RULES = 12  # upright lines; a horizon that changes more often is seen without
Legend = list[tuple[str, str]]  # (name, css)


def curriculum_charts(lines: list[MetricsLine]) -> list[tuple[str, Legend]]:
    """Return the charts from top to bottom with their legends; none if there is no horizon.

    Above: success and the share of episodes cut by the horizon, as they were and smoothed. Below:
    the horizon of every environment. Upright lines mark the steps at which one of them changed.
    """
    horizons, changes = _horizons(lines), changes_shown(lines)
    if not horizons:
        return []
    x_max = max(x for points in horizons.values() for x, _ in points)
    shares: list[Series] = []
    for label, name, css in _SHARES:
        points = points_of(lines, name)
        if len(points) > 2 * SMOOTH_STEPS:
            shares.append(Series(label=f"{label}, each step", points=points, css=f"{css} faint"))
            points = smooth(points)
        if points:
            shares.append(Series(label=label, points=points, css=css))
    steps = [
        Series(label=env, points=points, css=css, is_step=True)
        for (env, points), css in zip(horizons.items(), _ENV_COLOURS, strict=False)
    ]
    draw = partial(line_chart, rules=changes, x_max=x_max)
    lower = draw("Horizon in turns over steps", steps, height=150)
    below = [(f"turns, {line.label}", line.css) for line in steps]
    if not shares:
        return [(lower, below)]
    title = "Success and cut episodes over steps"
    upper = draw(title, shares, y_max=1.0, height=230, is_percent=True)
    return [(upper, [("solved", "c1"), ("cut by the horizon", "c3")]), (lower, below)]


def changes_shown(lines: list[MetricsLine]) -> list[float]:
    """Return the steps at which a horizon changed, where an upright line stands; not too many."""
    changes = sorted({x for points in _horizons(lines).values() for x in changes_of(points)})
    return changes if len(changes) <= MAX_RULES else []


def points_of(lines: list[MetricsLine], name: str) -> list[Point]:
    """Return the metric over the steps that have it; an absent value stays None."""
    return [(float(line["step"] or 0), line[name]) for line in lines if name in line]


def smooth(points: Sequence[Point], num_steps: int = SMOOTH_STEPS) -> list[Point]:
    """Return the mean of each point and those before it, `num_steps` in all."""
    smoothed: list[Point] = []
    for i, (x, _) in enumerate(points):
        window = [y for _, y in points[max(0, i + 1 - num_steps) : i + 1] if y is not None]
        smoothed.append((x, sum(window) / len(window) if window else None))
    return smoothed


def changes_of(points: Sequence[Point]) -> list[float]:
    """Return the steps whose value differs from that of the step before."""
    known = [(x, y) for x, y in points if y is not None]
    return [x for (_, before), (x, y) in pairwise(known) if y != before]


def _horizons(lines: list[MetricsLine]) -> dict[str, list[Point]]:
    """Return environment -> its horizon; the longest of all if no environment is named."""
    prefix, stage = "horizon/value/", "horizon/stage/"
    envs = sorted({n.removeprefix(prefix) for line in lines for n in line if n.startswith(prefix)})
    if not 0 < len(envs) <= MAX_ENVS:
        points = points_of(lines, "horizon/value")
        return {"longest": points} if points else {}
    return {
        env: level_of_stages(points_of(lines, prefix + env), points_of(lines, stage + env))
        for env in envs
    }


def level_of_stages(horizons: Sequence[Point], stages: Sequence[Point]) -> list[Point]:
    """Return the horizons, each raised to the longest of its visit to a stage.

    Tasks may end earlier than the curriculum allows; a batch of short ones alone would look as if
    the horizon had shrunk.

    Args:
        horizons: longest of each step's batch.
        stages: of each step; one without a stage is left as it is.
    """
    stage_of = dict(stages)
    raised: list[Point] = []
    for stage, visit in groupby(horizons, key=lambda point: stage_of.get(point[0])):
        points = list(visit)
        level = max((y for _, y in points if y is not None), default=None)
        raised += points if stage is None else [(x, level) for x, _ in points]
    return raised
