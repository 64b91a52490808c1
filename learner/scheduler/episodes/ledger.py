"""The ledger: every issued episode ends in exactly one outcome, or is in flight. None is lost."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from common.errors import LedgerError, LongstrideError
from common.wire.messages import EpisodeKind, Outcome
from learner.scheduler.state import FIXED, VOLATILE

WINDOW = 200  # episodes over which the share of failures is taken
MIN_WINDOW = 50  # episodes before it says anything
BURST_S = 10.0  # between two failures of one outage at most
OUTAGE_S = 120.0  # longer than a hub, or a machine, takes to come back
EVALUATED = "evaluated"
FAILED = Outcome.FAILED.value
TRAIN_OUTCOMES = tuple(outcome.value for outcome in Outcome)
EVAL_OUTCOMES = (EVALUATED, FAILED)


@dataclass(slots=True)
class Account:
    """Counts of one kind of episode. `in flight` is not kept here: the table of episodes says it,
    so that issued - settled - in flight is a real check."""

    settled: dict[str, int]  # by outcome
    issued: int = 0
    reissued: int = 0
    causes: Counter[str] = field(default_factory=Counter[str])

    def settle(self, outcome: str, cause: str) -> None:
        """Book one outcome."""
        self.settled[outcome] += 1
        if cause:
            self.causes[f"{outcome}:{cause}"] += 1

    def take_back(self, outcome: str, cause: str) -> None:
        """Undo `settle`: the learner reports another outcome than was booked provisionally."""
        self.settled[outcome] -= 1
        if cause:
            self.causes[f"{outcome}:{cause}"] -= 1
            self.causes += Counter()  # drops the zeros

    def num_lost(self, in_flight: int) -> int:
        """Issued episodes that are neither settled nor in flight."""
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
    """The account of training episodes and, apart from it, that of evaluation episodes."""

    train: Account = field(default_factory=lambda: Account(dict.fromkeys(TRAIN_OUTCOMES, 0)))
    eval: Account = field(default_factory=lambda: Account(dict.fromkeys(EVAL_OUTCOMES, 0)))
    num_duplicates: int = 0  # trajectories that the learner discarded
    num_unknown: int = 0  # reports of episodes that were never issued, e.g. after
    # a rollback, and those of another outcome for one that was trained on

    def assert_balanced(self, in_flight: Mapping[EpisodeKind, int]) -> None:
        """Raises: LedgerError: names the account, its counts and the difference."""
        for kind, account in ((EpisodeKind.TRAIN, self.train), (EpisodeKind.EVAL, self.eval)):
            lost = account.num_lost(in_flight[kind])
            if lost != 0:
                raise LedgerError(
                    f"{kind} ledger: issued {account.issued} != settled {account.settled}"
                    f" + in flight {in_flight[kind]}; difference {lost}"
                )

    def report(self, in_flight: Mapping[EpisodeKind, int]) -> dict[str, Any]:
        """Return what ledger.json holds."""
        return {
            **self.train.report(in_flight[EpisodeKind.TRAIN]),
            "duplicates_discarded": self.num_duplicates,
            "unknown_reports": self.num_unknown,
            "eval": self.eval.report(in_flight[EpisodeKind.EVAL]),
        }


@dataclass(slots=True)
class FailureWindow:
    """Causes of the last failures, those of one outage as one. A restart forgives them.

    Failures less than `BURST_S` apart are an outage: a hub that dies takes all of its episodes
    with it, which says nothing about those that follow. One that goes on for `OUTAGE_S` is judged
    by its own episodes.

    Example: 118 episodes fail within a second, the next ones end well -> one failure. Every second
    one fails for two minutes -> `check` raises.
    """

    max_frac: float = field(metadata=FIXED)  # of the window
    now: float = field(default=0.0, metadata=VOLATILE)  # core's clock
    causes: deque[str] = field(  # "": no failure
        default_factory=partial(deque[str], maxlen=WINDOW), metadata=VOLATILE
    )
    began_at: float = field(default=0.0, metadata=VOLATILE)  # of the last outage: first failure
    failed_at: float = field(default=-BURST_S, metadata=VOLATILE)  # and last
    outage: Counter[str] = field(  # its episodes, by cause
        default_factory=Counter[str], metadata=VOLATILE
    )

    def add(self, cause: str) -> None:
        """Count an episode."""
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
        """Raises: LongstrideError: too many failed; names the causes."""
        self._judge(Counter(self.causes), f"of the last {len(self.causes)}")
        lasted_s = self.failed_at - self.began_at
        if lasted_s >= OUTAGE_S:
            num = self.outage.total()
            self._judge(self.outage, f"of {num} in an outage of {lasted_s:.0f}s")

    def _judge(self, counts: Counter[str], which: str) -> None:
        failed = {cause: num for cause, num in counts.items() if cause}
        num, num_failed = counts.total(), sum(failed.values())
        if num >= MIN_WINDOW and num_failed > self.max_frac * num:
            raise LongstrideError(
                f"{num_failed} {which} episodes failed by infrastructure, more than"
                f" scheduler.max_failed_frac={self.max_frac:g}: {failed}"
            )
