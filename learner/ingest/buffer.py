"""The buffer between journal and training step: groups, batches, and outcomes of episodes."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from common.config.algorithm import AlgorithmSection
from common.config.groups import GroupsSection
from common.errors import ConfigError, LongstrideError
from common.ids import episode_id_of, is_below, split_episode_id
from common.segments import first_fresh_turn, part_of
from common.store.disk import DiskFull
from common.text import counted
from common.wire.messages import (
    USER_FILTER,
    EpisodeKind,
    EpisodeOutcome,
    EpisodeSeen,
    GroupArrived,
    Outcome,
    Outcomes,
    Progress,
    StepDone,
    Trajectory,
)
from learner.ingest.episode_stats import EpisodeStats
from learner.ingest.journal_index import JournalIndex, ReplayPoint
from learner.ingest.reports import ReportLog
from learner.journal.journal import JournalPosition
from learner.recovery.reward_log import GroupReward
from learner.recovery.step_log import PartName
from learner.teacher.scores import TeacherScores
from learner.weights.canary import RecentPrompts

GROUP_REWARD = "group_reward"  # Cause of a failure: a function over the group gave no rewards.
POLL_S = 0.05  # Seconds between two checks of the conditions that end a wait.


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The usable members of one prompt, ordered by member."""

    group_id: str
    members: list[Trajectory]
    # Scores of the teacher by episode; empty without a teacher.
    scores: Mapping[str, TeacherScores] = field(default_factory=dict[str, TeacherScores])
    # True for a part of an episode that is trained before its group.
    is_early: bool = False
    # Sampled tokens that earlier steps trained, and stale ones, by episode; 0 if absent.
    num_trained: Mapping[str, int] = field(default_factory=dict[str, int])
    num_stale: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def names(self) -> list[str]:
        """The members as the step log names them."""
        return [PartName.of(each, is_early=self.is_early).text for each in self.members]

    def outcomes(self, outcome: Outcome, cause: str = "") -> list[EpisodeOutcome]:
        """Return the outcome of every member; an early part decides none.

        An episode is trained if a part of it was trained. Its other tokens are then stale.
        """
        return (
            [] if self.is_early else [self._outcome(each, outcome, cause) for each in self.members]
        )

    def _outcome(self, trajectory: Trajectory, outcome: Outcome, cause: str) -> EpisodeOutcome:
        name = trajectory.episode_id
        num_stale = self.num_stale.get(name, 0)
        if outcome is not Outcome.TRAINED:
            if not self.num_trained.get(name, 0):
                return _outcome(trajectory, outcome, cause)
            num_stale += int(np.count_nonzero(trajectory.loss_mask))
        trained = _outcome(trajectory, Outcome.TRAINED, "")
        return replace(trained, num_stale_tokens=num_stale)


