"""Options of the curriculum: the tasks, how they are mixed, and how long episodes may be."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from omegaconf import MISSING

from common.errors import ConfigError


def _require(condition: bool, key: str, value: object, law: str) -> None:
    if not condition:
        raise ConfigError(f"{key}={value!r}: {law}")


class HorizonKind(StrEnum):
    """How the most turns of an episode change over the run.

    fixed: always the last stage. stepwise: the next stage every `every_steps` steps. linear: from
    the first stage to the last over `over_steps` steps. gated: the next stage when too many
    episodes are cut and success stands still, one back when entropy or sample size collapses.
    """

    FIXED = "fixed"
    STEPWISE = "stepwise"
    LINEAR = "linear"
    GATED = "gated"


class MixtureKind(StrEnum):
    """What decides how often a task is drawn.

    weights: its weight. temperature: its weight to the power of 1 / `temperature`. adaptive: that
    times how much there is to learn from it, by its recent success.
    """

    WEIGHTS = "weights"
    TEMPERATURE = "temperature"
    ADAPTIVE = "adaptive"


@dataclass(slots=True, kw_only=True)
class TaskSection:
    """One part of the training mixture."""

    env: str = MISSING  # its name; of `webarena|minisites` the first that is configured
    subset: str = MISSING
    weight: float = 1.0  # relative to the other tasks

    def __post_init__(self) -> None:
        _require(self.weight >= 0, f"tasks[{self.subset}].weight", self.weight, "must be >= 0")


@dataclass(slots=True, kw_only=True)
class MixtureSection:
    """How the tasks are mixed. Evaluation always follows the plain weights."""

    kind: MixtureKind = MixtureKind.WEIGHTS
    temperature: float = 1.0  # 1: the weights; the larger, the more even
    floor: float = 0.1  # adaptive: least worth of a task or item, where the largest is 1
    memory_episodes: int = 256  # adaptive: over which the success of a task is averaged

    def __post_init__(self) -> None:
        _require(self.temperature > 0, "mixture.temperature", self.temperature, "must be > 0")
        is_used = self.kind is not MixtureKind.WEIGHTS or self.temperature == 1.0
        law = "changes nothing with mixture.kind=weights; use temperature or adaptive"
        _require(is_used, "mixture.temperature", self.temperature, law)
        _require(0 < self.floor <= 1, "mixture.floor", self.floor, "must be in (0, 1]")
        memory = self.memory_episodes
        _require(memory >= 1, "mixture.memory_episodes", memory, "must be >= 1")


@dataclass(slots=True, kw_only=True)
class GatedSection:
    """When a gated horizon moves. All means are over the training steps of one stage."""

    window_steps: int = 40  # over which cut episodes and the slope of success are measured
    min_steps: int = 40  # in a stage before it may advance
    min_truncated_frac: float = 0.2  # advance only if the horizon cuts at least so many episodes
    max_gain: float = 0.03  # and success changes by at most this over the window
    backoff_steps: int = 5  # over which a collapse is measured
    entropy_frac: float = 0.3  # back off if entropy falls below this share of the window before
    ess_frac: float = 0.3  # or the effective sample size below this share; 0 switches either off

    def __post_init__(self) -> None:
        law = "must be >= 2"
        _require(self.window_steps >= 2, "horizon.gated.window_steps", self.window_steps, law)
        law = "must be >= 1"
        _require(self.backoff_steps >= 1, "horizon.gated.backoff_steps", self.backoff_steps, law)
        law = f"must be >= horizon.gated.window_steps={self.window_steps}"
        is_long = self.min_steps >= self.window_steps
        _require(is_long, "horizon.gated.min_steps", self.min_steps, law)
        for name in ("min_truncated_frac", "entropy_frac", "ess_frac"):
            value: float = getattr(self, name)
            _require(0 <= value <= 1, f"horizon.gated.{name}", value, "must be in [0, 1]")
        _require(self.max_gain >= 0, "horizon.gated.max_gain", self.max_gain, "must be >= 0")


@dataclass(slots=True, kw_only=True)
class HorizonOverride:
    """The horizon of one environment, or of one of its subsets.

    What is not given is as the environment's, and what that does not give is as in `horizon`.
    """

    kind: str = ""  # "": not given; else one of the kinds of `horizon`
    stages: list[int] = field(default_factory=list[int])  # []: not given
    every_steps: int = 0  # 0: not given
    over_steps: int = 0  # 0: not given


@dataclass(frozen=True, slots=True, kw_only=True)
class HorizonPolicy:
    """What holds for one environment or subset, nothing left open."""

    kind: HorizonKind
    stages: tuple[int, ...]  # turns, strictly increasing
    every_steps: int
    over_steps: int
    gated: GatedSection


@dataclass(slots=True, kw_only=True)
class HorizonSection:
    """The interaction horizon: the most turns of an episode (ScalingInter-RL, arXiv 2509.08755)."""

    kind: HorizonKind = HorizonKind.FIXED
    stages: list[int] = field(default_factory=lambda: [20])  # turns; fixed uses the last
    every_steps: int = 100  # stepwise: optimizer steps per stage
    over_steps: int = 200  # linear: optimizer steps from the first stage to the last
    gated: GatedSection = field(default_factory=GatedSection)
    per_env: dict[str, HorizonOverride] = field(default_factory=dict[str, HorizonOverride])
    # by environment, or by "environment/subset"

    def __post_init__(self) -> None:
        _check_policy(self.policy(""), "horizon")
        for env, override in self.per_env.items():
            kinds = [kind.value for kind in HorizonKind]
            is_known = not override.kind or override.kind in kinds
            law = f"one of {', '.join(kinds)}"
            _require(is_known, f"horizon.per_env.{env}.kind", override.kind, law)
            _check_policy(self.policy(env), f"horizon.per_env.{env}")

    def name_of(self, env: str, subset: str) -> str:
        """Return whose horizon a subset follows: "environment/subset", or the environment."""
        own = f"{env}/{subset}"
        return own if own in self.per_env else env

    def policy(self, name: str) -> HorizonPolicy:
        """Return what holds for an environment, or an "environment/subset"."""
        override = self.per_env.get(name) or HorizonOverride()
        of_env = self.per_env.get(name.partition("/")[0]) or HorizonOverride()
        return HorizonPolicy(
            kind=HorizonKind(override.kind or of_env.kind or self.kind),
            stages=tuple(override.stages or of_env.stages or self.stages),
            every_steps=override.every_steps or of_env.every_steps or self.every_steps,
            over_steps=override.over_steps or of_env.over_steps or self.over_steps,
            gated=self.gated,
        )


def _check_policy(policy: HorizonPolicy, key: str) -> None:
    stages = list(policy.stages)
    is_increasing = all(a < b for a, b in itertools.pairwise(stages))
    is_valid = bool(stages) and is_increasing and stages[0] > 0
    _require(is_valid, f"{key}.stages", stages, "positive turns, strictly increasing")
    has_way = len(stages) > 1 or policy.kind not in (HorizonKind.LINEAR, HorizonKind.GATED)
    law = f"{key}.kind={policy.kind.value} needs two or more"
    _require(has_way, f"{key}.stages", stages, law)
    _require(policy.every_steps > 0, f"{key}.every_steps", policy.every_steps, "must be > 0")
    _require(policy.over_steps > 0, f"{key}.over_steps", policy.over_steps, "must be > 0")


def check_curriculum(horizon: HorizonSection, tasks: Sequence[TaskSection]) -> None:
    """Return if the tasks can be mixed and every override belongs to one of them.

    Raises:
        ConfigError: names the key and the value.
    """
    total = sum(task.weight for task in tasks)
    _require(not tasks or total > 0, "tasks", total, "the weights must not sum to zero")
    envs = sorted({task.env for task in tasks})
    subsets = sorted({f"{task.env}/{task.subset}" for task in tasks})
    for name in horizon.per_env:
        what, known = ("subset", subsets) if "/" in name else ("environment", envs)
        law = f"no task is of this {what}; the tasks are of {known}"
        _require(not tasks or name in known, f"horizon.per_env.{name}", name, law)
