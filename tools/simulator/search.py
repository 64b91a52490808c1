"""A small search over lookahead, lag bound, number of actors and group size."""

from dataclasses import dataclass, replace

from tools.simulator.config import SimulatorConfig
from tools.simulator.workload import (
    Workload,
    at_longest_horizon,
    num_engines,
    with_actors,
    with_ahead,
    with_size,
)
from tools.simulator.world import Prediction, SimulatedRun

AHEAD_STEPS = (1, 2, 4, 8)
ACTOR_FACTORS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
GROUP_SIZES = (4, 8, 16)
ENOUGH_FRAC = 0.95  # Fraction of the best rate that is sufficient.
KEPT_FRAC = 0.99  # Fraction of the episodes that the bound on lag must accept.
MAX_EPISODES = 40_000  # Limit of one trial.
MAX_HOURS = 48.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One simulated value of a setting, with its figures."""

    value: int
    trained_per_h: float
    lag_mean: float
    actor_idle_frac: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The recommended settings and all trials. Settings that were not varied are the run's."""

    max_ahead_steps: int
    max_lag_steps: int
    num_actors: int
    group_size: int
    groups_per_step: int
    ahead_trials: list[Trial]
    actor_trials: list[Trial]
    size_trials: list[Trial]


def advise(cfg: SimulatorConfig, workload: Workload) -> Recommendation:
    """Return the cheapest setting that trains nearly as much as the best, one axis at a time.

    The first axis is the lookahead, with a lag bound so high that few episodes are discarded. The
    recommended lag bound accepts 99 % of these episodes. Then the search tries fewer actors, and
    then other group sizes, which it takes if they train more. All trials use the longest horizon,
    because a long run spends most of its time there.
    """
    cfg = at_longest_horizon(cfg)
    num_actors = num_engines(cfg)
    ahead: dict[int, Prediction] = {}
    for value in sorted({*AHEAD_STEPS, max(1, cfg.scheduler.max_ahead_steps)}):
        ahead[value] = _predict(with_ahead(cfg, value, max_lag_steps=4 * value + 8), workload)
    best_ahead = _smallest_sufficient(ahead)
    max_lag_steps = _lag_bound(ahead[best_ahead])
    cfg = with_ahead(cfg, best_ahead, max_lag_steps=max_lag_steps)
    actors = {
        value: _predict(with_actors(cfg, value), workload)
        for value in sorted({max(1, round(num_actors * factor)) for factor in ACTOR_FACTORS})
    }
    best_actors = _smallest_sufficient(actors)
    cfg = with_actors(cfg, best_actors)
    sizes = {
        value: _predict(with_size(cfg, value), workload)
        for value in sorted({*GROUP_SIZES, cfg.groups.size})
        if cfg.groups.size * cfg.groups.per_step % value == 0
    }
    best_size = max(sizes, key=lambda size: sizes[size].trained_per_h)
    if sizes[cfg.groups.size].trained_per_h >= ENOUGH_FRAC * sizes[best_size].trained_per_h:
        best_size = cfg.groups.size
    return Recommendation(
        max_ahead_steps=best_ahead,
        max_lag_steps=max_lag_steps,
        num_actors=best_actors,
        group_size=best_size,
        groups_per_step=with_size(cfg, best_size).groups.per_step,
        ahead_trials=_trials(ahead),
        actor_trials=_trials(actors),
        size_trials=_trials(sizes),
    )


def _predict(cfg: SimulatorConfig, workload: Workload) -> Prediction:
    """Return the prediction for a configuration."""
    num = min(MAX_EPISODES, cfg.simulator.max_episodes)
    cfg = replace(cfg, simulator=replace(cfg.simulator, hours=MAX_HOURS, max_episodes=num))
    return SimulatedRun(cfg, workload, max_steps=cfg.simulator.search_steps).run()


def _smallest_sufficient(predictions: dict[int, Prediction]) -> int:
    """Return the smallest value whose training rate is close to the best."""
    best = max(each.trained_per_h for each in predictions.values())
    enough = [v for v, each in predictions.items() if each.trained_per_h >= ENOUGH_FRAC * best]
    return min(enough)


def _lag_bound(prediction: Prediction) -> int:
    """Return the lag that most consumed episodes do not exceed."""
    total = sum(prediction.lag_counts.values())
    passed = 0
    for lag, num in sorted(prediction.lag_counts.items()):
        passed += num
        if passed >= KEPT_FRAC * total:
            return max(1, lag)
    return 1


def _trials(predictions: dict[int, Prediction]) -> list[Trial]:
    """Return the predictions as trials, by the value of the setting."""
    return [
        Trial(
            value=value,
            trained_per_h=prediction.trained_per_h,
            lag_mean=prediction.lag_mean,
            actor_idle_frac=prediction.actor_idle_frac,
        )
        for value, prediction in predictions.items()
    ]
