"""The section `eval`: held-out evaluation."""

from dataclasses import dataclass
from enum import StrEnum

from common.config.knobs import knob


class EvalSplit(StrEnum):
    """Held-out items of an evaluation.

    test: items for the published figure. validation: items on which settings are chosen. A figure
    is free of that choice if the test items are played once, after it.
    """

    TEST = "test"
    VALIDATION = "validation"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSection:
    """Held-out evaluation, always with the full horizon."""

    num_items: int = knob(
        400,
        "Evaluates this many held-out items, spread over the tasks by weight. -1 means all.",
        ge=-1,
        le=10**6,
    )
    split: EvalSplit = knob(
        EvalSplit.TEST,
        "Selects the held-out items. Choose settings on validation, and play test once at the end.",
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
