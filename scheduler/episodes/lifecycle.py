"""The life cycle of an episode: its state transitions, and the only code that writes its state.

Between any two calls the ledger balances: issued = settled + in flight.
"""

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from common.config.groups import GroupsSection
from common.config.scheduler import SchedulerSection
from common.errors import LedgerError
from common.wire.access.bounds import shown
from common.wire.messages import EpisodeOutcome, EpisodeSeen, GroupArrived, Outcome
from scheduler.episodes.audit import RUN_ENDED, SelectionAudit
from scheduler.episodes.ledger import (
    EVALUATED,
    FAILED,
    EpisodeCounts,
    FailureKinds,
    FailureWindow,
    Ledger,
)
from scheduler.episodes.queue import EpisodeQueue, Taken
from scheduler.episodes.table import (
    EpisodePhase,
    EpisodeRecord,
    GroupRecord,
    GroupState,
    GroupTable,
    Settled,
)
from scheduler.members.members import RunMember
from scheduler.state import FIXED


class LeaseIndex:
    """Finds leased episodes without a scan of the table. Only `EpisodeLifecycle` writes it."""

    def __init__(self) -> None:
        self._by_actor: dict[str, dict[str, EpisodeRecord]] = {}

    def rebuild(self, episodes: Iterable[EpisodeRecord]) -> None:
        """Rebuild the index from all episodes."""
        self._by_actor = {}
        leased = (e for e in episodes if e.state is EpisodePhase.LEASED)
        for episode in sorted(leased, key=lambda e: e.lease_number):
            self.add(episode)

    def add(self, episode: EpisodeRecord) -> None:
        """Add an episode that its actor now holds."""
        self._by_actor.setdefault(episode.actor, {})[episode.episode_id] = episode

    def remove(self, episode: EpisodeRecord) -> None:
        """Remove an episode whose lease has ended."""
        leased = self._by_actor[episode.actor]
        del leased[episode.episode_id]
        if not leased:
            del self._by_actor[episode.actor]

    def __iter__(self) -> Iterator[EpisodeRecord]:
        return (episode for held in self._by_actor.values() for episode in held.values())

    def __len__(self) -> int:
        return sum(len(held) for held in self._by_actor.values())

    def of(self, actor: str) -> list[EpisodeRecord]:
        """Return the episodes leased to this actor, in the order of their leases."""
        return list(self._by_actor.get(actor, {}).values())

    def num_of(self, actor: str) -> int:
        """Return how many episodes are leased to this actor."""
        return len(self._by_actor.get(actor, ()))


logger = logging.getLogger(__name__)

MIN_CLOSED = 256  # Closed groups whose outcomes are kept at least.
# Most outcomes kept until they are written; reached only by a core that writes no files.
MAX_NEWS = 100_000


@dataclass(frozen=True, slots=True)
class Arrived:
    """An episode that has just arrived for the first time."""

    group: GroupRecord
    episode: EpisodeRecord
    actor: str  # Actor whose lease ended by the arrival, "" if there was no lease.


