"""Refreshes the sources in one thread and counts their changes for the pages."""

import logging
import threading
import time

from tools.dashboard.reading.run_source import RunSource
from tools.dashboard.reading.sources import Source, Sources

logger = logging.getLogger(__name__)

EVERY_S = 1.0  # Seconds between two refreshes of the watched sources.
BUDGET_S = 0.2  # Reading time of one journal before the next source is refreshed.
ASKED_S = 30.0  # Seconds that a source stays watched after a page's last request.


class SourceRefresher:
    """Refreshes the recently requested sources; other sources are left unread.

    Example: a page asks for run "a"; `num_changes` grows each time "a" has changed.
    """

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.num_changes = 0
        self._asked: dict[str, float] = {}
        self._seen: dict[str, tuple[object, ...]] = {}
        self._changed = threading.Condition()  # Notified when a source has changed.
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout=5.0)

    def ask(self, name: str, *, wait_s: float = 1.0) -> Source:
        """Return a source; a new one is first read, for at most `wait_s`. Raises: KeyError."""
        source = self.sources.get(name)
        self._asked[name] = time.monotonic()
        if name not in self._seen:
            self._wake.set()
            with self._changed:
                self._changed.wait_for(lambda: name in self._seen, timeout=wait_s)
        return source

    def _run(self) -> None:
        """Refresh the requested sources until stopped."""
        while not self._stop.is_set():
            is_more = False
            since = time.monotonic() - ASKED_S
            for name in [name for name, at in list(self._asked.items()) if at > since]:
                is_more = self._refresh(name) or is_more
            if not is_more:
                self._wake.wait(EVERY_S)
                self._wake.clear()

    def _refresh(self, name: str) -> bool:
        """Refresh one source; return whether more is left to read."""
        try:
            source = self.sources.get(name)
            is_more = source.refresh(budget_s=BUDGET_S)
        except (OSError, KeyError) as error:  # The run may be deleted while it is read.
            logger.warning("run not readable run=%s error=%r", name, error)
            self._asked.pop(name, None)
            return False
        now = _fingerprint(source)
        if self._seen.get(name) != now:
            with self._changed:
                self._seen[name] = now
                self._changed.notify_all()
            self.num_changes += 1
        return is_more


def _fingerprint(source: Source) -> tuple[object, ...]:
    """Return values that differ after each change of a source."""
    if not isinstance(source, RunSource):
        return (source.rows.num, *source.problems)
    try:
        status_at = source.run_dir.status.stat().st_mtime
    except OSError:
        status_at = 0.0
    return (source.index.rows.num, source.metrics.num, status_at, source.state())
