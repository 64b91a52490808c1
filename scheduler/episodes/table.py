"""The table of groups and of the states of their episodes."""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from common.config.horizon import HorizonUnit
from common.errors import LedgerError
from common.ids import episode_id_of, split_episode_id, training_number
from common.wire.messages import EpisodeKind, Outcome, PolicyKind
from scheduler.episodes.audit import UNKNOWN, Cell, bucket_of, length_class_of
from scheduler.state import VOLATILE

NOT_SEEN = -1  # Number of turns of an episode that has not arrived.


class EpisodePhase(StrEnum):
    """queued -> leased -> arrived -> settled; a lost lease returns to queued."""

    QUEUED = "queued"
    LEASED = "leased"
    ARRIVED = "arrived"
    SETTLED = "settled"


class GroupState(StrEnum):
    """open -> ready | dropped, by the learner's report; a settled group leaves the table."""

    OPEN = "open"
    READY = "ready"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The one outcome of an episode."""

    outcome: str
    cause: str
    # True if the scheduler settled the episode provisionally; the learner's report replaces the
    # outcome.
    is_given_up: bool
    # Cell in which the audit counted the episode; None if the outcome is final.
    cell: Cell | None = None
    num_tokens: int = 0  # Sampled tokens of the episode.


@dataclass(slots=True, kw_only=True)
class EpisodeRecord:
    """One member of a group. Only `EpisodeLifecycle` writes the fields that change."""

    episode_id: str
    member: int
    env: str
    subset: str
    item_id: str
    seed: int
    horizon: int  # Horizon in `horizon_unit`.
    horizon_unit: HorizonUnit = HorizonUnit.TURNS
    max_turns: int = 0  # As in `EpisodeIdentity`.
    state: EpisodePhase = EpisodePhase.QUEUED
    num_issues: int = 0
    num_turns: int = NOT_SEEN  # Number of turns of an episode that has arrived.
    num_tokens: int = 0  # Number of sampled tokens of an episode that has arrived.
    actor: str = ""
    incarnation: str = ""
    lease_number: int = 0  # Number of the lease, in the order of all leases.
    is_revoked: bool = False  # True if the actor must abandon the episode and still holds it.
    settled: Settled | None = None
    # Time of the grant; None: not known after a restart.
    granted_at: float | None = field(default=None, metadata=VOLATILE)
    deadline: float = field(default=0.0, metadata=VOLATILE)  # Time at which the lease expires.
    # Time of the grant, or of the last heartbeat that listed the episode.
    listed_at: float = field(default=0.0, metadata=VOLATILE)
    # Consecutive heartbeats that did not list the episode.
    num_missed: int = field(default=0, metadata=VOLATILE)

    @property
    def attempt(self) -> int:
        """Number of the attempt; 0 for the first issue."""
        return self.num_issues - 1

    @property
    def is_given_up(self) -> bool:
        """True if the scheduler settled it provisionally, without a report of the learner."""
        return self.settled is not None and self.settled.is_given_up

    @property
    def cell(self) -> Cell:
        """Cell of the selection audit: by turns, for every unit of the horizon."""
        is_seen = self.num_turns != NOT_SEEN
        most = self.max_turns or self.horizon
        bucket = bucket_of(self.num_turns, most) if is_seen else UNKNOWN
        return Cell(self.env, self.subset, most, bucket, length_class_of(self.num_tokens))


@dataclass(slots=True, kw_only=True)
class GroupRecord:
    """Episodes that share a stamp. The stamp never changes."""

    group_id: str
    number: int  # Number of the training group; -1 for an evaluation.
    kind: EpisodeKind
    policy: PolicyKind
    horizon_stage: int
    opened_at_version: int
    distance: int = 0  # Most turns that the expert needs for items of the stage; 0: not known.
    distance_stage: int = 0
    episodes: list[EpisodeRecord]
    state: GroupState = GroupState.OPEN
    num_settled: int = 0
    # Time of the opening; None: not known after a restart.
    opened_at: float | None = field(default=None, metadata=VOLATILE)

    @property
    def is_train(self) -> bool:
        """True for a training group, False for an evaluation."""
        return self.kind is EpisodeKind.TRAIN


@dataclass(slots=True)
class GroupTable:
    """Open groups by id, and outcomes of recently closed groups, to detect repeated reports."""

    groups: dict[str, GroupRecord] = field(default_factory=dict[str, GroupRecord])
    closed: OrderedDict[str, list[Settled]] = field(default_factory=OrderedDict[str, list[Settled]])
    num_open: int = 0  # Number of training groups in state open.
    num_ready: int = 0  # Number of training groups in state ready.
    next_number: int = 0  # Number of the next training group.

    def add(self, group: GroupRecord) -> None:
        """Add a new group. Raises: LedgerError: it was opened before."""
        if group.group_id in self.groups or group.group_id in self.closed:
            raise LedgerError(f"group {group.group_id} was opened twice")
        self.groups[group.group_id] = group
        self.next_number += group.is_train
        self._count(group, +1)

    def find(self, episode_id: str) -> tuple[GroupRecord, EpisodeRecord] | None:
        """Return the group and the episode, None if the episode is not in the table."""
        group_id, member = split_episode_id(episode_id)
        group = self.groups.get(group_id)
        if group is None or not 0 <= member < len(group.episodes):
            return None
        return group, group.episodes[member]

    def find_closed(self, episode_id: str) -> Settled | None:
        """Return the outcome of a member of a recently closed group, None if it is not kept."""
        group_id, member = split_episode_id(episode_id)
        settled = self.closed.get(group_id, [])
        return settled[member] if 0 <= member < len(settled) else None

    def replace_closed(self, episode_id: str, settled: Settled) -> None:
        """Replace the outcome of a member of a recently closed group."""
        group_id, member = split_episode_id(episode_id)
        self.closed[group_id][member] = settled

    def set_state(self, group: GroupRecord, state: GroupState) -> None:
        """Change the state of a group, and the counts by state."""
        self._count(group, -1)
        group.state = state
        self._count(group, +1)

    def close(self, group: GroupRecord, *, max_closed: int) -> None:
        """Remove a settled group, and keep the outcomes of the last `max_closed` groups."""
        self._count(group, -1)
        del self.groups[group.group_id]
        self.closed[group.group_id] = [e.settled for e in group.episodes if e.settled is not None]
        while len(self.closed) > max_closed:
            self.closed.popitem(last=False)

    def _count(self, group: GroupRecord, change: int) -> None:
        """Change the numbers of open and ready training groups by `change`."""
        if group.is_train:
            self.num_open += change * (group.state is GroupState.OPEN)
            self.num_ready += change * (group.state is GroupState.READY)

    def episodes(self) -> Iterator[tuple[GroupRecord, EpisodeRecord]]:
        """Yield every episode of the table, in the order of opening."""
        for group in self.groups.values():
            for episode in group.episodes:
                yield group, episode

    def was_opened(self, name: str) -> bool:
        """True if `name` is a training group that was ever opened, or an episode of one."""
        number = training_number(name)
        return number is not None and number < self.next_number

    @property
    def closed_below(self) -> int:
        """All training groups with smaller numbers are closed, and never open again."""
        numbers = [group.number for group in self.groups.values() if group.is_train]
        return min(numbers, default=self.next_number)

    def given_up_ids(self, waiting: list[str], *, group_size: int) -> list[str]:
        """Return the episodes for which the learner must no longer wait.

        These are the episodes that the scheduler gave up, also in groups that are already ready: a
        restarted learner has the group's journal, but no record of given-up or refused episodes.
        For each group in `waiting` all failed episodes are added; episodes cut off by the end of
        the run are not. If a group closed so long ago that its outcomes were dropped, all its
        episodes are added. The learner ignores episodes that it has.

        Args:
            waiting: groups for which the learner waits for members, also closed ones.
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
        """Return the number of episodes without an outcome, counted from the table itself."""
        counts = Counter[EpisodeKind]()
        for group in self.groups.values():
            counts[group.kind] += sum(1 for each in group.episodes if each.settled is None)
        return counts
