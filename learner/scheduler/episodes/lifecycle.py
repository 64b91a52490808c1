"""Table, queue, ledger and averages as one: every change of an episode goes through here.

The ledger's law holds between any two calls: issued = settled + in flight.
"""

import logging
from collections import Counter, deque
from typing import Any

from common.config.run_config import RunConfig
from common.errors import LedgerError, LongstrideError
from common.wire.ids import training_number
from common.wire.messages import (
    EpisodeKind,
    EpisodeOutcome,
    EpisodeSeen,
    GroupArrived,
    Outcome,
)
from learner.scheduler.curriculum.averages import SuccessAverages
from learner.scheduler.curriculum.catalogue import Catalogue
from learner.scheduler.curriculum.curriculum import Curriculum
from learner.scheduler.dispatch.pace import Pace
from learner.scheduler.episodes.audit import SelectionAudit
from learner.scheduler.episodes.leases import LeaseBook
from learner.scheduler.episodes.ledger import EVALUATED, FAILED, Account, Ledger
from learner.scheduler.episodes.table import (
    Episode,
    EpisodeState,
    Group,
    GroupState,
    GroupTable,
    Settled,
    episode_id_of,
)

logger = logging.getLogger(__name__)

FAILURE_WINDOW = 200  # episodes over which the share of failures is taken
MIN_FAILURE_WINDOW = 50  # episodes before it says anything
MIN_CLOSED = 256  # groups whose outcomes are remembered at least