# Members of a group -> their pending scores by a teacher, in order.
ScoreGroup = Callable[[Sequence[Trajectory]], Future[list[TeacherScores]]]
# Members of a group -> their pending rewards by functions over the group.
RewardGroup = Callable[[Sequence[Trajectory]], Future[GroupReward]]
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
    `filtered`. Otherwise the group is ready, and `take` returns it unless it is stale by then. With
    functions over groups, a, b and c first wait for their rewards, which then decide the signal.

    Example (by turn, bound 2): the turns of a have the versions 3, 4, 5, 6. `take` at version 7
    returns a with its first two turns as context. With `trains_early`, a has sent the turns of
    versions 3 and 4 before, and `take` at version 5 has returned them as an early part.
    """

    def __init__(
        self,
        cfg: GroupsSection,
        algorithm: AlgorithmSection,
        *,
        has_signal: Callable[[list[Trajectory]], bool],
        keeps: Callable[[list[Trajectory]], bool] | None = None,
        is_lockstep: bool = False,
        is_taught: bool = False,
        is_compared: bool = False,
        is_by_turn: bool = False,
        trains_early: bool = False,
    ) -> None:
        """Start without groups.

        Args:
            has_signal: returns False if all members have the same value for training.
            keeps: the user's filter of groups with signal; None keeps all of them.
            is_lockstep: take no batch before the scheduler has decided its size. Otherwise a batch
                has `per_step` groups unless the scheduler has decided on fewer.
            is_taught: complete groups with signal wait for `add_scores` before a batch takes them.
            is_compared: groups whose members have ended wait for `add_rewards`, then are complete.
            is_by_turn: decide staleness for each turn; stale turns of an episode are context.
            trains_early: train turns outside of the batch at the last step that accepts them.
        """
        self._is_by_turn = is_by_turn
        self._trains_early = trains_early
        self._unfinished: dict[str, Trajectory] = {}  # Newest part of each running episode.
        # Parts by episode that were trained before the group.
        self._trained: dict[str, list[PartName]] = {}
        self._in_step: set[str] = set()  # Episodes with an early part in the current step.
        self._decided_in_step: list[Trajectory] = []  # Those that were decided during the step.
        self._cfg = cfg
        self._filter = algorithm.filter_zero_variance
        self._has_signal = has_signal
        self._keeps = keeps
        self._open: dict[str, _OpenGroup] = {}
        # Ids of completed groups; members that arrive later are in no batch.
        self._completed: set[str] = set()
        self._ready: deque[Group] = deque()
        self._is_compared = is_compared
        self._unrewarded: dict[str, Group] = {}  # Groups that wait for rewards over the group.
        self._new_unrewarded: list[Group] = []  # Those that `take_unrewarded` has not returned.
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
    def num_unrewarded(self) -> int:
        """Number of groups that wait for the rewards over the group."""
        return len(self._unrewarded)

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
        self._unfinished.pop(trajectory.episode_id, None)
        entry = self._open.setdefault(trajectory.group_id, _OpenGroup())
        entry.arrived[trajectory.member] = trajectory
        entry.given_up.discard(trajectory.member)
        return self._maybe_complete(trajectory.group_id, entry)

    def add_part(self, trajectory: Trajectory) -> None:
        """Take the turns so far of an episode that has not ended. They replace an earlier part."""
        entry = self._open.get(trajectory.group_id, _OpenGroup())
        ended = entry.arrived.keys() | entry.given_up
        is_over = trajectory.group_id in self._completed or trajectory.member in ended
        if self._trains_early and not is_over:
            self._unfinished[trajectory.episode_id] = trajectory

    def note_trained(self, groups: Iterable[Group]) -> list[EpisodeOutcome]:
        """Record the early parts that a step has trained.

        Returns: new outcomes of their episodes that were decided since `take`.
        """
        self.adopt_parts([group.names for group in groups if group.is_early])
        decided = [each for each in self._decided_in_step if self._num_trained(each)]
        self._in_step = set()
        self._decided_in_step = []
        return [self._outcome(each, Outcome.TRAINED, "") for each in decided]

    def adopt_parts(self, names: Iterable[Iterable[str]]) -> None:
        """Record the early parts among the logged names of a step's groups."""
        for part in (PartName.parse(name) for ids in names for name in ids):
            if part.is_early:
                self._trained.setdefault(part.episode_id, []).append(part)

    def give_up(self, group_id: str, member: int) -> Decided:
        """Mark a member as never arriving. The scheduler decides the outcome of the member."""
        self._unfinished.pop(episode_id_of(group_id, member), None)
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
        outcomes = [self._outcome(t, Outcome.FAILED, t.end_reason.value) for t in left]
        return outcomes, [GroupArrived(group_id=group_id, is_ready=True)]

    def close_below(self, number: int) -> None:
        """Remove the groups with smaller numbers, which are permanently settled.

        After a restart the ready groups may include some that an earlier learner reported as stale.
        That report is final: no checkpoint needs the records of these groups any more.
        """
        self._completed = {name for name in self._completed if not is_below(name, number)}
        self._ready = deque(g for g in self._ready if not is_below(g.group_id, number))
        left = self._unscored.items()
        self._unscored = {name: each for name, each in left if not is_below(name, number)}
        left = self._unrewarded.items()
        self._unrewarded = {name: each for name, each in left if not is_below(name, number)}
        self._trained = {n: each for n, each in self._trained.items() if not is_below(n, number)}
        self._unfinished = {
            name: each for name, each in self._unfinished.items() if not is_below(name, number)
        }

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
                reason = trajectory.end_reason.value
                outcomes.append(self._outcome(trajectory, Outcome.FAILED, reason))
            else:
                survivors.append(trajectory)
        group = Group(group_id=group_id, members=survivors)
        if len(survivors) < self._cfg.min_size:
            outcomes += [self._outcome(t, Outcome.FAILED, "group_damaged") for t in survivors]
            return outcomes, [GroupArrived(group_id=group_id, is_ready=False)]
        if self._is_compared:
            self._unrewarded[group_id] = group
            self._new_unrewarded.append(group)
            return outcomes, []
        decided, arrived = self._decide(group)
        return outcomes + decided, arrived

    def _decide(self, group: Group) -> Decided:
        """Decide whether the rewards of a group have signal."""
        if self._filter and not self._has_signal(group.members):
            outcomes = [_outcome(t, Outcome.FILTERED, "zero_variance") for t in group.members]
            return outcomes, [GroupArrived(group_id=group.group_id, is_ready=False)]
        if self._keeps is not None and not self._keeps(group.members):
            outcomes = [_outcome(t, Outcome.FILTERED, USER_FILTER) for t in group.members]
            return outcomes, [GroupArrived(group_id=group.group_id, is_ready=False)]
        self._complete(group)
        return [], [GroupArrived(group_id=group.group_id, is_ready=True)]

    def take_unrewarded(self) -> list[Group]:
        """Return the groups that need rewards, each once."""
        taken = self._new_unrewarded
        self._new_unrewarded = []
        return taken

    def add_rewards(self, reward: GroupReward) -> Decided:
        """Decide a group by its rewards; one that was closed in the meantime is ignored."""
        group = self._unrewarded.pop(reward.group_id, None)
        if group is None:
            return [], []
        if reward.error:
            failed = [
                replace(_outcome(each, Outcome.FAILED, GROUP_REWARD), error=reward.error[:1_000])
                for each in group.members
            ]
            return failed, [GroupArrived(group_id=group.group_id, is_ready=False)]
        return self._decide(replace(group, members=[reward.applied(t) for t in group.members]))

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
        is_narrow: bool = False,
    ) -> tuple[list[Group], list[EpisodeOutcome]]:
        """Remove a batch of groups, and all stale members before it.

        Args:
            version: learner version; the batch trains step version + 1.
            max_lag_steps: largest lag of the oldest token of an episode.
            in_order: sort by group id, so that the order of arrival has no effect.
            lag_bounds: (environment, horizon) -> bound that replaces `max_lag_steps`.
            is_narrow: the next step accepts older groups, so that no part needs this one.

        Returns:
            (groups to train on, outcomes of stale episodes). No groups if too few for a batch are
            fresh; the fresh ones stay.
        """
        if not self.is_batch_ready(version):
            return [], []
        self._in_step = set()
        self._decided_in_step = []
        if in_order:
            self._ready = deque(sorted(self._ready, key=lambda group: group.group_id))
        taken: list[Group] = []
        outcomes: list[EpisodeOutcome] = []
        while self._ready and len(taken) < self._cfg.per_step:
            group = self._ready.popleft()
            # The members share environment and horizon.
            bound = _bound_of(group.members[0], max_lag_steps, lag_bounds)
            group, dropped = self._without_stale(group, version, bound)
            outcomes += dropped
            if group.members:
                taken.append(group)
        if len(taken) < self._num_needed(version):
            self._ready.extendleft(reversed(taken))
            return [], outcomes
        if self._has_parts:
            taken = [
                self._as_parts(
                    group, version, _bound_of(group.members[0], max_lag_steps, lag_bounds)
                )
                for group in taken
            ]
        if not self._trains_early or is_narrow:
            return taken, outcomes
        early = self._early_parts(version, max_lag_steps, lag_bounds)
        self._in_step = {member.episode_id for part in early for member in part.members}
        return taken + early, outcomes

    def _without_stale(
        self, group: Group, version: int, max_lag_steps: int
    ) -> tuple[Group, list[EpisodeOutcome]]:
        """Return a group without its stale members, and the outcomes of these."""
        fresh: list[Trajectory] = []
        outcomes: list[EpisodeOutcome] = []
        for trajectory in group.members:
            if self._is_trainable(trajectory, version, max_lag_steps):
                fresh.append(trajectory)
            else:
                outcomes.append(self._outcome(trajectory, Outcome.STALE, "lag"))
        num_trained = sum(each.outcome is Outcome.TRAINED for each in outcomes)
        if len(fresh) + num_trained < self._cfg.min_size:
            outcomes += [self._outcome(t, Outcome.STALE, "lag_of_group") for t in fresh]
            fresh = []
        return replace(group, members=fresh), outcomes

    # --- parts of episodes ------------------------------------------------------------------

    @property
    def _has_parts(self) -> bool:
        """Whether turns may be context; also after a restart with `partial_episodes=off`."""
        return self._is_by_turn or bool(self._trained)

    def _is_trainable(self, trajectory: Trajectory, version: int, max_lag_steps: int) -> bool:
        """Return True if the trajectory, or a turn of it, may still be trained on."""
        if not self._has_parts:
            return is_fresh(trajectory, version, max_lag_steps=max_lag_steps)
        first = self._first_turn(trajectory, version, max_lag_steps)
        return bool((trajectory.loss_mask & (trajectory.turn_ids >= first)).any())

    def _first_turn(self, trajectory: Trajectory, version: int, max_lag_steps: int) -> int:
        """Return the first turn after those that were trained or are stale."""
        fresh = first_fresh_turn(trajectory, least_version=version - max_lag_steps)
        return max([fresh, *(part.end_turn for part in self._parts_in(trajectory))])

    def _parts_in(self, trajectory: Trajectory) -> list[PartName]:
        """Return the trained parts of an episode. One that began anew does not have them."""
        parts = self._trained.get(trajectory.episode_id, [])
        if not len(trajectory.token_ids):  # A failure such as `too_large` has lost its tokens.
            return parts
        return [part for part in parts if part.is_in(trajectory)]

    def _num_trained(self, trajectory: Trajectory) -> int:
        """Return the number of an episode's sampled tokens that early parts have trained."""
        return sum(part.num_tokens for part in self._parts_in(trajectory))

    def _outcome(self, trajectory: Trajectory, outcome: Outcome, cause: str) -> EpisodeOutcome:
        """Return the outcome of an episode that no further step trains."""
        if trajectory.episode_id in self._in_step:
            self._decided_in_step.append(trajectory)
        counts = {trajectory.episode_id: self._num_trained(trajectory)} if self._trained else {}
        num_done = sum(counts.values())
        if not num_done:
            return _outcome(trajectory, outcome, cause)
        num_stale = max(0, int(np.count_nonzero(trajectory.loss_mask)) - num_done)
        return replace(_outcome(trajectory, Outcome.TRAINED, ""), num_stale_tokens=num_stale)

    def _as_parts(self, group: Group, version: int, max_lag_steps: int) -> Group:
        """Return a group whose members have their trained and stale turns as context."""
        members: list[Trajectory] = []
        num_trained: dict[str, int] = {}
        num_stale: dict[str, int] = {}
        for whole in group.members:
            part = part_of(whole, self._first_turn(whole, version, max_lag_steps))
            members.append(part)
            if part is whole:
                continue
            name = whole.episode_id
            num_trained[name] = self._num_trained(whole)
            num_left = np.count_nonzero(whole.loss_mask) - np.count_nonzero(part.loss_mask)
            num_stale[name] = int(num_left) - num_trained[name]
        return replace(group, members=members, num_trained=num_trained, num_stale=num_stale)

    def _early_parts(
        self, version: int, max_lag_steps: int, lag_bounds: Mapping[tuple[str, int], int] | None
    ) -> list[Group]:
        """Return the parts outside of the batch that the next step would not accept."""
        waiting = list(self._unfinished.values())
        for entry in self._open.values():
            waiting += entry.arrived.values()
        for group in self._ready:  # The batch has not taken them.
            waiting += group.members
        parts: list[Group] = []
        for whole in sorted(waiting, key=lambda each: each.episode_id):
            bound = _bound_of(whole, max_lag_steps, lag_bounds)
            is_failure = whole.end_reason.is_infrastructure_failure
            if is_failure or not self._is_trainable(whole, version, bound):
                continue
            part = part_of(whole, self._first_turn(whole, version, bound))
            if version - oldest_version(part) >= bound:
                parts.append(Group(group_id=whole.group_id, members=[part], is_early=True))
        return parts


