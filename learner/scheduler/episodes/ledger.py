"""The books: every issued episode ends in exactly one outcome, or is in flight. Nothing is lost."""

from collections import Counter
from typing import Any

from common.errors import LedgerError
from common.wire.messages import Outcome

EVALUATED = "evaluated"
FAILED = Outcome.FAILED.value
TRAIN_OUTCOMES = tuple(outcome.value for outcome in Outcome)
EVAL_OUTCOMES = (EVALUATED, FAILED)


class Account:
    """Counts of one kind of episode. `in flight` is not kept here: the table of episodes says it,
    so that issued - settled - in flight is a real check."""

    def __init__(self, outcomes: tuple[str, ...]) -> None:
        self.issued = 0
        self.reissued = 0
        self.settled: dict[str, int] = dict.fromkeys(outcomes, 0)
        self.causes: Counter[str] = Counter()

    def settle(self, outcome: str, cause: str) -> None:
        """Book one outcome."""
        self.settled[outcome] += 1
        if cause:
            self.causes[f"{outcome}:{cause}"] += 1

    def take_back(self, outcome: str, cause: str) -> None:
        """Undo `settle`: the learner knows better than the scheduler's guess."""
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

    def snapshot(self) -> dict[str, Any]:
        """Return the exact state as JSON."""
        return {
            "issued": self.issued,
            "reissued": self.reissued,
            "settled": dict(self.settled),
            "causes": dict(self.causes),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over the state of `snapshot`."""
        self.issued = state["issued"]
        self.reissued = state["reissued"]
        self.settled = dict(state["settled"])
        self.causes = Counter(state["causes"])


class Ledger:
    """The account of training episodes and, apart from it, that of evaluation episodes."""

    def __init__(self) -> None:
        self.train = Account(TRAIN_OUTCOMES)
        self.eval = Account(EVAL_OUTCOMES)
        self.num_duplicates = 0  # trajectories that the learner discarded
        self.num_unknown = 0  # reports of episodes that are not in the books, e.g. after a rollback

    def assert_balanced(self, *, train_in_flight: int, eval_in_flight: int) -> None:
        """Raises: LedgerError: names the account, its counts and the difference."""
        for name, account, in_flight in (
            ("train", self.train, train_in_flight),
            ("eval", self.eval, eval_in_flight),
        ):
            lost = account.num_lost(in_flight)
            if lost != 0:
                raise LedgerError(
                    f"{name} ledger: issued {account.issued} != settled {account.settled}"
                    f" + in flight {in_flight}; difference {lost}"
                )

    def report(self, *, train_in_flight: int, eval_in_flight: int) -> dict[str, Any]:
        """Return what ledger.json holds."""
        return {
            **self.train.report(train_in_flight),
            "duplicates_discarded": self.num_duplicates,
            "unknown_reports": self.num_unknown,
            "eval": self.eval.report(eval_in_flight),
        }

    def snapshot(self) -> dict[str, Any]:
        """Return the exact state as JSON."""
        return {
            "train": self.train.snapshot(),
            "eval": self.eval.snapshot(),
            "num_duplicates": self.num_duplicates,
            "num_unknown": self.num_unknown,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over the state of `snapshot`."""
        self.train.restore(state["train"])
        self.eval.restore(state["eval"])
        self.num_duplicates = state["num_duplicates"]
        self.num_unknown = state["num_unknown"]
