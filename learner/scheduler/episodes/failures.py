"""The share of the last episodes that failed by infrastructure; too many end the run."""

from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial

from common.errors import LongstrideError
from learner.scheduler.state import FIXED, VOLATILE

WINDOW = 200  # episodes over which the share is taken
MIN_WINDOW = 50  # episodes before it says anything


@dataclass(slots=True)
class FailureWindow:
    """Causes of the last failures. A restart of the scheduler forgives them."""

    max_frac: float = field(metadata=FIXED)  # of the window
    causes: deque[str] = field(  # "": no failure
        default_factory=partial(deque[str], maxlen=WINDOW), metadata=VOLATILE
    )

    def add(self, cause: str) -> None:
        """Count an episode. Raises: LongstrideError: too many failed; names the causes."""
        self.causes.append(cause)
        failed = Counter(each for each in self.causes if each)
        num_failed, num = failed.total(), len(self.causes)
        if num >= MIN_WINDOW and num_failed > self.max_frac * num:
            raise LongstrideError(
                f"{num_failed} of the last {num} episodes failed by infrastructure, more than"
                f" scheduler.max_failed_frac={self.max_frac:g}: {dict(failed)}"
            )
