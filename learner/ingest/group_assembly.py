"""Assembles trajectories into groups and batches: completion, filter, and check of freshness."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from common.config.algorithm import AlgorithmSection
from common.config.groups import GroupsSection
from common.ids import is_below
from common.wire.messages import EpisodeOutcome, GroupArrived, Outcome, Trajectory
from learner.teacher.scores import TeacherScores


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The usable members of one prompt, ordered by member."""

    group_id: str
    members: list[Trajectory]
    # Scores of the teacher by episode; empty without a teacher.
    scores: Mapping[str, TeacherScores] = field(default_factory=dict[str, TeacherScores])


# Outcomes of members, and groups that are complete.
Decided = tuple[list[EpisodeOutcome], list[GroupArrived]]


@dataclass(slots=True)
class _OpenGroup:
    """A group whose members have not all arrived or been given up."""

    arrived: dict[int, Trajectory] = field(default_factory=dict)
    given_up: set[int] = field(default_factory=set)


def oldest_version(trajectory: Trajectory) -> int:
    """Return the version of the oldest sampled token, which defines the trajectory's lag."""
    # A token that was not sampled has -1, which is the largest unsigned value.
    return int(trajectory.versions.view(np.uint32).min())


def is_fresh(trajectory: Trajectory, learner_version: int, *, max_lag_steps: int) -> bool:
    """Return True if the trajectory may still be trained on; the current version has lag 0."""
    return learner_version - oldest_version(trajectory) <= max_lag_steps


