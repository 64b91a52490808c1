"""The section `eval`: held-out evaluation."""

from dataclasses import dataclass
from enum import StrEnum

from common.config.knobs import knob


class EvalItems(StrEnum):
    """Held-out items of the command `eval`.

    spread: the first items of each configured subset, by the tasks' weights. tasks: the test lists
    of the catalogue's tasks; the configured subsets must be among them. paper: the test sets of
    AgentGym-RL's Tables 1 to 5, with the number of turns of its evaluation. For tasks and paper,
    all items are used, unless the command line also sets `eval.num_items`.
    """

    SPREAD = "spread"
    TASKS = "tasks"
    PAPER = "paper"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSection:
    """Held-out evaluation, always with the full horizon."""

    num_items: int = knob(
        400,
        "Evaluates this many held-out items, spread over the tasks by weight. -1 means all.",
        ge=-1,
        le=10**6,
    )
    before: bool = knob(True, "Evaluates the first policy before training.")
    after: bool = knob(True, "Evaluates the last policy after training.")
    baselines: bool = knob(
        True, "Evaluates random valid play and the scripted expert on the same items."
    )
    every_steps: int = knob(
        0, "Evaluates during training every this many steps. 0 turns it off.", ge=0
    )
    stream_items: int = knob(
        128, "Plays this many held-out items in each evaluation during training.", ge=1, le=10**6
    )
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