def _bound_of(
    trajectory: Trajectory, max_lag_steps: int, lag_bounds: Mapping[tuple[str, int], int] | None
) -> int:
    """Return the largest lag of a trajectory: that of its environment and horizon, if any."""
    return (lag_bounds or {}).get((trajectory.env, trajectory.horizon), max_lag_steps)


def _outcome(trajectory: Trajectory, outcome: Outcome, cause: str) -> EpisodeOutcome:
    return EpisodeOutcome(episode_id=trajectory.episode_id, outcome=outcome, cause=cause)


class TrajectoryBuffer:
    """Holds journalled trajectories until they are trained on. Thread-safe.

    It reports the outcome of every episode to the scheduler.

    Example: the intake adds three members of a group of three -> the group is ready, three episodes
    and one group are reported, `next_batch` returns in the main thread.
    """

    def __init__(
        self,
        groups: GroupAssembly,
        index: JournalIndex,
        reports: ReportLog,
        *,
        version: int,
        score: ScoreGroup | None = None,
        compare: RewardGroup | None = None,
    ) -> None:
        """Start without episodes.

        Args:
            score: begins to score the members of a complete group.
            compare: begins to reward the finished members of a group.
        """
        self._score = score
        self._compare = compare
        self._changed = threading.Condition()
        self._groups = groups
        self._index = index
        self._reports = reports
        self.version = version  # Last version reported to the scheduler.
        self._stale: list[EpisodeOutcome] = []  # Stale episodes since the last batch.
        self.recent = RecentPrompts()
        self._stats = EpisodeStats()
        self._stats_since = time.monotonic()
        self._error: BaseException | None = None
        # Bounds from the scheduler, by environment and horizon.
        self._lag_bounds: dict[tuple[str, int], int] = {}
        self._num_slots = 0  # Episodes at once of all actors, from the scheduler.
        self._is_finished = False
        self._has_engines = False  # True once an engine was up since this process began.
        # Time of the last episode, or of the last check without an engine.
        self._news_at = time.monotonic()

    @property
    def num_slots(self) -> int:
        """Episodes at once of all actors that are connected to the scheduler."""
        with self._changed:
            return self._num_slots

    @property
    def open_groups(self) -> list[str]:
        with self._changed:
            return self._groups.open_ids

    # --- recovery, before the intake starts -----------------------------------------------------

    def adopt(self, trajectory: Trajectory, position: JournalPosition, *, step: int | None) -> bool:
        """Take an episode that the journal already holds.

        Args:
            step: step that trained on it, None if there is none.

        Returns:
            True if its group is permanently settled, so that no report is needed.
        """
        with self._changed:  # Rewards of earlier groups arrive meanwhile.
            return self._adopt(trajectory, position, step)

    def _adopt(self, trajectory: Trajectory, position: JournalPosition, step: int | None) -> bool:
        is_closed = self._index.is_closed(trajectory)
        if is_closed:  # The record is read because the step of the group may have to be repeated.
            self._index.add_entry(trajectory, position, num_queued=0)
        else:
            self._index.add_episode(trajectory)
            num_queued = self._report(seen=[seen_of(trajectory)])
            self._index.add_entry(trajectory, position, num_queued=num_queued)
            if trajectory.kind is EpisodeKind.TRAIN and step is None:
                self._report(*self._groups.add(trajectory))
            elif trajectory.kind is EpisodeKind.TRAIN:
                self._report(*self._groups.mark_completed(trajectory.group_id))
        if step is not None:
            self._index.trained([trajectory.group_id], step=step)
        return is_closed

    def adopt_parts(self, groups: Sequence[Sequence[str]]) -> None:
        """Take the early parts among the logged names of a step's groups."""
        with self._changed:
            self._groups.adopt_parts(groups)

    # --- the intake's thread ----------------------------------------------------------------

    def add_part(self, trajectory: Trajectory) -> None:
        """Take the turns so far of an episode that has not ended."""
        with self._changed:
            self._news_at = time.monotonic()
            if not self._index.is_closed(trajectory):
                self._groups.add_part(trajectory)

    def add(
        self, accepted: Sequence[tuple[Trajectory, JournalPosition]], *, end: JournalPosition
    ) -> None:
        """Take episodes that are journalled and acknowledged; `end` is the end of the journal."""
        with self._changed:
            self._news_at = time.monotonic()
            outcomes = list[EpisodeOutcome]()
            groups = list[GroupArrived]()
            for trajectory, _ in accepted:
                self.recent.add(trajectory)
                if trajectory.kind is EpisodeKind.TRAIN:
                    self._stats.add(trajectory)
                    decided, complete = self._groups.add(trajectory)
                    outcomes += decided
                    groups += complete
            seen = [seen_of(trajectory) for trajectory, _ in accepted]
            num_queued = self._report(outcomes, groups, seen=seen)
            for trajectory, position in accepted:
                self._index.add_entry(trajectory, position, num_queued=num_queued)
            self._index.move_end(end)
            self._changed.notify_all()

    def add_refused(self, trajectory: Trajectory, reason: str) -> None:
        """Complete the group of a refused episode without that episode."""
        if trajectory.kind is not EpisodeKind.TRAIN:
            return
        failed = EpisodeOutcome(
            episode_id=trajectory.episode_id, outcome=Outcome.FAILED, cause="refused", error=reason
        )
        with self._changed:
            outcomes, groups = self._groups.give_up(trajectory.group_id, trajectory.member)
            self._report([failed, *outcomes], groups)

    def add_duplicate(self) -> None:
        with self._changed:
            self._report(num_duplicates=1)

    def apply(self, progress: Progress) -> None:
        """Apply an answer of the scheduler: batch size, revoked episodes, lag bounds, run end."""
        with self._changed:
            self._close_below(progress.closed_below)
            self._groups.decide(progress.learner_version, progress.num_batch_groups)
            self._num_slots = progress.num_slots
            self._has_engines = self._has_engines or progress.num_slots > 0
            if not self._has_engines:  # The first engine is still starting.
                self._news_at = time.monotonic()
            self._lag_bounds = {(b.env, b.horizon): b.max_lag_steps for b in progress.lag_bounds}
            for episode_id in progress.revoked:
                self._report(*self._groups.give_up(*split_episode_id(episode_id)))
            self._is_finished = self._is_finished or progress.is_finished
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Make every wait of the main thread raise: no more episodes will arrive."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    # --- main thread ------------------------------------------------------------------------

    def next_batch(
        self,
        version: int,
        *,
        max_lag_steps: int,
        in_order: bool,
        timeout_s: float,
        is_after_skip: bool = False,
        check: Callable[[], object] = lambda: None,
    ) -> tuple[list[Group], list[EpisodeOutcome]]:
        """Wait for a batch of fresh groups; return it and the stale outcomes since the last one.

        Args:
            is_after_skip: `max_lag_steps` is a narrow bound, which the scheduler's do not widen.
            timeout_s: seconds without a new episode; the start of the first engine does not count.
            check: called every `POLL_S` seconds of the wait; it ends the wait by raising.

        Raises:
            TimeoutError: no batch, and no episode for `timeout_s`; names the groups that wait.
            LongstrideError: the intake's thread failed.
        """
        started = time.monotonic()
        while True:
            check()
            with self._changed:
                self._raise_failure()
                if self._groups.is_batch_ready(version):
                    groups, outcomes = self._groups.take(
                        version,
                        max_lag_steps=max_lag_steps,
                        in_order=in_order,
                        lag_bounds=None if is_after_skip else self._lag_bounds,
                        is_narrow=is_after_skip,
                    )
                    self._stale += outcomes
                    self._report(outcomes)
                    if groups:
                        stale = self._stale
                        self._stale = []
                        return groups, stale
                now = time.monotonic()
                if now - max(started, self._news_at) >= timeout_s:
                    some = ", ".join(self._groups.open_ids[:3])
                    raise TimeoutError(
                        f"no batch for {now - started:.1f} s, and no episode from any actor for"
                        f" {now - self._news_at:.1f} s (learner.batch_timeout_s={timeout_s:g})."
                        f" {counted(self._groups.num_ready, 'group is', 'groups are')} complete,"
                        f" {counted(self._groups.num_open, 'group is', 'groups are')} incomplete"
                        f"{some and ', such as ' + some}{self._waiting_text()}. status.json lists"
                        " the actors."
                    )
                self._changed.wait(POLL_S)

    def report(self, outcomes: Sequence[EpisodeOutcome]) -> None:
        with self._changed:
            self._report(outcomes)

    def step_done(
        self, version: int, *, is_last: bool, max_ahead_steps: int, signals: dict[str, float]
    ) -> None:
        """Report a published version to the scheduler, with the steps ahead and the signals."""
        done = StepDone(
            version=version, is_last=is_last, max_ahead_steps=max_ahead_steps, signals=signals
        )
        with self._changed:
            self.version = version
            self._reports.queue(done)

    def replay_point(self, *, version: int) -> ReplayPoint:
        """Return where a learner that restores `version` or a later one would begin to read."""
        return self._index.replay_point(num_saved=self._reports.num_saved, version=version)

    def mark_trained(self, groups: Sequence[Group], *, step: int, is_skipped: bool) -> None:
        """Record that a logged step has trained on these groups, or has skipped them."""
        self._index.trained([group.group_id for group in groups], step=step)
        if not is_skipped:
            with self._changed:
                self._report(self._groups.note_trained(groups))

    def drain_stats(self) -> dict[str, float]:
        """Return metrics over the episodes that arrived since the last call."""
        with self._changed:
            now = time.monotonic()
            metrics = self._stats.metrics(now - self._stats_since)
            self._stats = EpisodeStats()
            self._stats_since = now
            metrics["groups/ready"] = float(self._groups.num_ready)
            metrics["groups/open"] = float(self._groups.num_open)
            if self._score is not None:
                metrics["groups/unscored"] = float(self._groups.num_unscored)
            if self._compare is not None:
                metrics["groups/unrewarded"] = float(self._groups.num_unrewarded)
            if self._num_slots:
                metrics["actor/concurrency"] = float(self._num_slots)
            return metrics

    def wait_finished(
        self, *, timeout_s: float, check: Callable[[], object] = lambda: None
    ) -> bool:
        """Wait until the scheduler reports the end of the run.

        Returns: False if no such report and no episode arrived for `timeout_s` seconds.
        """
        started = time.monotonic()
        while True:
            check()
            with self._changed:
                self._raise_failure()
                idle_s = time.monotonic() - max(started, self._news_at)
                if self._is_finished or idle_s >= timeout_s:
                    return self._is_finished
                self._changed.wait(POLL_S)

    # --- under the lock ---------------------------------------------------------------------

    def _raise_failure(self) -> None:
        """Raise the failure of the intake's thread, if there was one."""
        if isinstance(self._error, ConfigError):  # A restart would fail the same way.
            raise self._error
        if self._error is not None:
            raise LongstrideError(
                f"The intake of trajectories failed: {self._error}"
            ) from self._error

    def _waiting_text(self) -> str:
        num = self._groups.num_unrewarded
        text = counted(num, "group waits for groups.reward", "groups wait for groups.reward")
        waiting = [text] if num else []
        num = self._groups.num_unscored
        text = counted(num, "group waits for its teacher", "groups wait for their teacher")
        waiting += [text] if num else []
        return "".join(f", {each}" for each in waiting)

    def _begin_rewards(self) -> None:
        if self._compare is None:
            return
        for group in self._groups.take_unrewarded():
            self._compare(group.members).add_done_callback(self._note_rewards)

    def _note_rewards(self, pending: Future[GroupReward]) -> None:
        """Decide a group by its rewards. A stop leaves it in the journal."""
        if pending.cancelled() or isinstance(pending.exception(), DiskFull):
            return
        if (error := pending.exception()) is not None:
            self.fail(error)
            return
        with self._changed:
            self._news_at = time.monotonic()
            self._report(*self._groups.add_rewards(pending.result()))
            self._changed.notify_all()

    def _begin_scoring(self) -> None:
        if self._score is None:
            return
        for group in self._groups.take_unscored():
            self._score(group.members).add_done_callback(partial(self._note_scores, group))

    def _note_scores(self, group: Group, pending: Future[list[TeacherScores]]) -> None:
        """Make a group ready. The thread of the teacher keeps an error for the main thread."""
        if pending.cancelled() or pending.exception() is not None:
            return
        ids = [each.episode_id for each in group.members]
        with self._changed:
            self._news_at = time.monotonic()
            scores = dict(zip(ids, pending.result(), strict=True))
            self._groups.add_scores(group.group_id, scores)
            self._changed.notify_all()

    def _close_below(self, number: int) -> None:
        """Close all groups below a number. Raises: LongstrideError: the number went down."""
        if number < self._index.closed_below:
            raise LongstrideError(
                f"scheduler.json was lost or belongs to another run: the scheduler's oldest open"
                f" group has number {number}, but all groups below number"
                f" {self._index.closed_below} are already closed. Restore it from a backup."
            )
        if number > self._index.closed_below:
            self._index.close_below(number)
            self._groups.close_below(number)

    def _report(
        self,
        outcomes: Sequence[EpisodeOutcome] = (),
        groups: Sequence[GroupArrived] = (),
        *,
        seen: Sequence[EpisodeSeen] = (),
        num_duplicates: int = 0,
    ) -> int:
        """Queue a report if it is not empty. Returns: number of reports queued so far.

        Complete groups in it begin to wait for their rewards or their teacher.
        """
        self._begin_rewards()
        self._begin_scoring()
        if not (outcomes or groups or seen or num_duplicates):
            return self._reports.num_saved
        report = Outcomes(
            seen=list(seen),
            outcomes=list(outcomes),
            groups=list(groups),
            num_duplicates=num_duplicates,
        )
        return self._reports.queue(report)


def seen_of(trajectory: Trajectory) -> EpisodeSeen:
    """Return the report to the scheduler about a journalled trajectory."""
    return EpisodeSeen(
        episode_id=trajectory.episode_id,
        reward=trajectory.reward,
        is_success=trajectory.is_success,
        end_reason=trajectory.end_reason,
        num_turns=trajectory.num_turns,
        wall_s=trajectory.wall_s,
        error=trajectory.error if trajectory.end_reason.is_infrastructure_failure else "",
        num_sampled_tokens=int(np.count_nonzero(trajectory.loss_mask)),
    )