class GroupAssembly:
    """Assembles groups and decides the outcome of every member. Not thread-safe.

    The scheduler decides how many groups make a batch; it counts the same groups.

    Example (size 4, min_size 2): a, b, c arrive, d ends in env_error -> the group is complete with
    three survivors, and d is `failed`. If all three solved the task, there is no signal: all are
    `filtered`. Otherwise the group is ready, and `take` returns it unless it is stale by then.
    """

    def __init__(
        self,
        cfg: GroupsSection,
        algorithm: AlgorithmSection,
        *,
        has_signal: Callable[[list[Trajectory]], bool],
        is_lockstep: bool = False,
        is_taught: bool = False,
    ) -> None:
        """Start without groups.

        Args:
            has_signal: returns False if all members have the same value for training.
            is_lockstep: take no batch before the scheduler has decided its size. Otherwise a batch
                has `per_step` groups unless the scheduler has decided on fewer.
            is_taught: complete groups with signal wait for `add_scores` before a batch takes them.
        """
        self._cfg = cfg
        self._filter = algorithm.filter_zero_variance
        self._has_signal = has_signal
        self._open: dict[str, _OpenGroup] = {}
        # Ids of completed groups; members that arrive later are in no batch.
        self._completed: set[str] = set()
        self._ready: deque[Group] = deque()
        self._is_taught = is_taught
        self._unscored: dict[str, Group] = {}  # Complete groups that wait for their teacher.
        self._new_unscored: list[Group] = []  # Those of them that `take_unscored` has not returned.
        self._num_undecided = 0 if is_lockstep else cfg.per_step
        self._decided_for = -1  # Learner version of the scheduler's last decision.
        self._num_decided = 0  # Groups in the batch after that version; 0: no batch yet.

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def num_unscored(self) -> int:
        """Number of complete groups that wait for their teacher."""
        return len(self._unscored)

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def open_ids(self) -> list[str]:
        return list(self._open)

    def add(self, trajectory: Trajectory) -> Decided:
        """Take one new trajectory; return the outcomes that it decides, often none."""
        if trajectory.group_id in self._completed:  # The member was given up before the arrival.
            return [_outcome(trajectory, Outcome.FAILED, "late")], []
        entry = self._open.setdefault(trajectory.group_id, _OpenGroup())
        entry.arrived[trajectory.member] = trajectory
        entry.given_up.discard(trajectory.member)
        return self._maybe_complete(trajectory.group_id, entry)

    def give_up(self, group_id: str, member: int) -> Decided:
        """Mark a member as never arriving. The scheduler decides the outcome of the member."""
        if group_id in self._completed:
            return [], []
        entry = self._open.setdefault(group_id, _OpenGroup())
        if member in entry.arrived:
            return [], []
        entry.given_up.add(member)
        return self._maybe_complete(group_id, entry)

    def mark_completed(self, group_id: str) -> Decided:
        """Mark a group as trained by an earlier learner; its unused members had failed."""
        if group_id in self._completed:
            return [], []
        self._completed.add(group_id)
        left = self._open.pop(group_id, _OpenGroup()).arrived.values()
        outcomes = [_outcome(t, Outcome.FAILED, t.end_reason.value) for t in left]
        return outcomes, [GroupArrived(group_id=group_id, is_ready=True)]

    def close_below(self, number: int) -> None:
        """Remove the groups with smaller numbers, which are permanently settled.

        After a restart the ready groups may include some that an earlier learner reported as stale.
        That report is final: no checkpoint needs the records of these groups any more.
        """
        self._completed = {each for each in self._completed if not is_below(each, number)}
        self._ready = deque(each for each in self._ready if not is_below(each.group_id, number))
        left = self._unscored.items()
        self._unscored = {name: each for name, each in left if not is_below(name, number)}

    def _maybe_complete(self, group_id: str, entry: _OpenGroup) -> Decided:
        """Decide a group whose members have all arrived or been given up."""
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
            self._complete(Group(group_id=group_id, members=survivors))
        return outcomes, [GroupArrived(group_id=group_id, is_ready=is_ready)]

    def _complete(self, group: Group) -> None:
        if not self._is_taught:
            self._ready.append(group)
            return
        self._unscored[group.group_id] = group
        self._new_unscored.append(group)

    def take_unscored(self) -> list[Group]:
        """Return the groups that need scores, each once."""
        taken = self._new_unscored
        self._new_unscored = []
        return taken

    def add_scores(self, group_id: str, scores: Mapping[str, TeacherScores]) -> None:
        """Make a group ready; one that was closed in the meantime is ignored."""
        group = self._unscored.pop(group_id, None)
        if group is not None:
            self._ready.append(replace(group, scores=scores))

    def decide(self, version: int, num_groups: int) -> None:
        """Store the scheduler's decision: so many ready groups make the batch after `version`."""
        self._decided_for = version
        self._num_decided = num_groups

    def is_batch_ready(self, version: int) -> bool:
        return 0 < self._num_needed(version) <= self.num_ready

    def _num_needed(self, version: int) -> int:
        """Return how many ready groups make the batch after `version`."""
        return self._num_decided if version == self._decided_for else self._num_undecided

    def take(
        self,
        version: int,
        *,
        max_lag_steps: int,
        in_order: bool,
        lag_bounds: Mapping[tuple[str, int], int] | None = None,
    ) -> tuple[list[Group], list[EpisodeOutcome]]:
        """Remove a batch of groups, and all stale members before it.

        Args:
            version: learner version; the batch trains step version + 1.
            max_lag_steps: largest lag of the oldest token of an episode.
            in_order: sort by group id, so that the order of arrival has no effect.
            lag_bounds: (environment, horizon) -> bound that replaces `max_lag_steps`.

        Returns:
            (groups to train on, outcomes of stale episodes). No groups if too few for a batch are
            fresh; the fresh ones stay.
        """
        if not self.is_batch_ready(version):
            return [], []
        if in_order:
            self._ready = deque(sorted(self._ready, key=lambda group: group.group_id))
        taken: list[Group] = []
        outcomes: list[EpisodeOutcome] = []
        while self._ready and len(taken) < self._cfg.per_step:
            group = self._ready.popleft()
            first = group.members[0]  # The members share environment and horizon.
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
        """Return a group without its stale members, and the outcomes of these."""
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
        return replace(group, members=fresh), outcomes


def _outcome(trajectory: Trajectory, outcome: Outcome, cause: str) -> EpisodeOutcome:
    return EpisodeOutcome(episode_id=trajectory.episode_id, outcome=outcome, cause=cause)
