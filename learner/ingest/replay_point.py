"""Where in the journal a learner that restarts begins to read, and what it knows without reading.

Without it a run of weeks would read, and remember, all of its episodes at every restart.
"""

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from common.errors import ConfigError
from common.store.journal import JOURNAL_START, JournalPosition
from common.store.run_dir import read_json, write_atomically

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPoint:
    """What lies before `position` is settled, and its steps are in every checkpoint."""

    position: JournalPosition = JOURNAL_START
    closed_below: int = 0  # training groups with smaller numbers are settled for good
    version: int = 0  # of the oldest checkpoint it was made for
    steps_offset: int = 0  # bytes of the step log before the first line that is needed


FROM_THE_START = ReplayPoint()


def save_replay_point(path: Path, replay_point: ReplayPoint) -> None:
    """Replace the replay point; it survives a power cut when this returns."""
    write_atomically(path, json.dumps(asdict(replay_point)) + "\n", is_durable=True)


def load_replay_point(path: Path, *, version: int) -> ReplayPoint:
    """Return the replay point of a run, the journal's start if there is none or it is damaged.

    Args:
        version: of the checkpoint that is restored. An older one than the replay point was made
            for needs episodes from before it.
    """
    if not path.exists():
        return FROM_THE_START
    kinds = {"position": dict, "closed_below": int, "version": int}
    try:
        plain = read_json(path, kinds, remedy="the whole journal is read instead")
        position = JournalPosition(**plain.pop("position"))
        replay_point = ReplayPoint(position=position, **plain)
        if not all(isinstance(each, int) for each in (position.segment, position.offset)):
            raise TypeError(f"{path}: damaged, {position} is none")
    except (ConfigError, TypeError) as error:
        logger.warning("reading the whole journal: %s", error)
        return FROM_THE_START
    if version < replay_point.version:
        logger.warning(
            "reading the whole journal: checkpoint of version=%d, replay point for version=%d",
            *(version, replay_point.version),
        )
        return FROM_THE_START
    return replay_point
