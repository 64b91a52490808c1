"""Warns when no training group has had signal for a minute, so there is nothing to train on."""

import logging
from dataclasses import dataclass, field

from common.text import counted
from common.wire.messages import USER_FILTER, Outcome, Outcomes
from scheduler.state import VOLATILE

logger = logging.getLogger(__name__)

WARN_AFTER_S = 60.0
MIN_GROUPS = 4  # Consecutive groups without signal before a warning: fewer may be chance.
SOLVED = 0.5  # Mean success above which groups have no signal because all members succeed.


@dataclass(slots=True)
class SignalWatch:
    """Counts complete training groups without signal since the last one that had some.

    If all members of a group have the same reward, there is nothing to compare. While every group
    is like this, the learner gets no batch.

    Example: groups without signal are complete at 10 s, 20 s, 30 s and 70 s -> a warning at 70 s. A
    group with signal at 80 s -> the warning ends and the count starts again at zero.
    """

    # Time of the core's clock at which the first group without signal was complete.
    since: float | None = field(default=None, metadata=VOLATILE)
    num_groups: int = field(default=0, metadata=VOLATILE)
    # Groups of them that the filter of the user left out.
    num_by_user: int = field(default=0, metadata=VOLATILE)
    is_logged: bool = field(default=False, metadata=VOLATILE)

    def see(self, message: Outcomes, now: float) -> None:
        """Count the groups that a report declares complete."""
        filtered = {
            report.episode_id.rpartition("/")[0]
            for report in message.outcomes
            if report.outcome is Outcome.FILTERED
        }
        if any(group.is_ready for group in message.groups):
            self.since = None
            self.num_groups = self.num_by_user = 0
            self.is_logged = False
        elif filtered:
            self.since = now if self.since is None else self.since
            self.num_groups += len(filtered)
            self.num_by_user += len(
                {
                    report.episode_id.rpartition("/")[0]
                    for report in message.outcomes
                    if report.cause == USER_FILTER
                }
            )

    def notice(self, now: float, success: float | None) -> str:
        """Return the problem and its remedies; "" if there is no problem.

        Args:
            success: mean of the training episodes; None: not known.
        """
        if self.since is None or self.num_groups < MIN_GROUPS or now - self.since < WARN_AFTER_S:
            return ""
        if self.num_by_user:
            return (
                f"No group was trained for {now - self.since:.0f} s: groups.filter left out"
                f" {self.num_by_user} of {counted(self.num_groups, 'group')}. Let it keep others."
            )
        suffix = "" if success is None else f", success {success:.2f}"
        problem = (
            f"No group had signal for {now - self.since:.0f} s: in"
            f" {counted(self.num_groups, 'group')} all returns are equal{suffix}. There is nothing"
            " to train on."
        )
        if success is not None and success > SOLVED:
            return f"{problem} The tasks are solved. Use harder items, or end the run."
        return f"{problem} Warm-start with `sft`, widen the horizon, or use easier items."

    def log(self, now: float, success: float | None) -> None:
        """Log the warning once, until a group has signal again."""
        if not self.is_logged and (notice := self.notice(now, success)):
            self.is_logged = True
            logger.warning("%s", notice)
