"""Groups and their episodes: who is queued, leased, arrived, settled."""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from common.config.curriculum import HorizonUnit
from common.errors import LedgerError
from common.ids import episode_id_of, split_episode_id, training_number
from common.wire.messages import EpisodeKind, Outcome, PolicyKind
from learner.scheduler.episodes.audit import UNKNOWN, Cell, bucket_of
from learner.scheduler.state import VOLATILE

NOT_SEEN = -1  # turns of an episode that has not arrived


class EpisodeState(StrEnum):
    """queued -> leased -> arrived -> settled; a lost lease goes back to queued."""

    QUEUED = "queued"
    LEASED = "leased"
    ARRIVED = "arrived"
    SETTLED = "settled"


class GroupState(StrEnum):
    """open -> ready | dropped, as the learner says; it leaves the table when all is settled."""

    OPEN = "open"
    READY = "ready"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The one outcome of an episode."""

    outcome: str
    cause: str
    is_given_up: bool  # provisionally, by the scheduler; what the learner reports replaces it
    cell: Cell | None = None  # where the audit counted it, if it may be counted anew


@dataclass(slots=True, kw_only=True)
class EpisodeRecord:
    """One member of a group. `EpisodeLifecycle` alone writes what changes."""

    episode_id: str
    member: int
    env: str
    subset: str
    item_id: str
    seed: int
    horizon: int  # in its unit
    horizon_unit: HorizonUnit = HorizonUnit.TURNS
    max_turns: int = 0  # as in EpisodeIdentity
    state: EpisodeState = EpisodeState.QUEUED
    num_issues: int = 0
    num_turns: int = NOT_SEEN  # that it took, once it has arrived
    actor: str = ""
    incarnation: str = ""
    lease_number: int = 0  # leases in the order in which they were given
    is_revoked: bool = False  # the actor is told to abandon it, and has it still
    settled: Settled | None = None
    granted_at: float | None = field(default=None, metadata=VOLATILE)  # None: not known any more
    deadline: float = field(default=0.0, metadata=VOLATILE)  # the lease ends
    listed_at: float = field(default=0.0, metadata=VOLATILE)  # granted, or last in a heartbeat
    num_missed: int = field(default=0, metadata=VOLATILE)  # heartbeats in a row without it

    @property
    def attempt(self) -> int:
        """0 for the first issue."""
        return self.num_issues - 1

    @property
    def is_given_up(self) -> bool:
        """True if it is settled, and the learner has not reported it."""
        return self.settled is not None and self.settled.is_given_up

    @property
    def cell(self) -> Cell:
        """Where the selection audit counts it: by turns, whatever the horizon's unit."""
        is_seen, most = self.num_turns != NOT_SEEN, self.max_turns or self.horizon
        bucket = bucket_of(self.num_turns, most) if is_seen else UNKNOWN
        return Cell(self.env, self.subset, most, bucket)


@dataclass(slots=True, kw_only=True)
class GroupRecord:
    """Episodes that share a stamp. The stamp is never written again."""

    group_id: str
    number: int  # of the training group; -1 for evaluation
    kind: EpisodeKind
    policy: PolicyKind
    horizon_stage: int
    opened_at_version: int
    distance: int = 0  # most turns that the expert needs for items of its stage; 0: not known
    distance_stage: int = 0
    episodes: list[EpisodeRecord]
    state: GroupState = GroupState.OPEN
    num_settled: int = 0
    opened_at: float | None = field(default=None, metadata=VOLATILE)  # None: not known any more

    @property
    def is_train(self) -> bool:
        """True if it is for training, not for an evaluation."""
        return self.kind is EpisodeKind.TRAIN


