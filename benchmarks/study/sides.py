"""Results of the comparison with a peer: the clocks of each side's steps, and time to success."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.study.tables import markdown
from benchmarks.suite import Suite

BAR = 0.687  # Held-out success of TRL after 320 steps, at the first measurement.
MAX_RATIO = 1 / 3  # Limit of the ratio of processor seconds to `BAR`.
NOT_OURS = ("cpu/cores", "cpu/others_s", "cpu/per_trained_episode_s")
Curve = Sequence[tuple[float, float, float]]  # Wall seconds, processor seconds, success.


@dataclass(frozen=True, slots=True, kw_only=True)
class StepClocks:
    """The clocks at the end of a step, relative to the start of the first one."""

    step: int
    wall_s: float
    cpu_s: float


def steps_of(lines: Sequence[dict[str, Any]]) -> list[StepClocks]:
    """Return the clocks of a run's metrics. The first step counts as long as the others' mean."""
    steps = [line for line in lines if line["step"]]
    used = [
        sum(v for k, v in line.items() if k.startswith("cpu/") and k not in NOT_OURS)
        for line in steps
    ]
    walls = [line["time_s"] for line in steps]
    num = max(len(steps) - 1, 1)
    wall_0, cpu_0 = (each[0] - (each[-1] - each[0]) / num for each in (walls, used))
    return [
        StepClocks(step=line["step"], wall_s=wall - wall_0, cpu_s=cpu - cpu_0)
        for line, wall, cpu in zip(steps, walls, used, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The training of one side with one seed."""

    seed: int
    steps: list[StepClocks]
    success: dict[int, float]  # Success of the saved policies, by step.

    def curve(self) -> Curve:
        """Return the clocks and the success of each saved policy."""
        ends = {each.step: each for each in self.steps}
        found = ((ends[step], value) for step, value in sorted(self.success.items()))
        return [(end.wall_s, end.cpu_s, value) for end, value in found]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One compared side with all its seeds."""

    name: str
    courses: list[Course]

    def per_step(self) -> tuple[float, float]:
        """Return the mean (wall, processor) seconds of a step."""
        ends = [each.steps[-1] for each in self.courses]
        num = sum(end.step for end in ends)
        return sum(end.wall_s for end in ends) / num, sum(end.cpu_s for end in ends) / num

    def curve(self) -> Curve:
        """Return the mean of the curves over the seeds, up to the shortest one."""
        together = zip(*(each.curve() for each in self.courses), strict=False)
        return [tuple(np.mean(points, axis=0).tolist()) for points in together]


def cpu_s_to(success: float, curve: Curve) -> float:
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


def add_sides(suite: Suite, theirs: Side, *ours: Side) -> None:
    """Add the figures of all sides, and the bounded one: the processor seconds to `BAR`."""
    limit = cpu_s_to(BAR, theirs.curve())
    for side in ours:
        for clock, a, b in zip(("wall", "CPU"), side.per_step(), theirs.per_step(), strict=True):
            suite.compare(f"{side.name}: {clock} s of a step", a, b, "s", against=theirs.name)
        name = f"{side.name}: CPU seconds to held-out success {BAR}, mean of seeds"
        if np.isinf(limit):
            suite.note(name, f"the mean of {theirs.name} did not reach it")
            continue
        used = cpu_s_to(BAR, side.curve())
        suite.compare(name, used, limit, "s", against=theirs.name, at_most=MAX_RATIO)


def comparison(sides: Sequence[Side]) -> str:
    """Return the table: seconds of a step, success after seconds of training, seconds to `BAR`."""
    rows: list[list[str]] = []
    for side in sides:
        wall, cpu = (f"{value:.1f} s" for value in side.per_step())
        rows.append([f"{side.name}, mean", wall, cpu, *_cells(side.curve())])
        rows += [[f"seed {one.seed}", "", "", *_cells(one.curve())] for one in side.courses]
    heads = ["wall per step", "CPU per step", "held-out success after s of training"]
    return markdown(["", *heads, f"CPU s to {BAR}"], rows)


def _cells(curve: Curve) -> list[str]:
    """Return the cells of a learning curve."""
    course = ", ".join(f"{value:.3f} at {wall_s:,.0f}" for wall_s, _, value in curve)
    return [course, f"{cpu_s_to(BAR, curve):,.0f}"]
