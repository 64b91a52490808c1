"""Options of the curriculum: tasks, their mixture, and the growth of horizon and distance."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from omegaconf import MISSING

from common.config.knobs import ENV_NAME, NAME, Contradiction, knob
from common.ids import distance_of, subset_at

MAX_TURNS = 100_000
MAX_STAGE = 8_000_000  # Largest stage in any unit; no message can hold an episode of more tokens.


class HorizonKind(StrEnum):
    """Schedule of a horizon, or of the largest distance, over the run.

    fixed: always the last stage. stepwise: the next stage every `every_steps` steps. linear: from
    the first stage to the last over `over_steps` steps. gated: the next stage when the conditions
    of the section `gated` hold, one stage back if entropy or effective sample size collapses.
    """

    FIXED = "fixed"
    STEPWISE = "stepwise"
    LINEAR = "linear"
    GATED = "gated"


class HorizonUnit(StrEnum):
    """Unit of a horizon.

    turns: actions of the policy. tokens: tokens that the policy sampled in the episode; a turn
    that could exceed the horizon does not begin. seconds: time of generation and environment in
    the turns. Session setup, waits in a synchronous round and waits for new weights do not count.
    """

    TURNS = "turns"
    TOKENS = "tokens"
    SECONDS = "seconds"


class MixtureKind(StrEnum):
    """Probability with which a task is drawn.

    weights: in proportion to its weight. temperature: in proportion to its weight to the power of
    1 / mixture.temperature. adaptive: as temperature, times the learning potential 4 p (1 - p) of
    the task's recent success p.
    """

    WEIGHTS = "weights"
    TEMPERATURE = "temperature"
    ADAPTIVE = "adaptive"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSection:
    """One part of the training mixture."""

    env: str = knob(
        MISSING, 'Names the environment. Of "a|b" the first configured one is used.', form=ENV_NAME
    )
    subset: str = knob(MISSING, "Selects the subset of the environment's items.", form=NAME)
    weight: float = knob(1.0, "Sets the weight of the task relative to the other tasks.", ge=0)
    distance: list[int] = knob(
        [],
        "Selects items by the number of turns that their expert needs: [least, most]. [] selects "
        "all.",
        ge=1,
        le=MAX_TURNS,
    )

    def contradictions(self) -> Iterator[Contradiction]:
        if self.distance and (len(self.distance) != 2 or self.distance[0] > self.distance[1]):
            yield "distance", self.distance, "must be [least, most] in turns, or [] for all items"

    def items(self, bound: int = 0) -> str:
        """Return the name of its items: the subset, or a range of distances like "GoTo@4..8".

        Args:
            bound: largest distance that the curriculum currently allows; 0: no bound.
        """
        if not self.distance:
            return self.subset
        low, high = self.distance
        return subset_at(self.subset, low, min(high, bound or high))


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSection:
    """The mixture of the tasks. Evaluation always uses the plain weights."""

    kind: MixtureKind = knob(
        MixtureKind.WEIGHTS, "Selects the rule that decides how often each task is drawn."
    )
    temperature: float = knob(
        1.0,
        "With kind=temperature or adaptive, flattens the task weights. 1 keeps them, and a larger "
        "value makes them more even.",
        gt=0,
        le=1000,
    )
    floor: float = knob(
        0.1,
        "With kind=adaptive, sets the lower bound of the learning potential of a task or item. "
        "Without it, solved tasks would not be drawn.",
        gt=0,
        le=1,
    )
    memory_episodes: int = knob(
        256,
        "With kind=adaptive, averages a task's success over this many episodes.",
        ge=1,
        le=10**6,
    )

    def contradictions(self) -> Iterator[Contradiction]:
        if self.kind is MixtureKind.WEIGHTS and self.temperature != 1.0:
            law = "changes nothing with mixture.kind=weights; use temperature or adaptive"
            yield "temperature", self.temperature, law


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedSection:
    """Conditions of a gated horizon. All means are over the training steps of one stage."""

    window_steps: int = knob(
        40, "Measures truncated episodes and the slope of success over this many steps.", ge=2
    )
    min_steps: int = knob(
        40,
        "Keeps a stage for at least this many steps before the next stage may begin.",
        ge=2,
        must="be >= window_steps",
    )
    min_truncated_frac: float = knob(
        0.3,
        "Requires that the horizon truncates at least this share of the episodes before the next "
        "stage begins.",
        ge=0,
        le=1,
    )
    max_gain: float = knob(
        0.01,
        "Requires that mean success rose by at most this much over the window before the next "
        "stage begins.",
        ge=0,
    )
    backoff_steps: int = knob(
        5, "Measures a collapse of entropy or effective sample size over this many steps.", ge=1
    )
    entropy_frac: float = knob(
        0.3,
        "Goes back one stage if entropy falls below this share of its mean over the window before."
        " 0 turns it off.",
        ge=0,
        le=1,
    )
    ess_frac: float = knob(
        0.3,
        "Goes back one stage if the effective sample size falls below this share of the tokens. 0 "
        "turns it off.",
        ge=0,
        le=1,
    )


class CurriculumKind(StrEnum):
    """Quantity that grows over the run.

    horizon: the length of episodes, by the section `horizon`. distance: the distance of the items,
    by the section `curriculum.distance`, for tasks with a distance; the horizon is fixed at its
    last stage. both: each by its own section.
    """

    HORIZON = "horizon"
    DISTANCE = "distance"
    BOTH = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class DistanceGatedSection:
    """Conditions of a gated distance. All means are over the training steps of one stage."""

    window_steps: int = knob(20, "Measures success over this many steps.", ge=2)
    min_steps: int = knob(
        20,
        "Keeps a stage for at least this many steps before the next stage may begin.",
        ge=2,
        must="be >= window_steps",
    )
    min_success: float = knob(
        0.6,
        "Requires that at least this share of the episodes is solved before the next stage begins.",
        ge=0,
        le=1,
    )
    backoff_steps: int = knob(
        5, "Measures a collapse of entropy or effective sample size over this many steps.", ge=1
    )
    entropy_frac: float = knob(
        0.3,
        "Goes back one stage if entropy falls below this share of its mean over the window before."
        " 0 turns it off.",
        ge=0,
        le=1,
    )
    ess_frac: float = knob(
        0.3,
        "Goes back one stage if the effective sample size falls below this share of the tokens. 0 "
        "turns it off.",
        ge=0,
        le=1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HorizonOverride:
    """The horizon of one environment, or of one of its subsets.

    A subset inherits missing values from its environment, and an environment from `horizon`.
    """

    kind: str = knob(
        "",
        "Replaces horizon.kind for this environment. Empty keeps it.",
        one_of=tuple(HorizonKind),
        also="",
    )
    stages: list[int] = knob(
        [], "Replaces horizon.stages for this environment. [] keeps them.", ge=1, le=MAX_STAGE
    )
    every_steps: int = knob(
        0, "Replaces horizon.every_steps for this environment. 0 keeps it.", ge=0
    )
    over_steps: int = knob(0, "Replaces horizon.over_steps for this environment. 0 keeps it.", ge=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HorizonPolicy:
    """The complete schedule for one environment or subset."""

    kind: HorizonKind
    stages: tuple[int, ...]  # Strictly increasing values in the horizon's unit.
    every_steps: int
    over_steps: int
    gated: "GatedSection | DistanceGatedSection"

    def values(self) -> Sequence[int]:
        """Return every value that the schedule can produce."""
        first = -1 if self.kind is HorizonKind.FIXED else 0
        is_linear = self.kind is HorizonKind.LINEAR
        return range(self.stages[0], self.stages[-1] + 1) if is_linear else self.stages[first:]


class ActorLimits(Protocol):
    """The limits on turns and episodes in the actor's section."""

    @property
    def max_turn_tokens(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def turn_timeout_s(self) -> float: ...
    @property
    def episode_timeout_s(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HorizonSection:
    """The interaction horizon: the longest episode (ScalingInter-RL, arXiv 2509.08755)."""

    kind: HorizonKind = knob(HorizonKind.FIXED, "Selects how the horizon changes over the run.")
    unit: HorizonUnit = knob(
        HorizonUnit.TURNS,
        "Selects the unit of the horizon in training. In every unit, a turn that has begun is "
        "completed.",
    )
    stages: list[int] = knob(
        [20], "Lists the horizons of the stages, in the unit of the horizon.", ge=1, le=MAX_STAGE
    )
    every_steps: int = knob(
        100, "With kind=stepwise, begins the next stage after this many optimizer steps.", ge=1
    )
    over_steps: int = knob(
        200, "With kind=linear, reaches the last stage after this many optimizer steps.", ge=1
    )
    gated: GatedSection = field(default_factory=GatedSection)
    per_env: dict[str, HorizonOverride] = knob(
        {}, "Overrides the horizon of an environment, or of environment/subset."
    )

    def contradictions(self) -> Iterator[Contradiction]:
        for name in ("", *self.per_env):
            policy = self.policy(name)
            key = f"per_env.{name}." if name else ""
            stages = list(policy.stages)
            if not stages or any(a >= b for a, b in itertools.pairwise(stages)):
                law = f"must be positive, strictly increasing {self.unit.value}"
                yield f"{key}stages", stages, law
            if self.unit is HorizonUnit.TURNS and max(stages, default=0) > MAX_TURNS:
                law = f"with horizon.unit=turns, each must be in [1, {MAX_TURNS}]"
                yield f"{key}stages", stages, law
            if len(stages) < 2 and policy.kind in (HorizonKind.LINEAR, HorizonKind.GATED):
                law = f"horizon.{key}kind={policy.kind.value} needs two or more stages"
                yield f"{key}stages", stages, law

    def contradictions_of_unit(self, actor: ActorLimits) -> Iterator[Contradiction]:
        """Yield the stages in tokens or seconds that allow no turn, or that never take effect.

        A stage must end before the actor's timeout, with room for one turn. Otherwise the episode
        fails at the timeout instead of ending at its horizon.
        """
        turn_tokens = actor.max_turn_tokens
        max_tokens = actor.max_model_len
        max_s = actor.episode_timeout_s - actor.turn_timeout_s
        for name in ("", *self.per_env):
            key = f"horizon.{f'per_env.{name}.' if name else ''}stages"
            stages = self.policy(name).stages
            first = stages[0]
            last = stages[-1]
            if self.unit is HorizonUnit.TOKENS and not turn_tokens <= first <= last <= max_tokens:
                law = (
                    f"with horizon.unit=tokens, each must be at least"
                    f" actor.max_turn_tokens={turn_tokens} and at most"
                    f" actor.max_model_len={max_tokens}"
                )
                yield key, list(stages), law
            if self.unit is HorizonUnit.SECONDS and last > max_s:
                law = f"actor.episode_timeout_s - actor.turn_timeout_s = {max_s:g}"
                yield key, list(stages), f"with horizon.unit=seconds, each must be at most {law}"

    def name_of(self, env: str, subset: str) -> str:
        """Return the name of a subset's schedule: "environment/subset" or the environment."""
        far = distance_of(subset)
        own = f"{env}/{far[0] if far else subset}"
        return own if own in self.per_env else env

    def policy(self, name: str) -> HorizonPolicy:
        """Return the schedule of an environment or an "environment/subset"."""
        override = self.per_env.get(name) or HorizonOverride()
        of_env = self.per_env.get(name.partition("/")[0]) or HorizonOverride()
        return HorizonPolicy(
            kind=HorizonKind(override.kind or of_env.kind or self.kind),
            stages=tuple(override.stages or of_env.stages or self.stages),
            every_steps=override.every_steps or of_env.every_steps or self.every_steps,
            over_steps=override.over_steps or of_env.over_steps or self.over_steps,
            gated=self.gated,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DistanceSection:
    """Largest distance of the goals over the run, in turns that the expert needs.

    A stage contains a task's items from its least distance up to the stage's bound.
    """

    kind: HorizonKind = knob(
        HorizonKind.STEPWISE, "Selects how the largest distance changes over the run."
    )
    stages: list[int] = knob(
        [4, 8, 16, 32], "Lists the largest distances of the stages, in turns of the expert.", ge=1
    )
    every_steps: int = knob(
        50, "With kind=stepwise, begins the next stage after this many optimizer steps.", ge=1
    )
    over_steps: int = knob(
        200, "With kind=linear, reaches the last stage after this many optimizer steps.", ge=1
    )
    gated: DistanceGatedSection = field(default_factory=DistanceGatedSection)

    @property
    def policy(self) -> HorizonPolicy:
        """The schedule of all environments."""
        return HorizonPolicy(
            kind=self.kind,
            stages=tuple(self.stages),
            every_steps=self.every_steps,
            over_steps=self.over_steps,
            gated=self.gated,
        )

    def contradictions(self) -> Iterator[Contradiction]:
        if not self.stages or any(a >= b for a, b in itertools.pairwise(self.stages)):
            yield "stages", self.stages, "must be positive, strictly increasing turns"
        if len(self.stages) < 2 and self.kind in (HorizonKind.LINEAR, HorizonKind.GATED):
            law = f"curriculum.distance.kind={self.kind.value} needs two or more stages"
            yield "stages", self.stages, law


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumSection:
    """The growing quantity during training: the horizon, the distance of the goals, or both."""

    kind: CurriculumKind = knob(CurriculumKind.HORIZON, "Selects what grows over the run.")
    distance: DistanceSection = field(default_factory=DistanceSection)

    @property
    def has_distance(self) -> bool:
        """Whether distances grow."""
        return self.kind is not CurriculumKind.HORIZON

    def held(self, policy: HorizonPolicy) -> HorizonPolicy:
        """Return the schedule in effect: fixed at its last stage if only distances grow."""
        is_still = self.kind is CurriculumKind.DISTANCE
        return replace(policy, kind=HorizonKind.FIXED) if is_still else policy

    def warnings(self, horizon: "HorizonSection") -> list[str]:
        """Return a warning for each growing horizon that the curriculum keeps fixed."""
        why = "has no effect: curriculum.kind=distance fixes the horizon at its last stage"
        return [
            f"warning: horizon.{f'per_env.{name}.' if name else ''}kind={kind.value} {why}"
            for name in ("", *horizon.per_env)
            if (kind := horizon.policy(name).kind) is not self.held(horizon.policy(name)).kind
        ]

    def bounds(self) -> Sequence[int]:
        """Return the possible bounds on the distance; (0,) without a distance curriculum."""
        return self.distance.policy.values() if self.has_distance else (0,)

    def contradictions_of(self, tasks: Sequence[TaskSection]) -> Iterator[Contradiction]:
        """Yield the reasons why the curriculum does not fit the tasks, or has no effect."""
        if not self.has_distance:
            if self.distance != DistanceSection():
                law = "has no effect with curriculum.kind=horizon; use distance or both"
                yield "curriculum.distance", self.distance.kind.value, law
            return
        far = [task for task in tasks if task.distance]
        if not far:
            law = "needs a task with a distance, such as {env: e, subset: s, distance: [4, 32]}"
            yield "curriculum.kind", self.kind.value, law
        for task in far:
            first = self.bounds()[0]
            if first < task.distance[0]:
                law = f"the first stage must be at least {task.distance[0]}, the least distance of"
                law += f" {task.subset}"
                yield "curriculum.distance.stages", self.distance.stages, law


def are_apart(one: TaskSection, other: TaskSection) -> bool:
    """Return whether both tasks have distances, and the ranges do not overlap."""
    ranges = sorted([one.distance, other.distance])
    return bool(ranges[0]) and ranges[0][1] < ranges[1][0]


def subsets_in_use(curriculum: CurriculumSection, tasks: Sequence[TaskSection]) -> list[str]:
    """Return "env/items" of each task with a distance: for its whole range and for each stage."""
    names = (
        f"{task.env}/{task.items(bound)}"
        for task in tasks
        if task.distance
        for bound in (0, *curriculum.bounds())
    )
    return list(dict.fromkeys(names))


def why_not_far(task: TaskSection, known: Mapping[str, Mapping[int, int]], items: str) -> str:
    """Return why a task has no items at a distance; "" if it has some.

    Args:
        known: split -> expert's turns -> number of items; {} without an expert.
        items: name of the range as in `subsets_in_use`, without the environment.
    """
    _, low, high = distance_of(items) or ("", 0, 0)
    lengths = known.get("train", {})
    if any(low <= turns <= high for turns in lengths):
        return ""
    if not lengths:
        return f"the environment {task.env} has no expert, so its items have no distance"
    shown = ", ".join(f"{turns} ({num})" for turns, num in sorted(lengths.items()))
    return f"no training item of {task.subset} has this distance; turns (items): {shown}"


def contradictions_of_tasks(
    horizon: HorizonSection, curriculum: CurriculumSection, tasks: Sequence[TaskSection]
) -> Iterator[Contradiction]:
    """Yield the reasons why the tasks cannot be mixed, and overrides that match no task."""
    yield from curriculum.contradictions_of(tasks)
    if not tasks:
        return
    total = sum(task.weight for task in tasks)
    if total == 0:
        yield "tasks", total, "the weights must not sum to zero"
    names = [f"{task.env}/{task.subset}" for task in tasks]
    for (name, one), (other, two) in itertools.combinations(zip(names, tasks, strict=True), 2):
        if name == other and not are_apart(one, two):
            yield "tasks", name, "is listed twice; use one entry with the sum of the weights"
    envs = sorted({task.env for task in tasks})
    for name in horizon.per_env:
        what, known = ("subset", sorted(names)) if "/" in name else ("environment", envs)
        if name not in known:
            law = f"no task has this {what}; the tasks have {known}"
            yield f"horizon.per_env.{name}", name, law
