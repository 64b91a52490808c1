"""The section `mixture`: how often each task is drawn."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from common.config.knobs import Contradiction, knob


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