class Books:
    """What became, or will become, of every episode.

    Example: g/0 is granted (leased), its actor dies (queued), it is granted again, its actor dies
    again, and with two attempts allowed it is given up: failed, by the scheduler's word. If the
    first actor lived after all and the learner trains on what it sent, the learner's word counts:
    the failure is taken back and the episode is booked as trained.
    """

    def __init__(self, cfg: RunConfig, catalogue: Catalogue) -> None:
        self._group_size = cfg.groups.size
        self._max_attempts = cfg.scheduler.max_attempts
        self._max_failed_frac = cfg.scheduler.max_failed_frac
        ahead = (cfg.scheduler.max_ahead_steps + 1) * cfg.groups.per_step
        self.table = GroupTable(max_closed=max(MIN_CLOSED, 4 * ahead))
        self.leases = LeaseBook(lease_s=cfg.actor.episode_timeout_s + cfg.scheduler.dead_after_s)
        self.ledger = Ledger()
        self.averages = SuccessAverages()
        self.audit = SelectionAudit()
        self.pace = Pace()
        self.curriculum = Curriculum(cfg, catalogue)
        self.num_filtered = 0  # groups without signal since the last step
        self.next_number = 0  # of the next training group
        self._recent: deque[str] = deque(maxlen=FAILURE_WINDOW)  # "" or the cause of a failure

    # --- out ----------------------------------------------------------------------------------

    def open(self, group: Group) -> None:
        """Issue the episodes of a new group."""
        self.table.add(group)
        self._account(group).issued += len(group.episodes)
        self.leases.enqueue(group, group.episodes)

    def grant(
        self, group: Group, episode: Episode, *, actor: str, incarnation: str, now: float
    ) -> None:
        """Lease a queued episode."""
        episode.num_issues += 1
        if episode.num_issues > 1:
            self._account(group).reissued += 1
        self.leases.lease(episode, actor=actor, incarnation=incarnation, now=now)

    def lose(self, episode: Episode, cause: str) -> None:
        """A lease came to nothing: queue the episode again, or give it up."""
        found = self.table.find(episode.episode_id)
        if found is None or found[1] is not episode:
            raise LedgerError(f"lease of {episode.episode_id} without an episode in the table")
        group = found[0]
        actor = episode.actor
        self.leases.release(episode)
        is_last = episode.num_issues >= self._max_attempts
        logger.warning(
            "lost episode=%s actor=%s cause=%s attempt=%d given_up=%s",
            episode.episode_id,
            actor,
            cause,
            episode.attempt,
            is_last,
        )
        if is_last:
            self.give_up(group, episode, FAILED, cause)
            self._note(cause)
            return
        self.leases.enqueue(group, [episode], is_first=True)

    def give_up(self, group: Group, episode: Episode, outcome: str, cause: str) -> None:
        """Settle an episode by the scheduler's own word."""
        cell = episode.cell if group.kind is EpisodeKind.TRAIN else None
        settled = Settled(outcome=outcome, cause=cause, is_given_up=True, cell=cell)
        self._settle(group, episode, settled)
        self._maybe_close(group)

    # --- in, from the learner -----------------------------------------------------------------

    def see(self, seen: EpisodeSeen) -> str:
        """An episode is in the learner's journal. Attempts do not matter; repeats are ignored.

        Returns:
            the actor whose lease has ended by that, "" if there was none.

        Raises:
            LongstrideError: too many of the last episodes failed.
        """
        found = self.table.find(seen.episode_id)
        if found is None:
            self._unknown(seen.episode_id)
            return ""
        group, episode = found
        if episode.state not in (EpisodeState.QUEUED, EpisodeState.LEASED):
            return ""
        actor = episode.actor
        is_failure = seen.end_reason.is_infrastructure_failure
        if group.kind is EpisodeKind.TRAIN:
            self.leases.release(episode)
            episode.state = EpisodeState.ARRIVED
            episode.num_turns = seen.num_turns
            if not is_failure:
                self.averages.add_train(seen)
                self.curriculum.see(seen, group, episode)
                self.pace.add_episode(episode.env, episode.horizon, seen.wall_s)
        else:
            self._see_eval(group, episode, seen)
        self._note(seen.end_reason.value if is_failure else "")
        return actor

    def _see_eval(self, group: Group, episode: Episode, seen: EpisodeSeen) -> None:
        """A failed evaluation episode is played again: a failure is no wrong answer."""
        self.leases.release(episode)
        if not seen.end_reason.is_infrastructure_failure:
            self.averages.add_eval(group.group_id, seen)
            settled = Settled(outcome=EVALUATED, cause="", is_given_up=False)
            self._settle(group, episode, settled)
            self._maybe_close(group)
        elif episode.num_issues >= self._max_attempts:
            self.give_up(group, episode, FAILED, seen.end_reason.value)
        else:
            self.leases.enqueue(group, [episode], is_first=True)

    def group_arrived(self, message: GroupArrived, *, now: float) -> None:
        """The learner has all members of a group that it will ever have."""
        group = self.table.groups.get(message.group_id)
        if group is None:
            return
        if group.state is GroupState.OPEN and group.kind is EpisodeKind.TRAIN:
            state = GroupState.READY if message.is_ready else GroupState.DROPPED
            self.table.set_state(group, state)
            seconds = None if group.opened_at is None else max(0.0, now - group.opened_at)
            self.pace.add_group(seconds, has_signal=message.is_ready)
        self._maybe_close(group)

    def report(self, report: EpisodeOutcome) -> None:
        """Book the learner's word. The same word twice is one.

        Raises:
            LedgerError: it was trained on, and is now reported otherwise. Everything else a learner
                that restarts decides anew, perhaps with members that came too late before.
        """
        found = self.table.find(report.episode_id)
        cell = found[1].cell if found and report.outcome is not Outcome.TRAINED else None
        settled = Settled(
            outcome=report.outcome.value, cause=report.cause, is_given_up=False, cell=cell
        )
        if found is not None and found[0].kind is not EpisodeKind.TRAIN:
            return
        known = found[1].settled if found else self.table.find_closed(report.episode_id)
        if known is not None:
            if self._replaces(report.episode_id, known, settled):
                if found:
                    found[1].settled = settled
                else:
                    self.table.replace_closed(report.episode_id, settled)
        elif found:
            self.leases.release(found[1])
            self._settle(*found, settled)
            self._maybe_close(found[0])
        else:
            self._unknown(report.episode_id)

    def _replaces(self, episode_id: str, known: Settled, settled: Settled) -> bool:
        """Rebook an episode that was not trained on, and that the learner now knows better."""
        if known.outcome == settled.outcome:
            return False
        if known.outcome == Outcome.TRAINED:
            raise LedgerError(
                f"{episode_id} was {known.outcome} ({known.cause}) and is now reported as"
                f" {settled.outcome} ({settled.cause})"
            )
        self.ledger.train.take_back(known.outcome, known.cause)
        self.ledger.train.settle(settled.outcome, settled.cause)
        if known.cell is not None:
            self.audit.take_back(known.cell, known.outcome, known.cause)
            self.audit.add(known.cell, settled.outcome, settled.cause)
        return True

    # --- common -------------------------------------------------------------------------------

    def _account(self, group: Group) -> Account:
        return self.ledger.train if group.kind is EpisodeKind.TRAIN else self.ledger.eval

    def _settle(self, group: Group, episode: Episode, settled: Settled) -> None:
        self.leases.release(episode)
        self.table.settle(group, episode, settled)
        self._account(group).settle(settled.outcome, settled.cause)
        if group.kind is EpisodeKind.TRAIN:
            self.audit.add(episode.cell, settled.outcome, settled.cause)

    def _maybe_close(self, group: Group) -> None:
        """A training group with a given-up member stays until the learner has heard of that."""
        if not group.is_settled:
            return
        is_told = group.state is not GroupState.OPEN or group.kind is EpisodeKind.EVAL
        if not is_told and any(
            e.settled is not None and e.settled.is_given_up for e in group.episodes
        ):
            return
        self.num_filtered += group.has_outcome(Outcome.FILTERED)
        self.leases.drop_group(group)
        self.table.close(group)

    def given_up_ids(self, waiting: list[str]) -> list[str]:
        """Return the episodes that the learner must not wait for any longer.

        A group that the learner called ready counts too: a learner that restarts has the group's
        journal, but does not know who was given up.

        Args:
            waiting: the groups that the learner has members to wait for, also closed ones.
        """
        given_up = [
            episode.episode_id
            for group, episode in self.table.episodes()
            if group.kind is EpisodeKind.TRAIN
            and episode.settled is not None
            and episode.settled.is_given_up
        ]
        for group_id in waiting:
            if group_id not in self.table.groups and self._number_of(group_id) < self.next_number:
                given_up += self._never_came(group_id)
        return given_up

    def _never_came(self, group_id: str) -> list[str]:
        """Return the members that a closed group is to be completed without.

        Of one closed long ago that is not known any more: all, of which the learner skips those
        that it has. What was cut off by the end of the run is not completed.
        """
        settled = self.table.closed.get(group_id)
        members = range(self._group_size) if settled is None else range(len(settled))
        return [
            episode_id_of(group_id, member)
            for member in members
            if settled is None or settled[member].is_failed
        ]

    def end_training(self, *, states: tuple[EpisodeState, ...]) -> None:
        """Nothing more is trained: what is in these states is stale."""
        for group, episode in list(self.table.episodes()):
            if group.kind is EpisodeKind.TRAIN and episode.state in states:
                self.give_up(group, episode, Outcome.STALE.value, "run_ended")

    def _unknown(self, episode_id: str) -> None:
        """A report of an episode not in the table: of one settled long ago, or of a void line."""
        if episode_id.startswith("eval-") or self._number_of(episode_id) < self.next_number:
            return
        self.ledger.num_unknown += 1
        logger.warning("report of an unknown episode=%s", episode_id)

    def _number_of(self, name: str) -> int:
        number = training_number(name)
        return self.next_number if number is None else number

    @property
    def closed_below(self) -> int:
        """Training groups with smaller numbers are closed, and never opened again."""
        groups = self.table.groups.values()
        numbers = [group.number for group in groups if group.kind is EpisodeKind.TRAIN]
        return min(numbers, default=self.next_number)

    def _note(self, cause: str) -> None:
        self._recent.append(cause)
        causes = Counter(each for each in self._recent if each)
        num_failed, num = causes.total(), len(self._recent)
        if num >= MIN_FAILURE_WINDOW and num_failed > self._max_failed_frac * num:
            raise LongstrideError(
                f"{num_failed} of the last {num} episodes failed by infrastructure, more than"
                f" scheduler.max_failed_frac={self._max_failed_frac:g}: {dict(causes)}"
            )

    def in_flight(self) -> dict[str, int]:
        """Return the arguments that the ledger asks for, counted from the table."""
        return {
            "train_in_flight": self.table.num_in_flight(EpisodeKind.TRAIN),
            "eval_in_flight": self.table.num_in_flight(EpisodeKind.EVAL),
        }

    def assert_balanced(self) -> None:
        """Raises: LedgerError: an episode is lost, or settled twice."""
        self.ledger.assert_balanced(**self.in_flight())

    def ledger_report(self) -> dict[str, Any]:
        """Return what ledger.json holds."""
        return self.ledger.report(**self.in_flight())

    def snapshot(self) -> dict[str, Any]:
        """Return the exact state as JSON; recent failures are left out, a restart forgives them."""
        return {
            "table": self.table.snapshot(),
            "ledger": self.ledger.snapshot(),
            "leases": self.leases.snapshot(),
            "averages": self.averages.snapshot(),
            "audit": self.audit.snapshot(),
            "pace": self.pace.snapshot(),
            "curriculum": self.curriculum.snapshot(),
            "num_filtered": self.num_filtered,
            "next_number": self.next_number,
        }

    def restore(self, state: dict[str, Any], *, now: float) -> None:
        """Take over the state of `snapshot`; leases get a fresh term."""
        self.table.restore(state["table"])
        self.ledger.restore(state["ledger"])
        self.averages.restore(state["averages"])
        self.audit.restore(state["audit"])
        self.pace.restore(state["pace"])
        self.curriculum.restore(state["curriculum"])
        self.num_filtered = state["num_filtered"]
        self.next_number = state["next_number"]
        self._recent.clear()
        self.leases.restore(state["leases"], self.table, now=now)

    def terms(self) -> dict[str, Any]:
        """Return what a snapshot leaves out: times, and recent failures."""
        return {
            "leases": self.leases.terms(),
            "table": self.table.terms(),
            "pace": self.pace.terms(),
            "recent": list(self._recent),
        }

    def restore_terms(self, terms: dict[str, Any]) -> None:
        """Take over `terms` on top of the snapshot of the same moment."""
        self.leases.restore_terms(terms["leases"])
        self.table.restore_terms(terms["table"])
        self.pace.restore_terms(terms["pace"])
        self._recent.extend(terms["recent"])