@dataclass(slots=True)
class EpisodeLifecycle:
    """The state of every episode.

    queued --grant--> leased --arrive--> arrived --report--> settled
       ^---lose, while attempts are left---'

    `reclaim` moves an episode from queued to leased, for an actor that was wrongly declared dead.
    If no attempts are left, the episode is given up: it is settled provisionally. Evaluation
    episodes are settled when they arrive.

    Example: g/0 is granted (leased), its actor dies (queued), it is granted again, and its second
    actor dies. Two attempts are allowed, so it is given up: failed, provisionally. But the first
    actor was still alive, and the learner trains on its trajectory. The learner's report has
    priority: the failure is undone and the episode is booked as trained.
    """

    groups: GroupsSection = field(metadata=FIXED)
    scheduler: SchedulerSection = field(metadata=FIXED)
    lease_s: float = field(metadata=FIXED)  # Seconds until a lease without renewal expires.
    table: GroupTable = field(default_factory=GroupTable)
    queue: EpisodeQueue = field(init=False)
    ledger: Ledger = field(default_factory=Ledger)
    audit: SelectionAudit = field(default_factory=SelectionAudit)
    num_filtered: int = 0  # Groups without signal since the last step.
    num_leases: int = 0  # Leases granted in the whole run.
    failures: FailureWindow = field(init=False)
    kinds: FailureKinds = field(default_factory=FailureKinds)
    leases: LeaseIndex = field(default_factory=LeaseIndex, metadata=FIXED)
    # Outcomes not written yet: (episode id, outcome, cause), oldest first.
    news: deque[tuple[str, str, str]] = field(
        default_factory=partial(deque[tuple[str, str, str]], maxlen=MAX_NEWS), metadata=FIXED
    )

    def __post_init__(self) -> None:
        self.queue = EpisodeQueue(self.table)
        self.failures = FailureWindow(self.scheduler.max_failed_frac)

    def after_restore(self) -> None:
        """Rebuild the index of leases from the table."""
        self.leases.rebuild(episode for _, episode in self.table.episodes())

    def open(self, group: GroupRecord) -> None:
        """Issue the episodes of a new group: all are queued."""
        self.table.add(group)
        self._account(group).issued += len(group.episodes)
        self.queue.put(group.group_id, range(len(group.episodes)))

    def grant(self, taken: Taken, member: RunMember, *, now: float) -> None:
        """Lease episodes that were taken off the queue."""
        for group, episode in taken:
            episode.num_issues += 1
            if episode.num_issues > 1:
                self._account(group).reissued += 1
            self.reclaim(episode, member, now=now)

    def reclaim(self, episode: EpisodeRecord, member: RunMember, *, now: float) -> None:
        """Lease a queued episode. The caller decides whether this counts as one more issue."""
        self.num_leases += 1
        self._move(episode, EpisodePhase.LEASED)
        episode.actor, episode.incarnation = member.name, member.incarnation
        episode.lease_number, episode.granted_at = self.num_leases, now
        self.leases.add(episode)
        self.renew(episode, now=now)

    def renew(self, episode: EpisodeRecord, *, now: float) -> None:
        """Extend the lease: the actor is playing the episode."""
        episode.deadline = now + self.lease_s
        episode.listed_at = now
        episode.num_missed = 0

    def renew_all(self, *, now: float) -> None:
        """Extend all leases: their times are not valid in a restarted or resumed process."""
        for episode in self.leases:
            self.renew(episode, now=now)

    def count_missed_beat(self, episode: EpisodeRecord) -> None:
        """Count a heartbeat that does not list the episode."""
        episode.num_missed += 1

    def revoke(self, episode: EpisodeRecord) -> None:
        """Mark the episode so that its actor abandons it; the lease lasts until the actor has."""
        episode.is_revoked = True

    def identify(self, episode: EpisodeRecord, incarnation: str) -> None:
        """Record the process of a lease that was granted before this process sent its hello."""
        episode.incarnation = episode.incarnation or incarnation

    def lose(self, episode: EpisodeRecord, cause: str) -> None:
        """End a lease without a result: queue the episode again, or give it up."""
        entry = self.table.find(episode.episode_id)
        if entry is None or entry[1] is not episode:
            raise LedgerError(f"the lease of {episode.episode_id} has no episode in the table")
        is_last = episode.num_issues >= self.scheduler.max_attempts
        logger.warning(
            "lost episode=%s actor=%s cause=%s attempt=%d given_up=%s",
            episode.episode_id,
            episode.actor,
            cause,
            episode.attempt,
            is_last,
        )
        if is_last:
            self._give_up(*entry, FAILED, cause)
            self.failures.add(cause)
            self.kinds.add(cause, "the lease was lost in all attempts")
        else:
            self._requeue(*entry)

    def lose_all(self, actor: str, cause: str) -> None:
        """End all leases of a lost actor; its groups no longer have an owner."""
        # Reversed, so that the queue keeps their order.
        for episode in reversed(self.leases.of(actor)):
            self.lose(episode, cause)
        self.queue.disown(actor)

    def _requeue(self, group: GroupRecord, episode: EpisodeRecord) -> None:
        """Queue an episode again, before all others."""
        self._move(episode, EpisodePhase.QUEUED)
        self.queue.put(group.group_id, [episode.member], is_first=True)

    def _move(self, episode: EpisodeRecord, state: EpisodePhase) -> None:
        """Write a state, and end the lease if there is one."""
        if episode.state is EpisodePhase.LEASED:
            self.leases.remove(episode)
        episode.state = state
        episode.actor = episode.incarnation = ""
        episode.is_revoked = False
        if state is not EpisodePhase.ARRIVED:  # The learner may still refuse the episode.
            episode.granted_at = None

    # --- arrived, settled ---------------------------------------------------------------------

    def arrive(self, seen: EpisodeSeen) -> Arrived | None:
        """Record that an episode, of any attempt, is in the journal; None if it is no news."""
        entry = self.table.find(seen.episode_id)
        if entry is None:
            self._unknown(seen.episode_id)
            return None
        group, episode = entry
        if episode.state not in (EpisodePhase.QUEUED, EpisodePhase.LEASED):
            return None
        arrived = Arrived(group, episode, episode.actor)
        started_at = episode.granted_at
        failure = seen.end_reason.value if seen.end_reason.is_infrastructure_failure else ""
        if group.is_train:
            self._move(episode, EpisodePhase.ARRIVED)
            episode.num_turns = seen.num_turns
            episode.num_tokens = seen.num_sampled_tokens
        elif not failure:
            self._settle(group, episode, Settled(outcome=EVALUATED, cause="", is_given_up=False))
        elif episode.num_issues >= self.scheduler.max_attempts:
            self._give_up(group, episode, FAILED, failure)
        else:  # A failure is not a wrong answer, so the episode is played again.
            self._requeue(group, episode)
        self.failures.add(failure, error=seen.error, started_at=started_at)
        if failure:
            self.kinds.add(failure, seen.error)
        return arrived

    def complete(self, message: GroupArrived) -> GroupRecord | None:
        """Record that no more members of a group will arrive; return the group if this is news."""
        group = self.table.groups.get(message.group_id)
        if group is None:
            return None
        is_news = group.state is GroupState.OPEN and group.is_train
        if is_news:
            state = GroupState.READY if message.is_ready else GroupState.DROPPED
            self.table.set_state(group, state)
        self._maybe_close(group)
        return group if is_news else None

    def report(self, report: EpisodeOutcome) -> None:
        """Book an outcome that the learner reports. A repeated report has no effect.

        The outcome "trained" is final; a different later report is counted as an error. A restarted
        learner may change any other outcome, for instance with members that arrived too late
        before.
        """
        entry = self.table.find(report.episode_id)
        if entry is not None and not entry[0].is_train:
            return
        cell = entry[1].cell if entry and report.outcome is not Outcome.TRAINED else None
        outcome = report.outcome.value
        cause = report.cause
        num_tokens = entry[1].num_tokens if entry else 0
        settled = Settled(
            outcome=outcome, cause=cause, is_given_up=False, cell=cell, num_tokens=num_tokens
        )
        earlier = entry[1].settled if entry else self.table.find_closed(report.episode_id)
        if earlier is not None:
            num_stale = report.num_stale_tokens
            if self._is_rebooked(report.episode_id, earlier, settled, num_stale=num_stale):
                if entry:
                    entry[1].settled = settled
                else:
                    self.table.replace_closed(report.episode_id, settled)
        elif entry:
            if report.error:
                if entry[1].state is EpisodePhase.ARRIVED:
                    self.failures.withdraw()
                started_at = entry[1].granted_at
                self.failures.add(cause, error=report.error, started_at=started_at)
                is_of_group = report.error.startswith("groups.reward")
                refused = "" if is_of_group else "the learner refused an episode: "
                self.kinds.add(cause, f"{refused}{report.error}")
            self._settle(*entry, settled, num_stale=report.num_stale_tokens)
        else:
            self._unknown(report.episode_id)

    def _give_up(
        self, group: GroupRecord, episode: EpisodeRecord, outcome: str, cause: str
    ) -> None:
        """Settle an episode provisionally, without a report of the learner."""
        cell = episode.cell if group.is_train else None
        settled = Settled(
            outcome=outcome, cause=cause, is_given_up=True, cell=cell, num_tokens=episode.num_tokens
        )
        self._settle(group, episode, settled)

    def skip(self, group_id: str, cause: str) -> None:
        """Book the episodes of an evaluation that have no outcome as failed."""
        group = self.table.groups.get(group_id)
        if group is None:
            return
        for episode in group.episodes:
            if episode.settled is None:
                self._give_up(group, episode, FAILED, cause)

    def end_training(self, *, states: tuple[EpisodePhase, ...]) -> None:
        """Book the training episodes in these states as stale: there are no more steps."""
        for group, episode in list(self.table.episodes()):
            if group.is_train and episode.state in states:
                self._give_up(group, episode, Outcome.STALE.value, RUN_ENDED)

    def _settle(
        self, group: GroupRecord, episode: EpisodeRecord, settled: Settled, *, num_stale: int = 0
    ) -> None:
        """Book the outcome of an episode, and close its group if it was the last.

        Args:
            num_stale: sampled tokens of a trained episode that were stale.
        """
        self._move(episode, EpisodePhase.SETTLED)
        group.num_settled += episode.settled is None
        episode.settled = settled
        self._account(group).settle(settled.outcome, settled.cause)
        self.news.append((episode.episode_id, settled.outcome, settled.cause))
        if group.is_train:
            self.audit.add(
                episode.cell,
                settled.outcome,
                settled.cause,
                num_tokens=settled.num_tokens,
                num_stale=num_stale,
            )
        self._maybe_close(group)

    def _is_rebooked(
        self, episode_id: str, earlier: Settled, settled: Settled, *, num_stale: int
    ) -> bool:
        """Replace the outcome of an episode by the learner's report, unless it was trained."""
        if earlier.outcome == settled.outcome:
            return False
        if earlier.outcome == Outcome.TRAINED:
            self.ledger.num_unknown += 1
            logger.error(
                "refused report: %s was %s and is now reported as %s (%s)",
                shown(episode_id),
                earlier.outcome,
                settled.outcome,
                shown(settled.cause),
            )
            return False
        self.ledger.train.take_back(earlier.outcome, earlier.cause)
        self.ledger.train.settle(settled.outcome, settled.cause)
        self.news.append((episode_id, settled.outcome, settled.cause))
        if earlier.cell is not None:
            num_tokens = earlier.num_tokens
            self.audit.take_back(
                earlier.cell, earlier.outcome, earlier.cause, num_tokens=num_tokens
            )
            self.audit.add(
                earlier.cell,
                settled.outcome,
                settled.cause,
                num_tokens=num_tokens,
                num_stale=num_stale,
            )
        return True

    def _maybe_close(self, group: GroupRecord) -> None:
        """Close a group when all its episodes are settled.

        A training group with an episode that was given up stays open until the learner has reported
        the group complete.
        """
        if group.num_settled < len(group.episodes):
            return
        is_decided = group.state is not GroupState.OPEN or not group.is_train
        if not is_decided and any(episode.is_given_up for episode in group.episodes):
            return
        outcomes = (e.settled.outcome for e in group.episodes if e.settled is not None)
        self.num_filtered += Outcome.FILTERED in outcomes
        self.queue.remove(group.group_id)
        ahead = (self.scheduler.max_ahead_steps + 1) * self.groups.per_step
        self.table.close(group, max_closed=max(MIN_CLOSED, 4 * ahead))

    # --- accounts -----------------------------------------------------------------------------

    def _account(self, group: GroupRecord) -> EpisodeCounts:
        """Return the account of a group: training or evaluation."""
        return self.ledger.train if group.is_train else self.ledger.eval

    def _unknown(self, episode_id: str) -> None:
        """Count a report of an episode that was never issued.

        A report of an episode that was settled long ago is not counted.
        """
        if episode_id.startswith("eval-") or self.table.was_opened(episode_id):
            return
        self.ledger.num_unknown += 1
        if self.ledger.num_unknown <= 100:
            logger.warning("ignored the report of an unknown episode=%s", shown(episode_id))

    def check_failures(self) -> None:
        """Raise EpisodesFailed if too large a share of the episodes failed."""
        self.failures.check(example=self.kinds.most_frequent())

    def assert_balanced(self) -> None:
        """Check the ledger. Raises: LedgerError: an episode is lost, or settled twice."""
        self.ledger.assert_balanced(self.table.num_in_flight())

    def ledger_report(self) -> dict[str, Any]:
        """Return the content of ledger.json."""
        return self.ledger.report(self.table.num_in_flight())
