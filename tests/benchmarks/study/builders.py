"""Builders of the outcomes of runs."""

from benchmarks.study.outcome import Point, SeedResult


def make_run(arm: str, seed: int, *curve: float, tokens_per_step: int = 100) -> SeedResult:
    """Return a run evaluated every ten steps; the first success is before training."""
    points = tuple(
        Point(
            step=10 * i,
            success=success,
            num_episodes=40 * i,
            num_tokens=10 * i * tokens_per_step,
            spent_s=5.0 * i,
        )
        for i, success in enumerate(curve)
    )
    return SeedResult(
        arm=arm,
        seed=seed,
        before=curve[0],
        after=curve[-1],
        lag_mean=1.0,
        ess_min=0.9,
        points=points,
        cpu_s=12.0,
    )


RUNS = [
    *(make_run("short", seed, 0.1, 0.4, 0.4 + seed / 50) for seed in range(5)),
    *(
        make_run("long", seed, 0.1, 0.3, 0.8 - 0.7 * (seed == 4), tokens_per_step=300)
        for seed in range(5)
    ),
]
