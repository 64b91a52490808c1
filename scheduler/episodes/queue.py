"""The queue of episodes to grant; it keeps the members of a group together."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from scheduler.episodes.table import EpisodePhase, EpisodeRecord, GroupRecord, GroupTable
from scheduler.state import FIXED

Taken = list[tuple[GroupRecord, EpisodeRecord]]
IsAllowed = Callable[[GroupRecord], bool]


@dataclass(slots=True)
class PendingGroup:
    """A group with members to grant. Members that are no longer queued are skipped."""

    members: deque[int]
    # Actor that got the first member and has priority for the rest; "" without one.
    owner: str = ""


@dataclass(slots=True)
class EpisodeQueue:
    """Keeps the members of a group together, and with one actor if possible.

    The episodes of an evaluation have different items, so such a group never has an owner.

    Example: actor a (3 slots) asks and gets g0/0..2, so it owns g0. Actor b (8 slots) asks and gets
    g1. The rest of g0 is reserved for a, until the queue has nothing else for b.
    """

    table: GroupTable = field(metadata=FIXED)
    pending: dict[str, PendingGroup] = field(default_factory=dict[str, PendingGroup])
    free: deque[str] = field(default_factory=deque[str])  # Ids of groups without an owner.
    # Actor -> ids of the groups that the actor owns.
    owned: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def put(self, group_id: str, members: Iterable[int], *, is_first: bool = False) -> None:
        """Queue members of a group; at the front if they were lost before."""
        pending = self.pending.get(group_id)
        if pending is None:
            pending = self.pending[group_id] = PendingGroup(members=deque())
        else:
            self._unlist(group_id, pending)
            pending.owner = ""
        new = list(members)
        for member in new:  # A member that was reclaimed and lost again may still be in the queue.
            if member in pending.members:
                pending.members.remove(member)
        if is_first:
            self.free.appendleft(group_id)
            pending.members.extendleft(reversed(new))
        else:
            self.free.append(group_id)
            pending.members.extend(new)

    def take(
        self, actor: str, num: int, *, is_allowed: IsAllowed, absent: Sequence[str] = ()
    ) -> Taken:
        """Remove up to `num` queued episodes: first of the actor's groups, then of free groups.

        Args:
            absent: environments whose episodes stay in the queue.
        """
        taken: Taken = []
        for source in (list(self.owned.get(actor, ())), list(self.free)):
            self._take_from(source, actor, num, is_allowed, absent, taken)
            if len(taken) == num:
                break
        return taken

    def steal(
        self, actor: str, num: int, *, is_allowed: IsAllowed, absent: Sequence[str] = ()
    ) -> Taken:
        """Remove up to `num` queued episodes of any group, including groups of other actors.

        Args: as in `take`.
        """
        taken: Taken = []
        self._take_from(list(self.pending), actor, num, is_allowed, absent, taken)
        return taken

    def _take_from(
        self,
        group_ids: list[str],
        actor: str,
        num: int,
        is_allowed: IsAllowed,
        absent: Sequence[str],
        taken: Taken,
    ) -> None:
        """Move queued episodes of these groups to `taken`, up to `num` in total."""
        for group_id in group_ids:
            if len(taken) == num:
                return
            pending = self.pending[group_id]
            group = self.table.groups[group_id]
            if not is_allowed(group):
                continue
            stay = []
            num_before = len(taken)
            while pending.members and len(taken) < num:
                episode = group.episodes[pending.members.popleft()]
                if episode.state is not EpisodePhase.QUEUED:
                    continue
                if episode.env in absent:
                    stay.append(episode.member)
                else:
                    taken.append((group, episode))
            pending.members.extendleft(reversed(stay))
            if not pending.members:
                self.remove(group_id)
            elif not pending.owner and group.is_train and len(taken) > num_before:
                self.free.remove(group_id)
                pending.owner = actor
                self.owned.setdefault(actor, []).append(group_id)

    def remove(self, group_id: str) -> None:
        """Remove a group of which no more members will be granted."""
        pending = self.pending.pop(group_id, None)
        if pending is not None:
            self._unlist(group_id, pending)

    def _unlist(self, group_id: str, pending: PendingGroup) -> None:
        """Remove a group from the list of its owner, or of free groups."""
        (self.owned[pending.owner] if pending.owner else self.free).remove(group_id)

    def disown(self, actor: str) -> None:
        """Release the groups of a lost actor, so that any actor can get the rest of them."""
        for group_id in reversed(self.owned.pop(actor, [])):
            self.pending[group_id].owner = ""
            self.free.appendleft(group_id)
