"""The studies that `bench --suite algorithms | staleness | curriculum` runs, and their tables."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TextIO

from learner.study import (
    ROOT,
    Arm,
    Outcome,
    Study,
    interval,
    markdown,
    run_study,
    success_at_tokens,
)

NUM_STEPS = 100
OVERRIDES = (
    "log.wandb=disabled",
    f"train.num_steps={NUM_STEPS}",
    "horizon.every_steps=20",
    "eval.num_items=400",
    "eval.baselines=false",
)
UNGUARDED = (  # nothing but the loss itself deals with old data
    "learner.controller.scale_lr=false",
    "learner.controller.tighten_gate=false",
    "learner.controller.skip_step=false",
)
LAGS = (0, 1, 2, 4, 8, 16)

ALGORITHMS = Study(
    name="study-algorithms",
    arms=(
        Arm(name="ppo", overrides=("algorithm.advantage=ppo", "learner.critic.lr=1e-3")),
        Arm(
            name="grpo",
            overrides=(
                "algorithm.advantage=grpo",
                "algorithm.baseline=group_mean",
                "algorithm.normalize_std=true",
            ),
        ),
        Arm(name="rloo", overrides=("algorithm.advantage=rloo",)),
        Arm(name="reinforce_pp", overrides=("algorithm.advantage=reinforce_pp",)),
    ),
    seeds=(0, 1),
    overrides=OVERRIDES,
)


def _lag(num_steps: int, *, is_corrected: bool) -> Arm:
    uncorrected = ("algorithm.correction=none", "algorithm.proximal=reused")
    bounds = (f"learner.hold_back_steps={num_steps}", f"learner.max_lag_steps={max(4, num_steps)}")
    return Arm(
        name=f"lag{num_steps}-{'corrected' if is_corrected else 'uncorrected'}",
        overrides=(*bounds, *(() if is_corrected else uncorrected)),
    )


STALENESS = Study(
    name="study-staleness",
    arms=tuple(_lag(lag, is_corrected=corrected) for lag in LAGS for corrected in (False, True)),
    seeds=(0,),
    overrides=(*OVERRIDES, *UNGUARDED, "train.mode=sync"),
    num_at_once=2,
)

CURRICULUM = Study(
    name="study-curriculum",
    arms=(
        Arm(name="fixed-short", overrides=("horizon.kind=fixed", "horizon.stages=[6]")),
        Arm(name="fixed-long", overrides=("horizon.kind=fixed", "horizon.stages=[16]")),
        Arm(name="stepwise", overrides=("horizon.kind=stepwise", "horizon.every_steps=30")),
        Arm(
            name="gated",
            overrides=(
                "horizon.kind=gated",
                "horizon.gated.window_steps=15",
                "horizon.gated.min_steps=15",
                "horizon.gated.min_truncated_frac=0.1",
            ),
        ),
    ),
    seeds=(0, 1),
    overrides=(
        *OVERRIDES,
        "learner.decay_start_frac=1",  # so that success along the way compares
        "learner.lr=5e-4",
        "learner.muon_lr=1.5e-3",
        "eval.every_steps=20",
        "eval.stream_items=400",
    ),
)


def algorithms_table(outcomes: list[Outcome]) -> str:
    """Return a row for every run: success before and after, and the paired gain."""
    header = ["algorithm", "seed", "before", "after [95 %]", "gain, points [95 %]", "mean lag"]
    rows = [
        [
            each.arm,
            str(each.seed),
            f"{each.before:.3f}",
            interval(each.after, each.after_ci95),
            interval(each.gain, each.gain_ci95, is_gain=True),
            f"{each.lag_mean:.2f}",
        ]
        for each in outcomes
    ]
    return markdown(header, rows)


def staleness_table(outcomes: list[Outcome]) -> str:
    """Return a row for every lag: success after training, uncorrected beside corrected."""
    header = ["lag", "measured lag", "uncorrected", "gain", "corrected", "gain", "smallest ESS"]
    by_name = {each.arm: each for each in outcomes}
    rows: list[list[str]] = []
    for lag in LAGS:
        bare, mended = by_name[f"lag{lag}-uncorrected"], by_name[f"lag{lag}-corrected"]
        cells = [
            cell
            for each in (bare, mended)
            for cell in (
                interval(each.after, each.after_ci95),
                interval(each.gain, each.gain_ci95, is_gain=True),
            )
        ]
        rows.append([str(lag), f"{mended.lag_mean:.2f}", *cells, f"{mended.ess_min:.2f}"])
    return markdown(header, rows)


def curriculum_table(outcomes: list[Outcome]) -> str:
    """Return success at equal episodes and at equal tokens, and then along the way."""
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


def _along(outcome: Outcome, steps: list[int]) -> list[str]:
    points = {point.step: point for point in outcome.points}
    return [
        f"{points[step].success:.3f} ({points[step].num_tokens / 1e3:.0f})"
        if step in points
        else "-"
        for step in steps
    ]


def _measure(
    study: Study,
    table: Callable[[list[Outcome]], str],
    out: TextIO,
    *,
    folder: Path = ROOT / "runs",
) -> int:
    out.write(f"{len(study.arms) * len(study.seeds)} runs below {folder / study.name}\n")
    out.flush()
    out.write(table(run_study(study, folder=folder / study.name)))
    return 0


SUITES: dict[str, Callable[[TextIO], int]] = {
    "algorithms": partial(_measure, ALGORITHMS, algorithms_table),
    "staleness": partial(_measure, STALENESS, staleness_table),
    "curriculum": partial(_measure, CURRICULUM, curriculum_table),
}
