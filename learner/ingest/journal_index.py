"""An index of the journal: known episodes, and the records that a restart may need again.

Its size depends on the work in flight and on the steps between two checkpoints, not on the length
of the run.
"""

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from common.errors import ConfigError
from common.ids import is_below
from common.store.run_dir import read_json, write_atomically
from common.wire.messages import EpisodeKind, Trajectory
from learner.journal.journal import JOURNAL_START, JournalPosition

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPoint:
    """All records before `position` are settled, and their steps are in every checkpoint."""

    position: JournalPosition = JOURNAL_START
    closed_below: int = 0  # Training groups with smaller numbers are permanently settled.
    version: int = 0  # Version of the oldest checkpoint that can use this replay point.
    steps_offset: int = 0  # Bytes of the step log before the first line that is needed.


FROM_THE_START = ReplayPoint()


def save_replay_point(path: Path, replay_point: ReplayPoint) -> None:
    """Replace the replay point; it survives a power failure when this returns."""
    plain = asdict(replay_point) | {"position": replay_point.position.plain()}
    write_atomically(path, json.dumps(plain) + "\n", is_durable=True)


def load_replay_point(path: Path, *, version: int) -> ReplayPoint:
    """Return the replay point of a run; the journal's start if it is missing or damaged.

    Args:
        version: version of the restored checkpoint. If it is older than the replay point's,
            episodes before the replay point are needed, so the journal's start is returned.
    """
    if not path.exists():
        return FROM_THE_START
    kinds = {"position": dict, "closed_below": int, "version": int}
    try:
        plain = read_json(path, kinds, remedy="the whole journal is read instead")
        position = JournalPosition.of_plain(plain.pop("position"))
        replay_point = ReplayPoint(position=position, **plain)
    except (ConfigError, KeyError, TypeError) as error:
        logger.warning("reading the whole journal: %s", error)
        return FROM_THE_START
    if version < replay_point.version:
        logger.warning(
            "reading the whole journal: the replay point is newer than the checkpoint"
            " checkpoint_version=%d replay_point_version=%d",
            version,
            replay_point.version,
        )
        return FROM_THE_START
    return replay_point


NO_STEP = 0
MAX_EVALUATIONS = 64  # Evaluation groups whose episode ids are kept to detect duplicates.


@dataclass(slots=True)
class _Entry:
    """A group with records in the journal."""

    first: JournalPosition
    is_training: bool
    num_queued: int  # Number of reports queued when the last record was reported.
    step: int = NO_STEP  # Step that trained on the group.


class JournalIndex:
    """Detects duplicates, and finds where a restart begins to read. Thread-safe.

    Example: groups 4, 5, 6 are in the journal in this order. Group 4 is trained in step 30, group 5
    is filtered, group 6 is open. After the scheduler has permanently closed 4 and 5, their episodes
    are recognised by their group numbers. The replay point stays at 4 while a checkpoint older than
    step 30 exists, because that step may have to be repeated. After that it is the first record of
    6.
    """

    def __init__(self, *, end: JournalPosition, closed_below: int = 0) -> None:
        """Start without records.

        Args:
            end: end of the journal.
            closed_below: as in `ReplayPoint`.
        """
        self._lock = threading.Lock()
        self._end = end
        # Training groups with smaller numbers are permanently settled.
        self.closed_below = closed_below
        # Group -> ids of its episodes, for groups that are not closed.
        self._training: dict[str, set[str]] = {}
        self._evaluation: OrderedDict[str, set[str]] = OrderedDict()
        # Entries by group, in journal order.
        self._needed: OrderedDict[str, _Entry] = OrderedDict()

    def __contains__(self, trajectory: Trajectory) -> bool:
        with self._lock:
            episode_ids = self._ids_of_kind(trajectory).get(trajectory.group_id, ())
            return self.is_closed(trajectory) or trajectory.episode_id in episode_ids

    def __len__(self) -> int:
        """Return the number of episode ids and group entries that the index holds."""
        with self._lock:
            names = [*self._training.values(), *self._evaluation.values()]
            return sum(map(len, names)) + len(self._needed)

    def is_closed(self, trajectory: Trajectory) -> bool:
        """Return whether its group is a training group that is permanently settled."""
        is_training = trajectory.kind is EpisodeKind.TRAIN
        return is_training and is_below(trajectory.group_id, self.closed_below)

    def add_episode(self, trajectory: Trajectory) -> None:
        """Register an appended episode. A failed evaluation episode may be appended again."""
        is_training = trajectory.kind is EpisodeKind.TRAIN
        if not is_training and trajectory.end_reason.is_infrastructure_failure:
            return
        with self._lock:
            episode_ids = self._ids_of_kind(trajectory).setdefault(trajectory.group_id, set())
            episode_ids.add(trajectory.episode_id)
            while len(self._evaluation) > MAX_EVALUATIONS:
                self._evaluation.popitem(last=False)

    def add_entry(
        self, trajectory: Trajectory, position: JournalPosition, *, num_queued: int
    ) -> None:
        """Register an episode that is reported to the scheduler.

        Args:
            position: start of its record.
            num_queued: number of reports queued so far, its own included.
        """
        is_training = trajectory.kind is EpisodeKind.TRAIN
        entry = _Entry(first=position, is_training=is_training, num_queued=num_queued)
        with self._lock:
            self._needed.setdefault(trajectory.group_id, entry).num_queued = num_queued

    def move_end(self, end: JournalPosition) -> None:
        """Set the end of the journal; all records before it are entered."""
        with self._lock:
            self._end = end

    def trained(self, group_ids: Iterable[str], *, step: int) -> None:
        """Record that a logged step has trained on these groups."""
        with self._lock:
            for group_id in group_ids:
                if group_id in self._needed:
                    self._needed[group_id].step = step

    def close_below(self, number: int) -> None:
        """Record that the scheduler has permanently settled the groups with smaller numbers."""
        with self._lock:
            self.closed_below = number
            for group_id in [each for each in self._training if is_below(each, number)]:
                del self._training[group_id]

    def replay_point(self, *, num_saved: int, version: int) -> ReplayPoint:
        """Return where a restarted learner would begin to read, and drop the entries before it.

        Args:
            num_saved: number of reports that the scheduler has saved.
            version: oldest checkpoint that may be restored.
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

    def _ids_of_kind(self, trajectory: Trajectory) -> dict[str, set[str]]:
        return self._training if trajectory.kind is EpisodeKind.TRAIN else self._evaluation
