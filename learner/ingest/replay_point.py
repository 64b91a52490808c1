"""The replay point: where a restarted learner begins to read the journal.

Without it a restart after weeks would read all episodes of the run and hold them in memory.
"""

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from common.errors import ConfigError
from common.store.run_dir import read_json, write_atomically
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
    write_atomically(path, json.dumps(asdict(replay_point)) + "\n", is_durable=True)


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
        position = JournalPosition(**plain.pop("position"))
        replay_point = ReplayPoint(position=position, **plain)
        if not all(isinstance(each, int) for each in (position.segment, position.offset)):
            raise TypeError(f"{path}: damaged, {position} is not a journal position")
    except (ConfigError, TypeError) as error:
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
