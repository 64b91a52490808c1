"""The table of groups and their episodes: who is queued, leased, arrived, settled."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from common.errors import LedgerError
from common.wire.messages import EpisodeKind, Outcome, PolicyKind
from learner.scheduler.episodes.audit import UNKNOWN, Cell, bucket_of

NOT_SEEN = -1  # turns of an episode that has not arrived


class EpisodeState(StrEnum):
    """queued -> leased -> arrived -> settled; a lost lease goes back to queued."""

    QUEUED = "queued"
    LEASED = "leased"
    ARRIVED = "arrived"
    SETTLED = "settled"


class GroupState(StrEnum):
    """open -> ready | dropped, by the learner's word; it leaves the table when all is settled."""

    OPEN = "open"
    READY = "ready"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The one outcome of an episode."""

    outcome: str
    cause: str
    is_given_up: bool  # the scheduler's word; a word of the learner replaces it
    cell: Cell | None = None  # where the audit counted it, if it may be counted anew

    @property
    def is_failed(self) -> bool:
        """True if it was given up while it was waited for."""
        return self.is_given_up and self.outcome == Outcome.FAILED


@dataclass(slots=True, kw_only=True)
class Episode:
    """One member of a group. Times are the core's clock, and fresh after a restore."""

    episode_id: str
    member: int
    env: str
    subset: str
    item_id: str
    seed: int
    horizon: int
    state: EpisodeState = EpisodeState.QUEUED
    num_issues: int = 0
    num_turns: int = NOT_SEEN  # that it took, once it has arrived
    actor: str = ""
    incarnation: str = ""
    is_revoked: bool = False  # the actor is told to abandon it, and has it still
    settled: Settled | None = None
    granted_at: float | None = None  # None: not known any more
    deadline: float = 0.0  # the lease ends
    listed_at: float = 0.0  # granted, or last listed in a heartbeat
    num_missed: int = 0  # heartbeats in a row that did not list it

    @property
    def attempt(self) -> int:
        """0 for the first issue."""
        return self.num_issues - 1

    @property
    def cell(self) -> Cell:
        """Where the selection audit counts it."""
        is_seen = self.num_turns != NOT_SEEN
        bucket = bucket_of(self.num_turns, self.horizon) if is_seen else UNKNOWN
        return Cell(self.env, self.subset, self.horizon, bucket)


@dataclass(slots=True, kw_only=True)
class Group:
    """Episodes that share a stamp. The stamp is never written again."""

    group_id: str
    number: int  # of the training group; -1 for evaluation
    kind: EpisodeKind
    policy: PolicyKind
    horizon_stage: int
    opened_at_version: int
    episodes: list[Episode]
    state: GroupState = GroupState.OPEN
    num_settled: int = 0
    opened_at: float | None = None  # None: not known any more

    @property
    def is_settled(self) -> bool:
        """True if every member has its outcome."""
        return self.num_settled == len(self.episodes)

    @property
    def is_given_up(self) -> bool:
        """True if every member was given up: the learner has not heard of the group yet."""
        return all(e.settled is not None and e.settled.is_given_up for e in self.episodes)

    def has_outcome(self, outcome: Outcome) -> bool:
        """True if any member ended so."""
        return any(e.settled is not None and e.settled.outcome == outcome for e in self.episodes)


def episode_id_of(group_id: str, member: int) -> str:
    """Return the id of a member."""
    return f"{group_id}/{member}"


def split_episode_id(episode_id: str) -> tuple[str, int]:
    """Return (group id, member); member -1 if the id is none of ours."""
    group_id, _, member = episode_id.rpartition("/")
    return group_id, int(member) if member.isascii() and member.isdigit() else -1


