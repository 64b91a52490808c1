"""What a learner remembers of its journal: what is in it, and what of it may be needed again.

Both are bounded by what is in flight and by the distance of two checkpoints, not by the run.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from common.ids import is_below
from common.store.journal import JournalPosition
from common.wire.messages import EpisodeKind, Trajectory
from learner.ingest.replay_point import ReplayPoint

NO_STEP = 0
MAX_EVALUATIONS = 64  # groups of them whose episodes are known, as duplicates, by their names


@dataclass(slots=True)
class _Entry:
    """A group with records in the journal."""

    first: JournalPosition
    is_training: bool
    num_queued: int  # reports, when the last of its records was reported
    step: int = NO_STEP  # that trained on it


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
        self._end = end
        self.closed_below = closed_below  # training groups below are settled for good
        self._training: dict[str, set[str]] = {}  # group -> episodes, of groups not closed
        self._evaluation: OrderedDict[str, set[str]] = OrderedDict()
        self._needed: OrderedDict[str, _Entry] = OrderedDict()  # by group, in journal order

    def __contains__(self, trajectory: Trajectory) -> bool:
        with self._lock:
            known = self._known(trajectory).get(trajectory.group_id, ())
            return self.is_closed(trajectory) or trajectory.episode_id in known

    def __len__(self) -> int:
        """Episodes known by name, and groups whose records may be needed again."""
        with self._lock:
            names = [*self._training.values(), *self._evaluation.values()]
            return sum(map(len, names)) + len(self._needed)

    def is_closed(self, trajectory: Trajectory) -> bool:
        """True if its group is a training group that is settled for good."""
        is_training = trajectory.kind is EpisodeKind.TRAIN
        return is_training and is_below(trajectory.group_id, self.closed_below)

    def know(self, trajectory: Trajectory) -> None:
        """Take an episode that was appended. A failed evaluation may be appended again."""
        is_training = trajectory.kind is EpisodeKind.TRAIN
        if not is_training and trajectory.end_reason.is_infrastructure_failure:
            return
        with self._lock:
            known = self._known(trajectory).setdefault(trajectory.group_id, set())
            known.add(trajectory.episode_id)
            while len(self._evaluation) > MAX_EVALUATIONS:
                self._evaluation.popitem(last=False)

    def enter(self, trajectory: Trajectory, position: JournalPosition, *, num_queued: int) -> None:
        """Take an episode that is reported to the scheduler.

        Args:
            position: where its record begins.
            num_queued: how many reports were queued by then, the one about it included.
        """
        is_training = trajectory.kind is EpisodeKind.TRAIN
        entry = _Entry(first=position, is_training=is_training, num_queued=num_queued)
        with self._lock:
            self._needed.setdefault(trajectory.group_id, entry).num_queued = num_queued

    def move_end(self, end: JournalPosition) -> None:
        """All records before `end` are entered."""
        with self._lock:
            self._end = end

    def trained(self, group_ids: Iterable[str], *, step: int) -> None:
        """A step has consumed these groups, and is logged."""
        with self._lock:
            for group_id in group_ids:
                if group_id in self._needed:
                    self._needed[group_id].step = step

    def close_below(self, number: int) -> None:
        """Groups with smaller numbers are settled for good, as the scheduler says."""
        with self._lock:
            self.closed_below = number
            for group_id in [each for each in self._training if is_below(each, number)]:
                del self._training[group_id]

    def replay_point(self, *, num_saved: int, version: int) -> ReplayPoint:
        """Return where a learner would begin to read, and forget what lies before.

        Args:
            num_saved: of the reports to the scheduler, those that it cannot forget.
            version: of the oldest checkpoint that may be restored.
        """
        with self._lock:
            position = self._end
            for group_id, entry in list(self._needed.items()):
                is_saved = (
                    is_below(group_id, self.closed_below)
                    if entry.is_training
                    else entry.num_queued <= num_saved
                )
                if not is_saved or entry.step > version:
                    position = entry.first
                    break
                del self._needed[group_id]
            return ReplayPoint(position=position, closed_below=self.closed_below, version=version)

    def _known(self, trajectory: Trajectory) -> dict[str, set[str]]:
        return self._training if trajectory.kind is EpisodeKind.TRAIN else self._evaluation
