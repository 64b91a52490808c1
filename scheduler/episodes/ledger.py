"""The ledger: every issued episode ends in exactly one outcome, or is in flight. None is lost."""

import logging
import math
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from common.errors import PASSING, EpisodesFailed, LedgerError
from common.text import counted, kind_of
from common.wire.messages import EndReason, EpisodeKind, Outcome
from scheduler.state import FIXED, VOLATILE

logger = logging.getLogger(__name__)

WINDOW = 200  # Episodes over which the share of failures is computed.
MIN_WINDOW = 50  # Episodes before the share of failures is checked.
MIN_ALL = 16  # The same if all of them failed.
MAX_KINDS = 50  # Kinds of failures that are counted apart.
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


@dataclass(slots=True, kw_only=True)
class FailureKind:
    """Failures whose errors differ only in numbers."""

    cause: str  # End reason of the episodes.
    error: str  # Error of the first one.
    num: int = 1


@dataclass(slots=True)
class FailureKinds:
    """The failures since the start of the run by kind; the first of each kind is logged at once.

    Later ones are logged at 10, 100, 1,000 and so on, with their number.
    """

    kinds: dict[str, FailureKind] = field(default_factory=dict[str, FailureKind], metadata=VOLATILE)

    def add(self, cause: str, error: str) -> None:
        """Count a failed episode."""
        error = " ".join(error.split())
        name = kind_of(f"{cause}: {error}")
        if name not in self.kinds and len(self.kinds) >= MAX_KINDS:
            cause, error, name = "others", "further kinds of errors are not listed", "others"
        kind = self.kinds.get(name)
        if kind is None:
            self.kinds[name] = FailureKind(cause=cause, error=error)
            logger.warning("episodes fail cause=%s error=%s", cause, error)
            return
        kind.num += 1
        if math.log10(kind.num).is_integer():
            logger.warning("episodes fail num=%d cause=%s error=%s", kind.num, cause, kind.error)

    def report(self) -> list[dict[str, Any]]:
        """Return the kinds for status.json, the most frequent first."""
        return [asdict(kind) for kind in sorted(self.kinds.values(), key=lambda each: -each.num)]

    def most_frequent(self) -> str:
        """Return the error of the most frequent kind; "" without failures."""
        return max(self.kinds.values(), key=lambda each: each.num).error if self.kinds else ""


@dataclass(slots=True)
class FailureWindow:
    """Causes of the most recent failures; the episodes that one outage ends count as one failure.

    A hub that dies fails all of its episodes, which predicts nothing about later ones. So failures
    less than `BURST_S` apart are one outage, with two exceptions. An episode that began after the
    outage did was not ended by the same event, and counts by itself. It does not if its error
    passes without a change of the run, such as a refused connection or a timeout: an outage
    of these errors is checked once it has lasted `OUTAGE_S`.

    A new start of the run clears the window, a restart of this process does not.

    Example: 118 episodes fail within a second, the next ones end well -> one failure. The first 16
    episodes fail with an error of the reward, each started later -> `check` raises. Every second
    episode times out for two minutes -> `check` raises.
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

    def add(self, cause: str, *, error: str = "", started_at: float | None = None) -> None:
        """Count an episode.

        Args:
            cause: its end reason or why its lease was lost; "" if it did not fail.
            error: the error that ended it.
            started_at: time of its start; None: unknown.
        """
        is_going_on = self.now - self.failed_at < BURST_S
        if cause and not is_going_on:
            self.began_at = self.now
            self.outage.clear()
        is_later = started_at is not None and started_at >= self.began_at
        is_own = bool(error) and is_later and not is_passing(cause, error)
        if not cause or not is_going_on or is_own:
            self.causes.append(cause)
        if cause:
            self.failed_at = self.now
        self.outage[cause] += 1

    def withdraw(self) -> None:
        """Remove an episode that was counted as one without a failure."""
        with suppress(ValueError):  # It has left the window.
            self.causes.remove("")
        if self.outage[""]:
            self.outage[""] -= 1

    def check(self, *, example: str = "") -> None:
        """Check the share of failed episodes.

        Args:
            example: error of failed episodes, for the message.

        Raises: EpisodesFailed: too many episodes failed; names the causes.
        """
        which = f"of the last {counted(len(self.causes), 'episode')}"
        self._check_share(Counter(self.causes), which, example)
        lasted_s = self.failed_at - self.began_at
        if lasted_s >= OUTAGE_S:
            which = f"of {self.outage.total()} episodes in an outage of {lasted_s:.0f} s"
            self._check_share(self.outage, which, example)

    def _check_share(self, counts: Counter[str], which: str, example: str) -> None:
        """Raise EpisodesFailed if too large a share of the episodes has failed."""
        failed = {cause: num for cause, num in counts.items() if cause}
        num = counts.total()
        num_failed = sum(failed.values())
        least = MIN_ALL if num_failed == num else MIN_WINDOW
        if num >= least and num_failed > self.max_frac * num:
            error = f" The most frequent error: {example}" if example else ""
            raise EpisodesFailed(
                f"{num_failed} {which} failed by infrastructure, more than"
                f" scheduler.max_failed_frac={self.max_frac:g}. Causes: {failed}.{error}"
            )


def is_passing(cause: str, error: str) -> bool:
    """Return whether a failure may pass without a change of the run: a lost peer, or a timeout."""
    is_late = cause in (EndReason.ENV_TIMEOUT, EndReason.DEADLINE)
    return is_late or PASSING.search(error) is not None