@dataclass(slots=True)
class GroupTable:
    """Open groups by id, and the outcomes of those closed last, to recognise repeated reports."""

    max_closed: int
    groups: dict[str, Group] = field(default_factory=dict)
    closed: OrderedDict[str, list[Settled]] = field(default_factory=OrderedDict)
    num_open: int = 0  # training groups by state
    num_ready: int = 0

    def add(self, group: Group) -> None:
        """Take a new group in."""
        if group.group_id in self.groups or group.group_id in self.closed:
            raise LedgerError(f"group {group.group_id} opened twice")
        self.groups[group.group_id] = group
        self._count(group, +1)

    def find(self, episode_id: str) -> tuple[Group, Episode] | None:
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
        """Put the learner's word in the place of the scheduler's."""
        group_id, member = split_episode_id(episode_id)
        self.closed[group_id][member] = settled

    def set_state(self, group: Group, state: GroupState) -> None:
        """Move a group, keeping the counts."""
        self._count(group, -1)
        group.state = state
        self._count(group, +1)

    def settle(self, group: Group, episode: Episode, settled: Settled) -> None:
        """Write an episode's outcome."""
        group.num_settled += episode.settled is None
        episode.settled = settled
        episode.state = EpisodeState.SETTLED

    def close(self, group: Group) -> None:
        """Take a settled group out, remembering its outcomes for a while."""
        self._count(group, -1)
        del self.groups[group.group_id]
        self.closed[group.group_id] = [e.settled for e in group.episodes if e.settled is not None]
        while len(self.closed) > self.max_closed:
            self.closed.popitem(last=False)

    def _count(self, group: Group, change: int) -> None:
        if group.kind is not EpisodeKind.TRAIN:
            return
        self.num_open += change * (group.state is GroupState.OPEN)
        self.num_ready += change * (group.state is GroupState.READY)

    def episodes(self) -> Iterator[tuple[Group, Episode]]:
        """Yield every episode of the table, in the order of opening."""
        for group in self.groups.values():
            for episode in group.episodes:
                yield group, episode

    def num_in_flight(self, kind: EpisodeKind) -> int:
        """Count the episodes without outcome, from the table itself."""
        return sum(e.settled is None for g, e in self.episodes() if g.kind is kind)

    def snapshot(self) -> dict[str, Any]:
        """Return the exact state, times left out, as JSON."""
        return {
            "groups": [_group_to_json(group) for group in self.groups.values()],
            "closed": {
                group_id: [_settled_to_json(each) for each in settled]
                for group_id, settled in self.closed.items()
            },
        }

    def terms(self) -> dict[str, float]:
        """Return when each group was opened, where that is known."""
        groups = self.groups.values()
        return {g.group_id: g.opened_at for g in groups if g.opened_at is not None}

    def restore_terms(self, terms: dict[str, float]) -> None:
        """Take over the times of `terms`."""
        for group_id, opened_at in terms.items():
            self.groups[group_id].opened_at = opened_at

    def restore(self, state: dict[str, Any]) -> None:
        """Take over the state of `snapshot`."""
        self.groups = {}
        self.num_open = self.num_ready = 0
        self.closed = OrderedDict(
            (group_id, [_settled_from_json(each) for each in settled])
            for group_id, settled in state["closed"].items()
        )
        for entry in state["groups"]:
            self.add(_group_from_json(entry))


_EPISODE_FIELDS = ("env", "subset", "item_id", "seed", "horizon", "num_issues", "num_turns")
_LEASE_FIELDS = ("actor", "incarnation", "is_revoked")


def _group_to_json(group: Group) -> dict[str, Any]:
    return {
        "group_id": group.group_id,
        "number": group.number,
        "kind": group.kind.value,
        "policy": group.policy.value,
        "horizon_stage": group.horizon_stage,
        "opened_at_version": group.opened_at_version,
        "state": group.state.value,
        "episodes": [_episode_to_json(episode) for episode in group.episodes],
    }


def _episode_to_json(episode: Episode) -> dict[str, Any]:
    settled = episode.settled
    return {
        **{name: getattr(episode, name) for name in (*_EPISODE_FIELDS, *_LEASE_FIELDS)},
        "state": episode.state.value,
        "settled": None if settled is None else _settled_to_json(settled),
    }


def _settled_to_json(settled: Settled) -> list[Any]:
    cell = settled.cell
    place = [] if cell is None else [cell.env, cell.subset, cell.horizon, cell.bucket]
    return [settled.outcome, settled.cause, settled.is_given_up, *place]


def _settled_from_json(entry: list[Any]) -> Settled:
    outcome, cause, is_given_up, *place = entry
    cell = Cell(*place) if place else None
    return Settled(outcome=outcome, cause=cause, is_given_up=is_given_up, cell=cell)


def _group_from_json(entry: dict[str, Any]) -> Group:
    group_id = entry["group_id"]
    episodes = [
        Episode(
            episode_id=episode_id_of(group_id, member),
            member=member,
            **{name: each[name] for name in (*_EPISODE_FIELDS, *_LEASE_FIELDS)},
            state=EpisodeState(each["state"]),
            settled=None if each["settled"] is None else _settled_from_json(each["settled"]),
        )
        for member, each in enumerate(entry["episodes"])
    ]
    return Group(
        group_id=group_id,
        number=entry["number"],
        kind=EpisodeKind(entry["kind"]),
        policy=PolicyKind(entry["policy"]),
        horizon_stage=entry["horizon_stage"],
        opened_at_version=entry["opened_at_version"],
        episodes=episodes,
        state=GroupState(entry["state"]),
        num_settled=sum(e.settled is not None for e in episodes),
    )
