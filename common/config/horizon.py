"""The section `horizon`: the longest episode over the run."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from common.config.knobs import FUNCTION, Contradiction, knob
from common.ids import distance_of

MAX_TURNS = 100_000
MAX_STAGE = 8_000_000  # Largest stage in any unit; no message can hold an episode of more tokens.


class HorizonKind(StrEnum):
    """Schedule of a horizon, or of the largest distance, over the run.

    fixed: always the last stage. stepwise: the next stage every `every_steps` steps. linear: from
    the first stage to the last over `over_steps` steps. gated: the next stage when the conditions
    of the section `gated` hold, one stage back if entropy or effective sample size collapses. A
    function of your own chooses any horizon from the first stage to the last after each step.
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


def shortest_stage(default: int) -> int:
    """Declare the shortest stage of a gate."""
    return knob(
        default,
        "Keeps a stage for at least this many steps before the next stage may begin.",
        ge=2,
        must="be >= window_steps",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGate:
    """Conditions of both kinds of gates: the shortest stage, and the return to the stage before."""

    window_steps: int
    min_steps: int
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
class GatedSection(StageGate):
    """Conditions of a gated horizon. All means are over the training steps of one stage."""

    window_steps: int = knob(
        40, "Measures truncated episodes and the slope of success over this many steps.", ge=2
    )
    min_steps: int = shortest_stage(40)
    min_truncated_frac: float = knob(
        0.3,
        "Requires that the horizon truncates at least this share of the episodes before the next "
        "stage begins.",
        ge=0,
        le=1,
    )
    max_gain: float = knob(
        0.01,
        "Requires that mean success rose or fell by at most this much over the window before the "
        "next stage begins.",
        ge=0,
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

    kind: HorizonKind | str  # A text names a function of the user.
    stages: tuple[int, ...]  # Strictly increasing values in the horizon's unit.
    every_steps: int
    over_steps: int
    gated: StageGate

    @property
    def is_of_user(self) -> bool:
        """Whether a function of the user chooses the horizon."""
        return ":" in self.kind

    def values(self) -> Sequence[int]:
        """Return every value that the schedule can produce."""
        first = -1 if self.kind is HorizonKind.FIXED else 0
        has_all = self.kind is HorizonKind.LINEAR or self.is_of_user
        return range(self.stages[0], self.stages[-1] + 1) if has_all else self.stages[first:]


@dataclass(frozen=True, slots=True, kw_only=True)
class HorizonSection:
    """The interaction horizon: the longest episode (ScalingInter-RL, arXiv 2509.08755)."""

    kind: HorizonKind | str = knob(
        HorizonKind.FIXED,
        "Selects how the horizon changes over the run, or names your own function.",
        form=FUNCTION,
    )
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
            is_growing = policy.kind in (HorizonKind.LINEAR, HorizonKind.GATED)
            if len(stages) < 2 and (is_growing or policy.is_of_user):
                law = f"horizon.{key}kind={policy.kind!s} needs two or more stages"
                yield f"{key}stages", stages, law

    def name_of(self, env: str, subset: str) -> str:
        """Return the name of a subset's schedule: "environment/subset" or the environment."""
        far = distance_of(subset)
        of_subset = f"{env}/{far[0] if far else subset}"
        return of_subset if of_subset in self.per_env else env

    def entries_of(self, name: str, key: str) -> list[str]:
        """Return the places that may give a schedule its value of a key, the first with one last.

        A place is a name in `per_env`; "" is the section itself. Later places have no effect.
        """
        places: list[str] = []
        for place in dict.fromkeys((name, name.partition("/")[0], "")):
            places.append(place)
            if place in self.per_env and getattr(self.per_env[place], key):
                break
        return places

    def policy(self, name: str) -> HorizonPolicy:
        """Return the schedule of an environment or an "environment/subset"."""
        override = self.per_env.get(name) or HorizonOverride()
        of_env = self.per_env.get(name.partition("/")[0]) or HorizonOverride()
        return HorizonPolicy(
            kind=_kind_of(override.kind or of_env.kind or self.kind),
            stages=tuple(override.stages or of_env.stages or self.stages),
            every_steps=override.every_steps or of_env.every_steps or self.every_steps,
            over_steps=override.over_steps or of_env.over_steps or self.over_steps,
            gated=self.gated,
        )


def _kind_of(name: str) -> HorizonKind | str:
    """Return a kind by its name; a function of the user has its import path."""
    return name if ":" in name else HorizonKind(name)
