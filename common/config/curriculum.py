"""Options of the curriculum: the tasks, how they are mixed, and how long episodes may be."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from omegaconf import MISSING

from common.config.knobs import ENV_NAME, NAME, Contradiction, knob

MAX_TURNS = 100_000


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSection:
    """One part of the training mixture."""

    env: str = knob(MISSING, "its name; of a|b the first that is configured", form=ENV_NAME)
    subset: str = knob(MISSING, "which of the environment's items", form=NAME)
    weight: float = knob(1.0, "relative to the other tasks", ge=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSection:
    """How the tasks are mixed. Evaluation always follows the plain weights."""

    kind: MixtureKind = knob(MixtureKind.WEIGHTS, "what decides how often a task is drawn")
    temperature: float = knob(1.0, "1: the weights; the larger, the more even", gt=0, le=1000)
    floor: float = knob(0.1, "adaptive: least worth of a task or item, of at most 1", gt=0, le=1)
    memory_episodes: int = knob(
        256, "adaptive: over which the success of a task is averaged", ge=1, le=10**6
    )

    def contradictions(self) -> Iterator[Contradiction]:
        if self.kind is MixtureKind.WEIGHTS and self.temperature != 1.0:
            law = "changes nothing with mixture.kind=weights; use temperature or adaptive"
            yield "temperature", self.temperature, law


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedSection:
    """When a gated horizon moves. All means are over the training steps of one stage."""

    window_steps: int = knob(40, "over which cut episodes and success's slope are measured", ge=2)
    min_steps: int = knob(40, "in a stage before it may advance", ge=2, must="be >= window_steps")
    min_truncated_frac: float = knob(0.2, "of episodes cut, needed to advance", ge=0, le=1)
    max_gain: float = knob(0.03, "and success changes by at most this over the window", ge=0)
    backoff_steps: int = knob(5, "over which a collapse is measured", ge=1)
    entropy_frac: float = knob(0.3, "of the window before; below it back off; 0: off", ge=0, le=1)
    ess_frac: float = knob(0.3, "or the effective sample size below this share; 0: off", ge=0, le=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class HorizonOverride:
    """The horizon of one environment, or of one of its subsets.

    What is not given is as the environment's, and what that does not give is as in `horizon`.
    """

    kind: str = knob("", '"": not given', one_of=tuple(HorizonKind), also="")
    stages: list[int] = knob([], "[]: not given", ge=1, le=MAX_TURNS)
    every_steps: int = knob(0, "0: not given", ge=0)
    over_steps: int = knob(0, "0: not given", ge=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HorizonPolicy:
    """What holds for one environment or subset, nothing left open."""

    kind: HorizonKind
    stages: tuple[int, ...]  # turns, strictly increasing
    every_steps: int
    over_steps: int
    gated: GatedSection


@dataclass(frozen=True, slots=True, kw_only=True)
class HorizonSection:
    """The interaction horizon: the most turns of an episode (ScalingInter-RL, arXiv 2509.08755)."""

    kind: HorizonKind = knob(HorizonKind.FIXED, "how it changes over the run")
    stages: list[int] = knob([20], "turns; fixed uses the last", ge=1, le=MAX_TURNS)
    every_steps: int = knob(100, "stepwise: optimizer steps per stage", ge=1)
    over_steps: int = knob(200, "linear: optimizer steps from the first stage to the last", ge=1)
    gated: GatedSection = field(default_factory=GatedSection)
    per_env: dict[str, HorizonOverride] = knob({}, "by environment, or environment/subset")

    def contradictions(self) -> Iterator[Contradiction]:
        for name in ("", *self.per_env):
            policy, key = self.policy(name), f"per_env.{name}." if name else ""
            stages = list(policy.stages)
            if not stages or any(a >= b for a, b in itertools.pairwise(stages)):
                yield f"{key}stages", stages, "positive turns, strictly increasing"
            if len(stages) < 2 and policy.kind in (HorizonKind.LINEAR, HorizonKind.GATED):
                law = f"horizon.{key}kind={policy.kind.value} needs two or more"
                yield f"{key}stages", stages, law

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


def contradictions_of_tasks(
    horizon: HorizonSection, tasks: Sequence[TaskSection]
) -> Iterator[Contradiction]:
    """Yield why the tasks cannot be mixed, or which override belongs to none of them."""
    if not tasks:
        return
    total = sum(task.weight for task in tasks)
    if total == 0:
        yield "tasks", total, "the weights must not sum to zero"
    names = [f"{task.env}/{task.subset}" for task in tasks]
    for name in names:
        if names.count(name) > 1:
            yield "tasks", name, "is there twice; add the weights up in one entry"
    envs = sorted({task.env for task in tasks})
    for name in horizon.per_env:
        what, known = ("subset", sorted(names)) if "/" in name else ("environment", envs)
        if name not in known:
            law = f"no task is of this {what}; the tasks are of {known}"
            yield f"horizon.per_env.{name}", name, law
