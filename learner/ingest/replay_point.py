"""Where in the journal a learner that restarts begins to read, and what it knows without reading.

Without it a run of weeks would read, and remember, all of its episodes at every restart.
"""

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from common.store.journal import JOURNAL_START, JournalPosition
from common.store.run_dir import write_atomically

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bookmark:
    """What lies before `position` is settled, and its steps are in every checkpoint."""

    position: JournalPosition = JOURNAL_START
    closed_below: int = 0  # training groups with smaller numbers are settled for good
    version: int = 0  # of the oldest checkpoint it was made for


FROM_THE_START = Bookmark()


def save_bookmark(path: Path, bookmark: Bookmark) -> None:
    """Replace the bookmark; it survives a power cut when this returns."""
    write_atomically(path, json.dumps(asdict(bookmark)) + "\n", is_durable=True)


def load_bookmark(path: Path, *, version: int) -> Bookmark:
    """Return the bookmark of a run, that of the journal's start if there is none.

    Args:
        version: of the checkpoint that is restored. An older one than the bookmark was made for
            needs episodes from before it.
    """
    if not path.exists():
        return FROM_THE_START
    plain = json.loads(path.read_text())
    position = JournalPosition(**plain.pop("position"))
    bookmark = Bookmark(position=position, **plain)
    if version < bookmark.version:
        logger.warning(
            "reading the whole journal: checkpoint of version=%d, bookmark for version=%d",
            version,
            bookmark.version,
        )
        return FROM_THE_START
    return bookmark