@dataclass(slots=True)
class GroupTable:
    """Open groups by id, and the outcomes of those closed last, to recognise repeated reports."""

    groups: dict[str, GroupRecord] = field(default_factory=dict[str, GroupRecord])
    closed: OrderedDict[str, list[Settled]] = field(default_factory=OrderedDict[str, list[Settled]])
    num_open: int = 0  # training groups by state
    num_ready: int = 0
    next_number: int = 0  # of the next training group

    def add(self, group: GroupRecord) -> None:
        """Take a new group in. Raises: LedgerError: it was opened before."""
        if group.group_id in self.groups or group.group_id in self.closed:
            raise LedgerError(f"group {group.group_id} opened twice")
        self.groups[group.group_id] = group
        self.next_number += group.is_train
        self._count(group, +1)

    def find(self, episode_id: str) -> tuple[GroupRecord, EpisodeRecord] | None:
        """Return the episode with its group, None if it is not in the table."""
        group_id, member = split_episode_id(episode_id)
        group = self.groups.get(group_id)
        if group is None or not 0 <= member < len(group.episodes):
            return None
        return group, group.episodes[member]

    def find_closed(self, episode_id: str) -> Settled | None:
        """Return the outcome of a member of a group closed lately."""
        group_id, member = split_episode_id(episode_id)
        settled = self.closed.get(group_id, [])
        return settled[member] if 0 <= member < len(settled) else None

    def replace_closed(self, episode_id: str, settled: Settled) -> None:
        """Write another outcome of a member of a group closed lately."""
        group_id, member = split_episode_id(episode_id)
        self.closed[group_id][member] = settled

    def set_state(self, group: GroupRecord, state: GroupState) -> None:
        """Move a group, keeping the counts."""
        self._count(group, -1)
        group.state = state
        self._count(group, +1)

    def close(self, group: GroupRecord, *, max_closed: int) -> None:
        """Take a settled group out, remembering the outcomes of the last `max_closed`."""
        self._count(group, -1)
        del self.groups[group.group_id]
        self.closed[group.group_id] = [e.settled for e in group.episodes if e.settled is not None]
        while len(self.closed) > max_closed:
            self.closed.popitem(last=False)

    def _count(self, group: GroupRecord, change: int) -> None:
        if group.is_train:
            self.num_open += change * (group.state is GroupState.OPEN)
            self.num_ready += change * (group.state is GroupState.READY)

    def episodes(self) -> Iterator[tuple[GroupRecord, EpisodeRecord]]:
        """Yield every episode of the table, in the order of opening."""
        for group in self.groups.values():
            for episode in group.episodes:
                yield group, episode

    def was_opened(self, name: str) -> bool:
        """True for a training group that was opened some time, and for an episode of it."""
        number = training_number(name)
        return number is not None and number < self.next_number

    @property
    def closed_below(self) -> int:
        """Training groups with smaller numbers are closed, and never opened again."""
        numbers = [group.number for group in self.groups.values() if group.is_train]
        return min(numbers, default=self.next_number)

    def given_up_ids(self, waiting: list[str], *, group_size: int) -> list[str]:
        """Return the episodes that the learner must not wait for any longer.

        A group that the learner called ready counts too: a learner that restarts has the group's
        journal, but does not know who was given up, nor whom the learner before it refused. Of a
        group that it waits for, also a closed one, all that failed: what was cut off by the end of
        the run is not completed. Of one closed so long ago that its outcomes are forgotten, all.
        The learner skips those that it has.

        Args:
            waiting: the groups that the learner has members to wait for, also closed ones.
        """
        given_up = [e.episode_id for g, e in self.episodes() if g.is_train and e.is_given_up]
        for group_id in waiting:
            if not self.was_opened(group_id):
                continue
            failed = [True] * group_size
            if group_id in self.groups:
                settled = [e.settled for e in self.groups[group_id].episodes]
                failed = [s is not None and s.outcome == Outcome.FAILED for s in settled]
            elif group_id in self.closed:
                failed = [s.outcome == Outcome.FAILED for s in self.closed[group_id]]
            given_up += [episode_id_of(group_id, m) for m, each in enumerate(failed) if each]
        return given_up

    def num_in_flight(self) -> Counter[EpisodeKind]:
        """Count the episodes without outcome, from the table itself."""
        found = Counter[EpisodeKind]()
        for group in self.groups.values():
            found[group.kind] += sum(1 for each in group.episodes if each.settled is None)
        return found
