"""Results of the comparison with a peer: the clocks of each side's steps, and time to success."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from benchmarks.study.tables import markdown
from benchmarks.table import BenchTable

BAR = 0.687  # Held-out success of TRL after 320 steps, at the first measurement.
MAX_RATIO = 1 / 3  # Limit of the ratio of processor seconds to `BAR`.


@dataclass(frozen=True, slots=True, kw_only=True)
class StepClocks:
    """The clocks at the end of a step, relative to the start of the first one."""

    step: int
    wall_s: float
    cpu_s: float
    horizon: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The training of one side with one seed."""

    seed: int
    steps: list[StepClocks]
    success: dict[int, float]  # Success of the saved policies, by step.

    def curve(self) -> list[tuple[float, float, float]]:
        """Return (wall seconds, processor seconds, success) of each saved policy."""
        ends = {each.step: each for each in self.steps}
        found = ((ends[step], value) for step, value in sorted(self.success.items()))
        return [(end.wall_s, end.cpu_s, value) for end, value in found]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyArm:
    """One compared side with all its seeds."""

    name: str
    courses: list[Course]

    def per_step(self, horizon: int) -> tuple[float, float]:
        """Return (wall, processor) seconds of a step at a horizon; NaN if there was none."""
        pairs = [pair for each in self.courses for pair in pairwise(each.steps)]
        own = [(a, b) for a, b in pairs if a.horizon == b.horizon == horizon]
        if not own:
            return np.nan, np.nan
        wall = np.mean([b.wall_s - a.wall_s for a, b in own])
        return float(wall), float(np.mean([b.cpu_s - a.cpu_s for a, b in own]))

    def curve(self) -> list[tuple[float, float, float]]:
        """Return the mean of the curves over the seeds, up to the shortest one."""
        together = zip(*(each.curve() for each in self.courses), strict=False)
        return [tuple(np.mean(points, axis=0).tolist()) for points in together]


def cpu_s_to(success: float, curve: Sequence[tuple[float, float, float]]) -> float:
    """Return the processor seconds until a held-out success is reached; infinite if it never is.

    The value is interpolated linearly between two saved policies.
    """
    before = 0.0
    reached = 0.0
    for _, cpu_s, value in curve:
        if value >= success:
            share = (success - reached) / max(value - reached, 1e-9) if reached else 1.0
            return before + share * (cpu_s - before)
        before = cpu_s
        reached = value
    return float("inf")


def add_sides(
    table: BenchTable,
    theirs: StudyArm,
    lockstep: StudyArm,
    ours: StudyArm,
    *,
    horizons: Sequence[int],
) -> None:
    """Add the figures of all sides, and the bounded one: the processor seconds to `BAR`."""
    places = [(i, side, h) for i in range(2) for side in (lockstep, ours) for h in horizons]
    for i, side, horizon in places:
        a = side.per_step(horizon)[i]
        b = theirs.per_step(horizon)[i]
        name = f"{side.name}: {('wall', 'CPU')[i]} seconds of a step, horizon {horizon}"
        if np.isnan(a + b):
            table.note(name, "not two steps of it on both sides")
        else:
            table.compare(name, a, b, "s", against=theirs.name)
    for side in (theirs, lockstep, ours):
        each = ", ".join(f"{cpu_s_to(BAR, one.curve()):,.0f}" for one in side.courses)
        table.note(f"{side.name}: CPU seconds to held-out success {BAR}, by seed", each)
    limit = cpu_s_to(BAR, theirs.curve())
    if np.isinf(limit):
        table.note(f"CPU seconds to {BAR}", f"the mean of {theirs.name} did not get there")
        return
    for side in (lockstep, ours):
        name = f"{side.name}: CPU seconds to held-out success {BAR}, mean of seeds"
        used = cpu_s_to(BAR, side.curve())
        table.compare(name, used, limit, "s", against=theirs.name, at_most=MAX_RATIO)


def comparison(sides: Sequence[StudyArm], *, horizons: Sequence[int]) -> str:
    """Return the table: wall and processor seconds of a step, success after seconds of training."""
    rows: list[list[str]] = []
    for side in sides:
        each = [side.per_step(horizon) for horizon in horizons]
        walls, cpus = (" / ".join(_seconds(pair[i]) for pair in each) for i in range(2))
        mean = f"mean of {len(side.courses)}: " if side.courses[1:] else ""
        rows.append([side.name, f"{walls} s", cpus, mean + _curve_text(side.curve())])
        if side.courses[1:]:
            rows += [[f"seed {one.seed}", "", "", _curve_text(one.curve())] for one in side.courses]
    stages = " / ".join(map(str, horizons))
    heads = [f"wall per step, horizon {stages}", "CPU-seconds per step"]
    return markdown(["", *heads, "held-out success after s of training"], rows)


def _curve_text(curve: Sequence[tuple[float, float, float]]) -> str:
    return ", ".join(f"{value:.3f} at {wall_s:,.0f}" for wall_s, _, value in curve)


def _seconds(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.1f}"
