"""The studies of training that `bench --suite NAME` runs, and their tables."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO

from common.repository import ROOT
from learner.bench.study import (
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


CORRECTIONS = {
    "uncorrected": ("algorithm.correction=none", "algorithm.proximal=reused"),
    "corrected": (),  # clipped ratio to the sampler, truncated importance weights: the default
    "decoupled": ("algorithm.proximal=recomputed",),
}


def _arms(lags: Sequence[int], corrections: Sequence[str]) -> tuple[Arm, ...]:
    return tuple(
        Arm(
            name=f"lag{lag}-{name}",
            overrides=(
                f"learner.hold_back_steps={lag}",
                f"learner.max_lag_steps={max(4, lag)}",
                *CORRECTIONS[name],
            ),
        )
        for lag in lags
        for name in corrections
    )


STALENESS = Study(
    name="study-staleness",
    arms=_arms(LAGS, ("uncorrected", "corrected")),
    seeds=(0,),
    overrides=(*OVERRIDES, *UNGUARDED, "train.mode=sync"),
    num_at_once=2,
)

FAST_LAGS = (0, 4, 16)
STALENESS_FAST = replace(
    STALENESS,
    name="study-staleness-fast",
    arms=_arms(FAST_LAGS, tuple(CORRECTIONS)),
    overrides=(
        *STALENESS.overrides,
        "train.num_steps=60",
        "horizon.every_steps=12",
        "learner.lr=3e-3",  # three times the quickstart's: the policy moves further in a step
        "learner.muon_lr=9e-3",
    ),
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
    """Return a row for every lag: success after training for every way to deal with it."""
    by_name = {each.arm: each for each in outcomes}
    lags = sorted({int(name.removeprefix("lag").partition("-")[0]) for name in by_name})
    kinds = [kind for kind in CORRECTIONS if f"lag{lags[0]}-{kind}" in by_name]
    header = ["lag", "measured", *(cell for kind in kinds for cell in (kind, "gain", "least ESS"))]
    rows: list[list[str]] = []
    for lag in lags:
        arms = [by_name[f"lag{lag}-{kind}"] for kind in kinds]
        cells = [
            cell
            for each in arms
            for cell in (
                interval(each.after, each.after_ci95),
                interval(each.gain, each.gain_ci95, is_gain=True),
                f"{each.ess_min:.2f}",
            )
        ]
        rows.append([str(lag), f"{arms[0].lag_mean:.1f}", *cells])
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
    "staleness-fast": partial(_measure, STALENESS_FAST, staleness_table),
    "curriculum": partial(_measure, CURRICULUM, curriculum_table),
}
