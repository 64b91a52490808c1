"""Builders of the outcomes of runs."""

from typing import Any

from benchmarks.study.outcome import NAN, NO_INTERVAL, Point, SeedResult


def make_outcome(arm: str, seed: int = 0, points: tuple[Point, ...] = (), **own: Any) -> SeedResult:
    """Return the outcome of a run whose fields are those given, the others simple values."""
    plain: dict[str, Any] = {
        "before": NAN,
        "after": 0.5,
        "after_ci95": NO_INTERVAL,
        "num_after": 400,
        "gain": 0.0,
        "gain_ci95": NO_INTERVAL,
        "trained": 0.6,
        "num_trained": 100,
        "lag_mean": 0.0,
        "ess_min": 1.0,
    }
    return SeedResult(arm=arm, seed=seed, points=points, **{**plain, **own})


def make_run(arm: str, seed: int, *curve: float, tokens_per_step: int = 100) -> SeedResult:
    """Return a run evaluated every ten steps; the first success is before training."""
    points = tuple(
        Point(
            step=10 * i,
            success=success,
            num_episodes=40 * i,
            num_tokens=10 * i * tokens_per_step,
            spent_s=5.0 * i,
            by_distance=((4, i), (4, 0), (8, 0), (8, 0)),
        )
        for i, success in enumerate(curve)
    )
    return make_outcome(arm, seed, points, before=curve[0], after=curve[-1], num_after=9)


RUNS = [
    *(make_run("short", seed, 0.1, 0.4, 0.4 + seed / 50) for seed in range(5)),
    *(
        make_run("long", seed, 0.1, 0.3, 0.8 - 0.7 * (seed == 4), tokens_per_step=300)
        for seed in range(5)
    ),
]
