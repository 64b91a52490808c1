"""Durations of earlier starts on this machine, to compare the current start with."""

import time
from contextlib import suppress
from pathlib import Path

from common.host.process_settings import cache_home
from common.store.run_dir import as_map, json_object, write_json


def cache_folder() -> Path:
    """Return the path of the folder, which may not exist yet."""
    return cache_home() / "longstride"


MAX_KNOWN = 500  # Kinds of start; the oldest are removed.
WEIGHT = 0.5  # Weight of the newest duration in the mean.


class StartupHistory:
    """Mean seconds of each kind of start, kept in the user's cache folder.

    Example: note("actor model-a", 40.0), later note("actor model-a", 20.0): seconds() is 30.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Set the path, by default durations.json in the cache folder. Reads no file."""
        self._path = path or cache_folder() / "durations.json"

    def seconds(self, kind: str) -> float | None:
        """Return the mean seconds of a kind of start; None if none has completed yet."""
        mean = as_map(json_object(self._path).get(kind)).get("seconds")
        return float(mean) if isinstance(mean, int | float) else None

    def note(self, kind: str, seconds: float) -> None:
        """Add a start that has completed. A cache folder that cannot be written is ignored."""
        before = self.seconds(kind)
        new = seconds if before is None else WEIGHT * seconds + (1 - WEIGHT) * before
        starts = json_object(self._path) | {kind: {"seconds": round(new, 1), "at": time.time()}}
        with suppress(OSError, ValueError, TypeError):  # The file may hold anything.
            newest = sorted(starts, key=lambda name: as_map(starts[name]).get("at", 0.0))
            latest = {name: starts[name] for name in newest[-MAX_KNOWN:]}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, latest)
