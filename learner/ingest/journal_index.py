"""What a learner remembers of its journal: what is in it, and what of it may be needed again.

Both are bounded by what is in flight and by the distance of two checkpoints, not by the run.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from common.store.journal import JournalPosition
from common.wire.ids import is_below
from common.wire.messages import EpisodeKind, Trajectory
from learner.ingest.replay_point import ReplayPoint

NO_STEP = 0
MAX_EVALUATIONS = 64  # groups of them whose episodes are known, as duplicates, by their names


class JournalIndex:
    """Knows duplicates, and where a restart begins to read. Thread-safe.

    Example: groups 4, 5, 6 lie in the journal in this order. 4 is trained in step 30, 5 filtered, 6
    open. Once the scheduler has closed 4 and 5 for good, their episodes are known by their
    numbers. The replay point stays at 4 until no checkpoint is older than step 30, because that
    step may have to be repeated. Then it is the first record of 6.
    """

    def __init__(self, *, end: JournalPosition, closed_below: int = 0) -> None:
        """Begin with nothing. `end`: of the journal; `closed_below`: as in `ReplayPoint`."""
        self._lock = threading.Lock()
        self._known = _Known(closed_below=closed_below)
        self._reading = _Reading()
        self._end = end

    def __contains__(self, trajectory: Trajectory) -> bool:
        """True if the journal holds this episode."""
        with self._lock:
            return trajectory in self._known

    def __len__(self) -> int:
        """Episodes that are known by name."""
        with self._lock:
            return len(self._known)

    @property
    def num_groups(self) -> int:
        """Groups whose records may be needed again, at the last replay point or entered since."""
        with self._lock:
            return len(self._reading)

    @property
    def closed_below(self) -> int:
        """Training groups with smaller numbers are settled for good."""
        return self._known.closed_below

    def is_closed(self, trajectory: Trajectory) -> bool:
        """True if its group is a training group that is settled for good."""
        with self._lock:
            return self._known.is_closed(trajectory)

    def know(self, trajectory: Trajectory) -> None:
        """Take an episode that was appended, so that it is not appended again."""
        with self._lock:
            self._known.add(trajectory)

    def enter(self, trajectory: Trajectory, position: JournalPosition, *, num_queued: int) -> None:
        """Take an episode that is reported to the scheduler.

        Args:
            position: where its record begins.
            num_queued: how many reports were queued by then, the one about it included.
        """
        with self._lock:
            self._reading.add(trajectory, position, num_queued=num_queued)

    def move_end(self, end: JournalPosition) -> None:
        """All records before `end` are entered."""
        with self._lock:
            self._end = end

    def trained(self, group_ids: Iterable[str], *, step: int) -> None:
        """A step has consumed these groups, and is logged."""
        with self._lock:
            self._reading.trained(group_ids, step=step)

    def close_below(self, number: int) -> None:
        """Groups with smaller numbers are settled for good, as the scheduler says."""
        with self._lock:
            self._known.close_below(number)

    def replay_point(self, *, num_saved: int, version: int) -> ReplayPoint:
        """Return where a learner would begin to read, and forget what lies before.

        Args:
            num_saved: of the reports to the scheduler, those that it cannot forget.
            version: of the oldest checkpoint that may be restored.
        """
        with self._lock:
            closed_below = self._known.closed_below
            self._reading.forget(closed_below=closed_below, num_saved=num_saved, version=version)
            position = self._reading.first or self._end
            return ReplayPoint(position=position, closed_below=closed_below, version=version)


class _Known:
    """Which episodes are in the journal, so that each is taken once.

    Those of training groups that are settled for good are known by their number alone.
    """

    def __init__(self, *, closed_below: int = 0) -> None:
        self.closed_below = closed_below
        self._training: dict[str, set[str]] = {}  # group -> episodes
        self._evaluation: OrderedDict[str, set[str]] = OrderedDict()

    def __contains__(self, trajectory: Trajectory) -> bool:
        if self.is_closed(trajectory):
            return True
        groups = self._groups_of(trajectory)
        return trajectory.episode_id in groups.get(trajectory.group_id, ())

    def __len__(self) -> int:
        groups = [*self._training.values(), *self._evaluation.values()]
        return sum(len(episodes) for episodes in groups)

    def is_closed(self, trajectory: Trajectory) -> bool:
        """True if its group is a training group that is settled for good."""
        is_training = trajectory.kind is EpisodeKind.TRAIN
        return is_training and is_below(trajectory.group_id, self.closed_below)

    def add(self, trajectory: Trajectory) -> None:
        """Note an episode. A failed evaluation is played again, and taken again."""
        is_training = trajectory.kind is EpisodeKind.TRAIN
        if not is_training and trajectory.end_reason.is_infrastructure_failure:
            return
        groups = self._groups_of(trajectory)
        groups.setdefault(trajectory.group_id, set()).add(trajectory.episode_id)
        while len(self._evaluation) > MAX_EVALUATIONS:
            self._evaluation.popitem(last=False)

    def close_below(self, number: int) -> None:
        """Groups with smaller numbers need no names any more."""
        self.closed_below = number
        old = [group_id for group_id in self._training if is_below(group_id, number)]
        for group_id in old:
            del self._training[group_id]

    def _groups_of(self, trajectory: Trajectory) -> dict[str, set[str]]:
        return self._training if trajectory.kind is EpisodeKind.TRAIN else self._evaluation


@dataclass(slots=True)
class _Entry:
    """A group with records in the journal."""

    first: JournalPosition
    is_training: bool
    num_queued: int  # reports, when the last of its records was reported
    step: int = NO_STEP  # that trained on it


class _Reading:
    """The groups of which a learner that restarts would need records, in journal order."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def first(self) -> JournalPosition | None:
        """Where the first record lies that is needed, None if none is."""
        entry = next(iter(self._groups.values()), None)
        return None if entry is None else entry.first

    def add(self, trajectory: Trajectory, position: JournalPosition, *, num_queued: int) -> None:
        is_training = trajectory.kind is EpisodeKind.TRAIN
        entry = self._groups.setdefault(
            trajectory.group_id,
            _Entry(first=position, is_training=is_training, num_queued=num_queued),
        )
        entry.num_queued = num_queued

    def trained(self, group_ids: Iterable[str], *, step: int) -> None:
        for group_id in group_ids:
            if group_id in self._groups:
                self._groups[group_id].step = step

    def forget(self, *, closed_below: int, num_saved: int, version: int) -> None:
        while self._groups:
            group_id, entry = next(iter(self._groups.items()))
            is_saved = (
                is_below(group_id, closed_below)
                if entry.is_training
                else entry.num_queued <= num_saved
            )
            if not is_saved or entry.step > version:
                return
            del self._groups[group_id]
