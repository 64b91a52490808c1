"""The section `train`: length of the training, and whether the roles overlap."""

from dataclasses import dataclass
from enum import StrEnum

from common.config.knobs import knob


class TrainMode(StrEnum):
    """Whether actors and learner work at the same time.

    async: the actors play while the learner trains. sync: the actors play a batch, then the
    learner trains on it and publishes its weights.
    """

    ASYNC = "async"
    SYNC = "sync"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSection:
    """Length of the training, and whether the roles overlap."""

    mode: TrainMode = knob(TrainMode.ASYNC, "Selects whether actors and learner overlap.")
    num_steps: int = knob(
        100, "Sets the number of optimizer steps, each of which makes a version.", ge=0
    )
