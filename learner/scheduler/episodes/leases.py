"""Who plays what: the queue of episodes to be granted, and the leases that are out."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from common.wire.messages import EpisodeKind
from learner.scheduler.episodes.table import Episode, EpisodeState, Group, GroupTable


@dataclass(slots=True)
class _Pending:
    """A group with members to be granted. Members that are no longer queued are skipped."""

    group: Group
    members: deque[int]
    owner: str  # actor that got the first member and should get the rest; "" for nobody yet


class LeaseBook:
    """The queue keeps the members of a group together, and with one actor where possible.

    The episodes of an evaluation are of different items; they are everybody's from the start.

    Example: a (3 slots) asks and gets g0/0..2, so it owns g0. b (8 slots) asks and gets g1. The
    rest of g0 waits for a, until nothing else is left for b to take.
    """

    def __init__(self, *, lease_s: float) -> None:
        self._lease_s = lease_s
        self._pending: dict[str, _Pending] = {}
        self._free: deque[str] = deque()  # ids of groups that nobody owns
        self._owned: dict[str, dict[str, None]] = {}  # actor -> ids of groups
        self._leased: dict[str, dict[str, Episode]] = {}  # actor -> episode id -> episode

    def enqueue(self, group: Group, episodes: Iterable[Episode], *, is_first: bool = False) -> None:
        """Put queued members of a group up for grant; first if they were lost before."""
        group_id = group.group_id
        pending = self._pending.get(group_id)
        if pending is None:
            pending = _Pending(group=group, members=deque(), owner="")
            self._pending[group_id] = pending
        elif pending.owner:
            self._owned[pending.owner].pop(group_id, None)
            pending.owner = ""
        else:
            self._free.remove(group_id)
        members = [episode.member for episode in episodes]
        for member in members:  # taken back and lost again, it may still stand in the queue
            if member in pending.members:
                pending.members.remove(member)
        if is_first:
            self._free.appendleft(group_id)
            pending.members.extendleft(reversed(members))
        else:
            self._free.append(group_id)
            pending.members.extend(members)

    def take(
        self, actor: str, num: int, *, is_allowed: Callable[[Group], bool]
    ) -> list[tuple[Group, Episode]]:
        """Remove up to `num` queued episodes: of the actor's groups, then of nobody's."""
        taken: list[tuple[Group, Episode]] = []
        for source in (list(self._owned.get(actor, ())), list(self._free)):
            self._take_from(source, actor, num, is_allowed, taken)
            if len(taken) == num:
                break
        return taken

    def steal(
        self, actor: str, num: int, *, is_allowed: Callable[[Group], bool]
    ) -> list[tuple[Group, Episode]]:
        """Remove up to `num` queued episodes of whatever group, also other actors'."""
        taken: list[tuple[Group, Episode]] = []
        self._take_from(list(self._pending), actor, num, is_allowed, taken)
        return taken

    def _take_from(
        self,
        group_ids: list[str],
        actor: str,
        num: int,
        is_allowed: Callable[[Group], bool],
        taken: list[tuple[Group, Episode]],
    ) -> None:
        for group_id in group_ids:
            if len(taken) == num:
                return
            pending = self._pending[group_id]
            if not is_allowed(pending.group):
                continue
            while pending.members and len(taken) < num:
                episode = pending.group.episodes[pending.members.popleft()]
                if episode.state is EpisodeState.QUEUED:
                    taken.append((pending.group, episode))
            if not pending.members:
                self._forget(pending)
            elif not pending.owner and pending.group.kind is EpisodeKind.TRAIN:
                self._free.remove(group_id)
                self._own(pending, actor)

    def _own(self, pending: _Pending, actor: str) -> None:
        pending.owner = actor
        self._owned.setdefault(actor, {})[pending.group.group_id] = None

    def _forget(self, pending: _Pending) -> None:
        group_id = pending.group.group_id
        del self._pending[group_id]
        if pending.owner:
            self._owned[pending.owner].pop(group_id, None)
        else:
            self._free.remove(group_id)

    def drop_group(self, group: Group) -> None:
        """Nothing of this group will be granted any more."""
        if (pending := self._pending.get(group.group_id)) is not None:
            self._forget(pending)

    def lease(self, episode: Episode, *, actor: str, incarnation: str, now: float) -> None:
        """Write the lease down. The caller counts the issue."""
        episode.state = EpisodeState.LEASED
        episode.actor, episode.incarnation = actor, incarnation
        episode.granted_at, episode.is_revoked = now, False
        self._leased.setdefault(actor, {})[episode.episode_id] = episode
        self.renew(episode, now=now)

    def renew(self, episode: Episode, *, now: float) -> None:
        """The actor has it in work: the lease begins anew."""
        episode.deadline = now + self._lease_s
        episode.listed_at = now
        episode.num_missed = 0

    def release(self, episode: Episode) -> None:
        """End the lease, if there is one. The caller enqueues the episode or moves it on."""
        if episode.state is EpisodeState.LEASED:
            del self._leased[episode.actor][episode.episode_id]
            episode.state = EpisodeState.QUEUED
        episode.actor = episode.incarnation = ""
        episode.granted_at, episode.is_revoked = None, False

    def leased_to(self, actor: str) -> list[Episode]:
        """Return the episodes that this actor should be playing."""
        return list(self._leased.get(actor, {}).values())

    def num_leased_to(self, actor: str) -> int:
        """Episodes that this actor should be playing."""
        return len(self._leased.get(actor, ()))

    def overdue(self, now: float) -> list[Episode]:
        """Return the episodes whose lease has ended."""
        return [e for out in self._leased.values() for e in out.values() if e.deadline < now]

    def disown(self, actor: str) -> None:
        """The actor is gone: the rest of its groups is anybody's again."""
        for group_id in reversed(self._owned.pop(actor, {})):
            self._pending[group_id].owner = ""
            self._free.appendleft(group_id)
        if not self._leased.get(actor):
            self._leased.pop(actor, None)

    @property
    def num_leased(self) -> int:
        """Leases that are out."""
        return sum(len(out) for out in self._leased.values())

    def snapshot(self) -> dict[str, Any]:
        """Return queue and leases in their exact order, times left out, as JSON."""
        return {
            "pending": [
                [group_id, list(pending.members), pending.owner]
                for group_id, pending in self._pending.items()
            ],
            "free": list(self._free),
            "owned": {actor: list(groups) for actor, groups in self._owned.items()},
            "leased": {actor: list(out) for actor, out in self._leased.items()},
        }

    def restore(self, state: dict[str, Any], table: GroupTable, *, now: float) -> None:
        """Take over the state of `snapshot` for a restored table; every lease begins anew."""
        self._pending = {
            group_id: _Pending(group=table.groups[group_id], members=deque(members), owner=owner)
            for group_id, members, owner in state["pending"]
        }
        self._free = deque(state["free"])
        self._owned = {actor: dict.fromkeys(ids) for actor, ids in state["owned"].items()}
        self._leased = {}
        for actor, episode_ids in state["leased"].items():
            out = self._leased.setdefault(actor, {})
            for episode_id in episode_ids:
                found = table.find(episode_id)
                assert found is not None, f"lease of {episode_id} without an episode"
                out[episode_id] = found[1]
                self.renew(found[1], now=now)

    def terms(self) -> dict[str, list[float | None]]:
        """Return the times of every lease, by episode id."""
        return {
            e.episode_id: [e.deadline, e.listed_at, e.num_missed, e.granted_at]
            for out in self._leased.values()
            for e in out.values()
        }

    def restore_terms(self, terms: dict[str, list[Any]]) -> None:
        """Take over the times of `terms`."""
        for out in self._leased.values():
            for e in out.values():
                e.deadline, e.listed_at, e.num_missed, e.granted_at = terms[e.episode_id]
