"""One of AgentGym's instances, and what can be said of it."""

import asyncio
from dataclasses import dataclass, field

from envhub.env import StepResult
from envhub.hosting.session import Session


class InstanceUnknown(LookupError):
    """No such instance: never made, closed, or its lease ran out."""


class NotReset(RuntimeError):
    """The instance has no episode yet."""


class EpisodeOver(RuntimeError):
    """The instance's episode has ended, and it takes no more steps."""

    def __init__(self, number: int) -> None:
        super().__init__(f"The task with environment {number} has finished.")


@dataclass(slots=True, kw_only=True, eq=False)
class Instance:
    """One instance and its present episode; `session_id` is None between episodes.

    An episode that was put aside has no session either: `performed` leads to where it was.
    """

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    session_id: str | None = None
    session: Session | None = None  # of that id, or of one before; for steps in one go
    item_id: str = ""  # "": there is no episode
    performed: list[str] | None = None  # actions so far; None: it cannot be put aside
    first_observation: str = ""
    answer: StepResult | None = None
    reward: float = 0.0  # of the last step, as it was told
    score: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.answer is not None and self.answer.done

    @property
    def holds_place(self) -> bool:
        """Whether it has a session, or is to have one that nobody else may take."""
        return self.session_id is not None or self.answer is None
