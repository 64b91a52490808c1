"""The state of one AgentGym instance."""

import asyncio
from dataclasses import dataclass, field

from envhub.env import StepResult


class InstanceUnknown(LookupError):
    """No such instance: never created, closed, or expired."""


class NotReset(RuntimeError):
    """The instance has no episode yet."""


class EpisodeOver(RuntimeError):
    """The instance's episode has ended, and it takes no more steps."""

    def __init__(self, number: int) -> None:
        super().__init__(f"The task with environment {number} has finished.")


@dataclass(slots=True, kw_only=True, eq=False)
class ServedInstance:
    """One instance and its current episode; `session_id` is None between episodes.

    A suspended episode has no session either: repeating the actions of `performed` restores it.
    """

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    session_id: str | None = None
    item_id: str = ""  # "": there is no episode.
    performed: list[str] | None = None  # Actions so far; None: the episode cannot be suspended.
    first_observation: str = ""
    answer: StepResult | None = None
    reward: float = 0.0  # Reward of the last step, as reported.
    score: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.answer is not None and self.answer.done

    @property
    def holds_place(self) -> bool:
        """Whether it has a session, or has reserved one."""
        return self.session_id is not None or self.answer is None
