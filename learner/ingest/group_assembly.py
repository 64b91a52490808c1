"""Trajectories -> groups -> batches: complete, repair, filter, and check freshness."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from common.config.learning import AlgorithmSection
from common.config.run_config import GroupsSection
from common.ids import is_below
from common.wire.messages import EpisodeOutcome, GroupArrived, Outcome, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The usable members of one prompt, ordered by member."""

    group_id: str
    members: list[Trajectory]


Decided = tuple[list[EpisodeOutcome], list[GroupArrived]]  # members, and groups that are complete


@dataclass(slots=True)
class _Open:
    arrived: dict[int, Trajectory] = field(default_factory=dict)
    given_up: set[int] = field(default_factory=set)


def oldest_version(trajectory: Trajectory) -> int:
    """Return the version of the oldest sampled token: a trajectory is as old as that."""
    return int(trajectory.versions.view(np.uint32).min())  # what was not sampled is -1: the largest


def is_fresh(trajectory: Trajectory, learner_version: int, *, max_lag_steps: int) -> bool:
    """Return True if the trajectory may still train; what the current weights sampled has lag 0."""
    return learner_version - oldest_version(trajectory) <= max_lag_steps


class GroupAssembly:
    """Assembles groups and decides, for every member, what becomes of it. Not thread-safe.

    How many of them make a batch is the scheduler's decision, which counts the same groups.

    Example (size 4, min_size 2): a, b, c arrive, d ends in env_error -> the group is complete with
    three survivors, d is `failed`. All three solved the task -> no signal, all `filtered`.
    Otherwise the group is ready, and `take` hands it out unless it has grown stale by then.
    """

    def __init__(
        self,
        cfg: GroupsSection,
        algorithm: AlgorithmSection,
        *,
        has_signal: Callable[[list[Trajectory]], bool],
        is_lockstep: bool = False,
    ) -> None:
        """Make an empty table.

        Args:
            has_signal: False for members that are all worth the same.
            is_lockstep: no batch is taken before the scheduler has decided on it. Otherwise it has
                `per_step` groups unless the scheduler says that it must be short.
        """
        self._cfg = cfg
        self._filter = algorithm.filter_zero_variance
        self._has_signal = has_signal
        self._open: dict[str, _Open] = {}
        self._completed: set[str] = set()  # what comes later is in no batch
        self._ready: deque[Group] = deque()
        self._num_undecided = 0 if is_lockstep else cfg.per_step
        self._decided_for = -1  # learner version
        self._num_decided = 0  # groups of the batch after that version; 0: none yet

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def open_ids(self) -> list[str]:
        return list(self._open)

    def add(self, trajectory: Trajectory) -> Decided:
        """Take one new trajectory; return what is decided by it, often nothing yet."""
        if trajectory.group_id in self._completed:  # it was given up, and came after all
            return [_outcome(trajectory, Outcome.FAILED, "late")], []
        entry = self._open.setdefault(trajectory.group_id, _Open())
        entry.arrived[trajectory.member] = trajectory
        entry.given_up.discard(trajectory.member)
        return self._maybe_complete(trajectory.group_id, entry)

    def give_up(self, group_id: str, member: int) -> Decided:
        """Learn that a member will never arrive. Its own outcome is the scheduler's."""
        if group_id in self._completed:
            return [], []
        entry = self._open.setdefault(group_id, _Open())
        if member in entry.arrived:
            return [], []
        entry.given_up.add(member)
        return self._maybe_complete(group_id, entry)

    def mark_completed(self, group_id: str) -> Decided:
        """Learn that a previous learner trained on this group; what it left over had failed."""
        if group_id in self._completed:
            return [], []
        self._completed.add(group_id)
        left = self._open.pop(group_id, _Open()).arrived.values()
        outcomes = [_outcome(t, Outcome.FAILED, t.end_reason.value) for t in left]
        return outcomes, [GroupArrived(group_id=group_id, is_ready=True)]

    def close_below(self, number: int) -> None:
        """Forget the groups of smaller numbers, which are settled for good.

        A group that a learner before this one called stale is among the ready ones again after a
        restart. What it said stands: no checkpoint keeps the group's records any more.
        """
        self._completed = {each for each in self._completed if not is_below(each, number)}
        self._ready = deque(each for each in self._ready if not is_below(each.group_id, number))

    def _maybe_complete(self, group_id: str, entry: _Open) -> Decided:
        if len(entry.arrived) + len(entry.given_up) < self._cfg.size:
            return [], []
        del self._open[group_id]
        self._completed.add(group_id)
        outcomes: list[EpisodeOutcome] = []
        survivors: list[Trajectory] = []
        for member in sorted(entry.arrived):
            trajectory = entry.arrived[member]
            if trajectory.end_reason.is_infrastructure_failure:
                outcomes.append(_outcome(trajectory, Outcome.FAILED, trajectory.end_reason.value))
            else:
                survivors.append(trajectory)
        is_ready = False
        if len(survivors) < self._cfg.min_size:
            outcomes += [_outcome(t, Outcome.FAILED, "group_damaged") for t in survivors]
        elif self._filter and not self._has_signal(survivors):
            outcomes += [_outcome(t, Outcome.FILTERED, "zero_variance") for t in survivors]
        else:
            is_ready = True
            self._ready.append(Group(group_id=group_id, members=survivors))
        return outcomes, [GroupArrived(group_id=group_id, is_ready=is_ready)]

    def decide(self, version: int, num_groups: int) -> None:
        """Take the scheduler's decision: so many ready groups make the batch after `version`."""
        self._decided_for, self._num_decided = version, num_groups

    def is_batch_ready(self, version: int) -> bool:
        return 0 < self._num_needed(version) <= self.num_ready

    def _num_needed(self, version: int) -> int:
        return self._num_decided if version == self._decided_for else self._num_undecided

    def take(
        self,
        version: int,
        *,
        max_lag_steps: int,
        in_order: bool,
        lag_bounds: Mapping[tuple[str, int], int] | None = None,
    ) -> tuple[list[Group], list[EpisodeOutcome]]:
        """Remove a batch of groups, and whatever has grown stale.

        Args:
            version: of the learner, about to train step version + 1.
            max_lag_steps: how old the oldest token of an episode may be.
            in_order: sort by group id, so that arrival order plays no role.
            lag_bounds: by environment and horizon, where another bound holds.

        Returns:
            (groups to train on, outcomes of the stale). No groups if, without the stale, there
            are too few for a batch: the fresh ones stay.
        """
        if not self.is_batch_ready(version):
            return [], []
        if in_order:
            self._ready = deque(sorted(self._ready, key=lambda group: group.group_id))
        taken: list[Group] = []
        outcomes: list[EpisodeOutcome] = []
        while self._ready and len(taken) < self._cfg.per_step:
            group = self._ready.popleft()
            first = group.members[0]  # the members share environment and horizon
            bound = (lag_bounds or {}).get((first.env, first.horizon), max_lag_steps)
            group, dropped = self._without_stale(group, version, bound)
            outcomes += dropped
            if group.members:
                taken.append(group)
        if len(taken) < self._num_needed(version):
            self._ready.extendleft(reversed(taken))
            return [], outcomes
        return taken, outcomes

    def _without_stale(
        self, group: Group, version: int, max_lag_steps: int
    ) -> tuple[Group, list[EpisodeOutcome]]:
        fresh: list[Trajectory] = []
        outcomes: list[EpisodeOutcome] = []
        for trajectory in group.members:
            if is_fresh(trajectory, version, max_lag_steps=max_lag_steps):
                fresh.append(trajectory)
            else:
                outcomes.append(_outcome(trajectory, Outcome.STALE, "lag"))
        if len(fresh) < self._cfg.min_size:
            outcomes += [_outcome(t, Outcome.STALE, "lag_of_group") for t in fresh]
            fresh = []
        return Group(group_id=group.group_id, members=fresh), outcomes


def _outcome(trajectory: Trajectory, outcome: Outcome, cause: str) -> EpisodeOutcome:
    return EpisodeOutcome(episode_id=trajectory.episode_id, outcome=outcome, cause=cause)
