"""The keys of the command `eval`, and its configuration."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from actor.policy import PolicyConfig
from common.config.eval import EvalSection, EvalSplit
from common.config.knobs import Contradiction, knob


class EvalItems(StrEnum):
    """Held-out items of the command `eval`.

    spread: the first items of each configured subset, by the tasks' weights. tasks: the test lists
    of the catalogue's tasks; the configured subsets must be among them. paper: the layout of
    AgentGym-RL's Tables 1 to 5, with the number of turns of its evaluation. For tasks and paper,
    all items are used, unless the command line also sets `eval.num_items`.
    """

    SPREAD = "spread"
    TASKS = "tasks"
    PAPER = "paper"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions(EvalSection):
    """Held-out evaluation, always with the full horizon."""

    k: int = knob(1, "Samples each item this many times with the command `eval`.", ge=1, le=4096)
    items: EvalItems = knob(EvalItems.SPREAD, "Selects the held-out items of the command `eval`.")
    label: str = knob(
        "", "Names the row of the command `eval` in its table. Empty uses the model's name."
    )
    max_failed_frac: float = knob(
        0.05,
        "Limits the share of failed episodes of the command `eval`. Above it the exit code is 1.",
        ge=0,
        le=1,
    )

    def contradictions(self) -> Iterator[Contradiction]:
        if self.split is EvalSplit.VALIDATION and self.items is not EvalItems.SPREAD:
            yield "split", self.split, f"eval.items={self.items} lists test items; use spread"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig(PolicyConfig):
    """The configuration of `eval`."""

    eval: EvalOptions = field(default_factory=EvalOptions)
