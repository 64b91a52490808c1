"""Checks of `check-env` on environments with seats."""

import math
import statistics
from collections.abc import Iterator

from envhub.env import EnvSpec, StepResult
from tools.author.findings import Finding, Plays, graded


def check_seats(spec: EnvSpec, plays: Plays) -> Iterator[Finding]:
    """Yield results whose seats are wrong, and the mean reward of each seat in random play."""
    results = [(each.item_id, result) for each in plays.all for result in each.results]
    wrong = [f"{item}: {why}" for item, result in results if (why := _why_wrong(spec, result))]
    ends = [each.results[-1].seat_rewards for each in plays.by_chance if each.is_over]
    means = (
        [
            statistics.fmean(rewards[seat] for rewards in ends if rewards)
            for seat in range(spec.seats)
        ]
        if ends and not wrong
        else []
    )
    shown = ", ".join(f"{mean:.2f}" for mean in means) or "no rewards, it never ended"
    yield from graded("seats", wrong, f"{spec.seats} seats; random play gives them {shown}")


def _why_wrong(spec: EnvSpec, result: StepResult) -> str:
    """Return why the seats of a result are wrong; "" if they are not."""
    rewards = result.seat_rewards or []
    if len(rewards) != spec.seats:
        return f"seat_rewards={result.seat_rewards}, but there are {spec.seats} seats"
    if not all(math.isfinite(each) and 0 <= each <= 1 for each in rewards):
        return f"seat_rewards={result.seat_rewards} are not in [0, 1]"
    if not result.done and result.seat not in range(spec.seats):
        return f"seat={result.seat} moves next, but the seats are 0 to {spec.seats - 1}"
    return ""
