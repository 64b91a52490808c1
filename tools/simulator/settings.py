"""The simulated configuration, its variants, and a catalogue for it."""

from dataclasses import replace

from common.config.horizon import MAX_TURNS, HorizonKind, HorizonUnit
from common.config.run_config import RunConfig
from scheduler.curriculum.catalogue import HubCatalogue, SubsetEntry

NUM_ITEMS = 1000  # Number of items in each subset.
ENDLESS_STEPS = 1 << 30


def for_simulation(cfg: RunConfig, *, is_endless: bool = False) -> RunConfig:
    """Return the configuration to simulate, without evaluation before and after the run.

    With `is_endless` or a limit in hours it has no last step.
    """
    evaluation = replace(cfg.eval, before=False, after=False)
    num_steps = ENDLESS_STEPS if is_endless or cfg.simulator.hours else cfg.train.num_steps
    return replace(cfg, eval=evaluation, train=replace(cfg.train, num_steps=num_steps))


def catalogue_of(cfg: RunConfig) -> HubCatalogue:
    """Return a catalogue in which no item ends earlier than the longest horizon."""
    envs: dict[str, dict[str, SubsetEntry]] = {}
    for task in cfg.tasks:
        name = cfg.horizon.name_of(task.env, task.subset)
        is_in_turns = cfg.horizon.unit is HorizonUnit.TURNS
        max_turns = max(cfg.horizon.policy(name).stages) if is_in_turns else MAX_TURNS
        entry = SubsetEntry(num_train=NUM_ITEMS, num_test=NUM_ITEMS, max_turns=max_turns)
        for bound in (0, *cfg.curriculum.bounds()):
            envs.setdefault(task.env, {})[task.items(bound)] = entry
    return HubCatalogue(envs=envs)


def at_longest_horizon(cfg: RunConfig) -> RunConfig:
    """Return the configuration with the longest horizon of its curriculum for all episodes."""
    per_env = {
        env: replace(override, kind=HorizonKind.FIXED.value)
        for env, override in cfg.horizon.per_env.items()
    }
    horizon = replace(cfg.horizon, kind=HorizonKind.FIXED, per_env=per_env)
    return replace(cfg, horizon=horizon)


def with_ahead(cfg: RunConfig, value: int, *, max_lag_steps: int) -> RunConfig:
    """Return a configuration that opens groups this many steps ahead."""
    scheduler = replace(cfg.scheduler, max_ahead_steps=value)
    return replace(
        cfg, scheduler=scheduler, learner=replace(cfg.learner, max_lag_steps=max_lag_steps)
    )


def num_engines(cfg: RunConfig) -> int:
    """Return the number of simulated engines. Each takes part in the run as an actor of its own."""
    return cfg.simulator.num_actors or cfg.actor.num_actors * cfg.actor.engines_per_process


def with_actors(cfg: RunConfig, value: int) -> RunConfig:
    return replace(cfg, simulator=replace(cfg.simulator, num_actors=value))


def with_size(cfg: RunConfig, value: int) -> RunConfig:
    """Return a configuration with groups of this size and about as many episodes per step."""
    groups = cfg.groups
    per_step = groups.per_step * groups.size // value
    min_size = max(2, round(groups.min_size * value / groups.size))
    return replace(cfg, groups=replace(groups, size=value, per_step=per_step, min_size=min_size))
