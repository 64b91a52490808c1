"""The ledger: every issued episode ends in exactly one outcome, or is in flight. None is lost."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from common.errors import LedgerError, LongstrideError
from common.wire.messages import EpisodeKind, Outcome
from learner.scheduler.state import FIXED, VOLATILE

WINDOW = 200  # Episodes over which the share of failures is computed.
MIN_WINDOW = 50  # Episodes before the share of failures is checked.
BURST_S = 10.0  # Most seconds between two failures of one outage.
OUTAGE_S = 120.0  # Seconds; longer than a hub or a machine needs to restart.
EVALUATED = "evaluated"
FAILED = Outcome.FAILED.value
TRAIN_OUTCOMES = tuple(outcome.value for outcome in Outcome)
EVAL_OUTCOMES = (EVALUATED, FAILED)


@dataclass(slots=True)
class EpisodeCounts:
    """Counts of one kind of episode.

    The number in flight is not stored here. The table of episodes counts it, so that the equation
    issued = settled + in flight is an independent check.
    """

    settled: dict[str, int]  # Number of settled episodes by outcome.
    issued: int = 0
    reissued: int = 0
    causes: Counter[str] = field(default_factory=Counter[str])

    def settle(self, outcome: str, cause: str) -> None:
        """Book one outcome."""
        self.settled[outcome] += 1
        if cause:
            self.causes[f"{outcome}:{cause}"] += 1

    def take_back(self, outcome: str, cause: str) -> None:
        """Undo `settle`: the learner reports another outcome than the provisional one."""
        self.settled[outcome] -= 1
        if cause:
            self.causes[f"{outcome}:{cause}"] -= 1
            self.causes += Counter()  # Removes entries of zero.

    def num_lost(self, in_flight: int) -> int:
        """Return the number of issued episodes that are neither settled nor in flight."""
        return self.issued - sum(self.settled.values()) - in_flight

    def report(self, in_flight: int) -> dict[str, Any]:
        """Return the counts as JSON."""
        return {
            "issued": self.issued,
            **self.settled,
            "in_flight": in_flight,
            "lost": self.num_lost(in_flight),
            "reissued": self.reissued,
            "causes": dict(self.causes),
        }


@dataclass(slots=True)
class Ledger:
    """The account of training episodes and, separately, the account of evaluation episodes."""

    train: EpisodeCounts = field(
        default_factory=lambda: EpisodeCounts(dict.fromkeys(TRAIN_OUTCOMES, 0))
    )
    eval: EpisodeCounts = field(
        default_factory=lambda: EpisodeCounts(dict.fromkeys(EVAL_OUTCOMES, 0))
    )
    num_duplicates: int = 0  # Trajectories that the learner discarded.
    # Reports of episodes that were never issued, e.g. after a rollback, and reports that change the
    # outcome of a trained episode.
    num_unknown: int = 0

    def assert_balanced(self, in_flight: Mapping[EpisodeKind, int]) -> None:
        """Check that no episode is lost or settled twice.

        Raises: LedgerError: names the account, its counts and the difference.
        """
        for kind, account in ((EpisodeKind.TRAIN, self.train), (EpisodeKind.EVAL, self.eval)):
            lost = account.num_lost(in_flight[kind])
            if lost != 0:
                raise LedgerError(
                    f"{kind} ledger: issued {account.issued} != settled {account.settled}"
                    f" + in flight {in_flight[kind]}; difference {lost}"
                )

    def report(self, in_flight: Mapping[EpisodeKind, int]) -> dict[str, Any]:
        """Return the content of ledger.json."""
        return {
            **self.train.report(in_flight[EpisodeKind.TRAIN]),
            "duplicates_discarded": self.num_duplicates,
            "unknown_reports": self.num_unknown,
            "eval": self.eval.report(in_flight[EpisodeKind.EVAL]),
        }


@dataclass(slots=True)
class FailureWindow:
    """Causes of the most recent failures; an outage counts as one failure. A restart clears them.

    Failures less than `BURST_S` apart are one outage. A hub that dies fails all of its episodes,
    which predicts nothing about later ones. An outage longer than `OUTAGE_S` is checked by the
    failure share of its own episodes.

    Example: 118 episodes fail within a second, the next ones end well -> one failure. Every second
    episode fails for two minutes -> `check` raises.
    """

    max_frac: float = field(metadata=FIXED)  # Largest allowed share of failures.
    now: float = field(default=0.0, metadata=VOLATILE)  # Time of the core's clock.
    causes: deque[str] = field(  # Cause of each episode; "" without a failure.
        default_factory=partial(deque[str], maxlen=WINDOW), metadata=VOLATILE
    )
    # Time of the first failure of the last outage.
    began_at: float = field(default=0.0, metadata=VOLATILE)
    failed_at: float = field(default=-BURST_S, metadata=VOLATILE)  # Time of the last failure.
    outage: Counter[str] = field(  # Episodes of the last outage, by cause.
        default_factory=Counter[str], metadata=VOLATILE
    )

    def add(self, cause: str) -> None:
        """Count an episode. `cause` is "" if it did not fail."""
        is_going_on = self.now - self.failed_at < BURST_S
        if cause and not is_going_on:
            self.began_at = self.now
            self.outage.clear()
        if not cause or not is_going_on:
            self.causes.append(cause)
        if cause:
            self.failed_at = self.now
        self.outage[cause] += 1

    def check(self) -> None:
        """Check the share of failed episodes.

        Raises: LongstrideError: too many episodes failed; names the causes.
        """
        self._check_share(Counter(self.causes), f"of the last {len(self.causes)} episodes")
        lasted_s = self.failed_at - self.began_at
        if lasted_s >= OUTAGE_S:
            num = self.outage.total()
            self._check_share(self.outage, f"of {num} episodes in an outage of {lasted_s:.0f} s")

    def _check_share(self, counts: Counter[str], which: str) -> None:
        """Raise LongstrideError if too large a share of the episodes has failed."""
        failed = {cause: num for cause, num in counts.items() if cause}
        num = counts.total()
        num_failed = sum(failed.values())
        if num >= MIN_WINDOW and num_failed > self.max_frac * num:
            raise LongstrideError(
                f"{num_failed} {which} failed by infrastructure, more than"
                f" scheduler.max_failed_frac={self.max_frac:g}. Causes: {failed}"
            )
