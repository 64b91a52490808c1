"""The section `curriculum`: the growing quantity during training."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from common.config.horizon import (
    HorizonKind,
    HorizonPolicy,
    HorizonSection,
    StageGate,
    shortest_stage,
)
from common.config.knobs import FUNCTION, Contradiction, knob
from common.config.tasks import TaskSection


class CurriculumKind(StrEnum):
    """Quantity that grows over the run.

    horizon: the length of episodes, by the section `horizon`. distance: the distance of the items,
    by the section `curriculum.distance`, for tasks with a distance; the horizon is fixed at its
    last stage. both: each by its own section. A function of your own chooses the item of each
    group; the horizon grows by the section `horizon`.
    """

    HORIZON = "horizon"
    DISTANCE = "distance"
    BOTH = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class DistanceGatedSection(StageGate):
    """Conditions of a gated distance. All means are over the training steps of one stage."""

    window_steps: int = knob(20, "Measures success over this many steps.", ge=2)
    min_steps: int = shortest_stage(20)
    min_success: float = knob(
        0.6,
        "Requires that at least this share of the episodes is solved before the next stage begins.",
        ge=0,
        le=1,
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

    kind: CurriculumKind | str = knob(
        CurriculumKind.HORIZON,
        "Selects what grows over the run, or names your own function, which chooses the items.",
        form=FUNCTION,
    )
    distance: DistanceSection = field(default_factory=DistanceSection)

    @property
    def has_distance(self) -> bool:
        """Whether distances grow."""
        return self.kind in (CurriculumKind.DISTANCE, CurriculumKind.BOTH)

    @property
    def is_of_user(self) -> bool:
        """Whether a function of the user chooses the items."""
        return ":" in self.kind

    def effective(self, policy: HorizonPolicy) -> HorizonPolicy:
        """Return the schedule in effect: fixed at its last stage if only distances grow."""
        is_still = self.kind is CurriculumKind.DISTANCE
        return replace(policy, kind=HorizonKind.FIXED) if is_still else policy

    def warnings(self, horizon: "HorizonSection") -> list[str]:
        """Return a warning for each growing horizon that the curriculum keeps fixed."""
        why = "has no effect: curriculum.kind=distance fixes the horizon at its last stage"
        return [
            f"warning: horizon.{f'per_env.{name}.' if name else ''}kind={kind!s} {why}"
            for name in ("", *horizon.per_env)
            if (kind := horizon.policy(name).kind) is not self.effective(horizon.policy(name)).kind
        ]

    def bounds(self) -> Sequence[int]:
        """Return the possible bounds on the distance; (0,) without a distance curriculum."""
        return self.distance.policy.values() if self.has_distance else (0,)

    def contradictions_of(self, tasks: Sequence[TaskSection]) -> Iterator[Contradiction]:
        """Yield the reasons why the curriculum does not fit the tasks, or has no effect."""
        if not self.has_distance:
            if self.distance != DistanceSection():
                law = f"has no effect with curriculum.kind={self.kind!s}; use distance or both"
                yield "curriculum.distance", self.distance.kind.value, law
            return
        far = [task for task in tasks if task.distance]
        if not far:
            law = "needs a task with a distance, such as {env: e, subset: s, distance: [4, 32]}"
            yield "curriculum.kind", str(self.kind), law
        for task in far:
            first = self.bounds()[0]
            if first < task.distance[0]:
                law = f"the first stage must be at least {task.distance[0]}, the least distance of"
                law += f" {task.subset}"
                yield "curriculum.distance.stages", self.distance.stages, law


def subsets_in_use(curriculum: CurriculumSection, tasks: Sequence[TaskSection]) -> list[str]:
    """Return "env/items" of each task with a distance: for its whole range and for each stage."""
    names = (
        f"{task.env}/{task.items(bound)}"
        for task in tasks
        if task.distance
        for bound in (0, *curriculum.bounds())
    )
    return list(dict.fromkeys(names))
