"""The table of a study of training: a row for every arm."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.study.intervals import gap, over_runs
from benchmarks.study.outcome import AXES, SeedResult, budget_of, success_at

Runs = list[SeedResult]
Columns = dict[str, Callable[[Runs], str]]  # A cell of an arm, by the head of the column.


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def interval(value: float, ci95: tuple[float, float]) -> str:
    """Return a fraction with its interval: `0.512 [0.463, 0.561]`."""
    return f"{value:.3f} [{ci95[0]:.3f}, {ci95[1]:.3f}]"


def points(value: float, ci95: tuple[float, float]) -> str:
    """Return a difference with its interval, in points."""
    return f"{100 * value:+.1f} [{100 * ci95[0]:.1f}, {100 * ci95[1]:.1f}]"


def by_arm(outcomes: Sequence[SeedResult]) -> dict[str, Runs]:
    """Return the runs of each arm, in the order of the outcomes."""
    arms: defaultdict[str, Runs] = defaultdict(list)
    for outcome in outcomes:
        arms[outcome.arm].append(outcome)
    return dict(arms)


def study_table(outcomes: Sequence[SeedResult], *, base: str) -> str:
    """Return success before, at equal spending and after training, and the gap to the base arm."""
    arms = by_arm(outcomes)

    def less_base(runs: Runs) -> str:
        """Return the difference to the base arm as text; "-" without one."""
        return points(*gap(_after(runs), _after(arms[base]))) if base in arms else "-"

    columns: Columns = {
        "seeds": lambda runs: str(len(runs)),
        **_before(outcomes),
        **_at_equal_spending(outcomes),
        "after [95 %]": lambda runs: interval(*over_runs(_after(runs))),
        f"less {base}, points [95 %]": less_base,
        "after, by seed": lambda runs: ", ".join(f"{each:.3f}" for each in _after(runs)),
        "lag": lambda runs: f"{np.mean([each.lag_mean for each in runs]):.1f}",
        "least ESS": lambda runs: f"{min(each.ess_min for each in runs):.2f}",
        "CPU s per run": lambda runs: f"{np.mean([each.cpu_s for each in runs]):.0f}",
    }
    rows = [[arm, *(cell(runs) for cell in columns.values())] for arm, runs in arms.items()]
    return markdown(["arm", *columns], rows)


def _after(runs: Runs) -> list[float]:
    """Return the final success of each run."""
    return [each.after for each in runs]


def _before(outcomes: Sequence[SeedResult]) -> Columns:
    """Return a column for studies that evaluate the initial policy."""
    if np.isnan([each.before for each in outcomes]).any():
        return {}
    return {"before [95 %]": lambda runs: interval(*over_runs([each.before for each in runs]))}


def _at_equal_spending(outcomes: Sequence[SeedResult]) -> Columns:
    """Return a column for each axis, for studies with evaluations before the end."""
    if min(len(each.points) for each in outcomes) < 2:
        return {}

    def column(axis: str, budget: float) -> Callable[[Runs], str]:
        return lambda runs: interval(*over_runs([success_at(each, axis, budget) for each in runs]))

    budgets = {axis: budget_of(outcomes, axis) for axis in AXES}
    return {f"at {num:,.0f} {axis} [95 %]": column(axis, num) for axis, num in budgets.items()}
