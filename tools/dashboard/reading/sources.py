"""Runs and conversation files for display: named ones, or all current and future ones.

One thread refreshes those that a page has requested lately.
"""

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.repository import ROOT
from common.store.run_dir import RunDir
from learner.journal.index import FLOATS, INTS, NAMES, EpisodeRows
from tools.dashboard.reading.rows import page
from tools.dashboard.reading.run_source import RunSource
from tools.dashboard.run_state import changed_at, is_run, parts_of
from tools.exchange.agent_traj import Conversation, read_conversations

logger = logging.getLogger(__name__)

MAX_RUNS = 200  # Maximum number of runs of a folder. The newest runs are kept.
REFRESH_S = 1.0  # Seconds between two refreshes of the watched sources.
BUDGET_S = 0.2  # Reading time of one journal before the next source is refreshed.
ASKED_S = 30.0  # Seconds that a source stays watched after a page's last request.


class ConversationFile:
    """A file in the AgentTraj format. It is read whole at the first refresh, and after changes."""

    kind = "conversations"

    def __init__(self, path: Path, *, name: str) -> None:
        self.name = name
        self.path = path
        self.rows = EpisodeRows()
        self.problems: list[str] = []
        self._conversations: list[Conversation] = []
        self._read_at: tuple[int, int] | None = None

    def refresh(self, *, budget_s: float = 0.0) -> bool:
        """Read the file if it is new or changed. Returns False: nothing is left to read."""
        try:
            stat = self.path.stat()
        except OSError as error:
            self.problems = [f"{self.path}: {error.strerror}"]
            return False
        if self._read_at == (stat.st_mtime_ns, stat.st_size):
            return False
        self._read_at = (stat.st_mtime_ns, stat.st_size)
        self.rows = EpisodeRows()
        self.problems = []
        try:
            self._conversations = read_conversations(self.path)
        except ConfigError as error:
            self._conversations = []
            self.problems = [f"not a conversation file: {error}"]
        for number, conversation in enumerate(self._conversations):
            self.rows.add(str(number), _values(number, conversation))
        return False

    def summary(self) -> dict[str, Any]:
        """Return the entry of this file in the list of sources."""
        return {
            "name": self.name,
            "kind": self.kind,
            "state": f"{self.rows.num} conversations",
            "episodes": self.rows.num,
            "indexed": 1.0,
            "problems": self.problems,
        }

    def page(self, wanted: Mapping[str, str], *, start: int, num: int) -> dict[str, Any]:
        """Return one page of the conversations that match the filters."""
        return page(self.rows, wanted, start=start, num=num)

    def episode(self, episode_id: str) -> dict[str, Any]:
        """Return one conversation; each message is one segment with one text. Raises: KeyError."""
        row = self.rows.row_of[episode_id]
        segments: list[dict[str, Any]] = []
        turn = 0
        for i, message in enumerate(self._conversations[row].messages):
            kind = "action" if message.is_agent else "observation" if i else "prompt"
            segments.append({"kind": kind, "turn": turn, "start": i, "texts": [message.text]})
            if message.is_agent:
                segments[-1] |= {"logprobs": [0.0], "versions": [], "invalid": False, "score": None}
                turn += 1
        return {**self.rows.get(row), "segments": segments, "advantage": None, "problems": []}


def _values(number: int, conversation: Conversation) -> dict[str, Any]:
    """Return the columns of a conversation as a row of the index."""
    values: dict[str, Any] = dict.fromkeys(INTS, 0) | dict.fromkeys(FLOATS, 0.0)
    values |= dict.fromkeys(NAMES, "")
    env = conversation.item_id.rpartition("_")[0] or conversation.item_id
    num_turns = sum(message.is_agent for message in conversation.messages)
    return values | {
        **{"offset": number, "turns": num_turns, "reward": conversation.reward},
        **{"success": int(conversation.reward >= 1.0), "env": env, "item": conversation.item_id},
        **{"kind": "conversation", "trained_at": -1},
    }


Source = RunSource | ConversationFile


def find_run(word: str, *, runs: Path) -> Path:
    """Return the folder of a run, given its name or path. A relative path may begin at `ROOT`.

    Without a training run of this name, it is the newest part: an evaluation, for example.

    Raises: ConfigError: there is no such run; lists the runs that exist.
    """
    for path in (runs / word, Path(word), ROOT / word):
        if is_run(path):
            return path.resolve()
        if parts := parts_of(path):
            return parts[0].resolve()
    names = sorted(folder.name for folder in runs.glob("*") if is_run(folder) or parts_of(folder))
    hint = f"Its runs are: {', '.join(names[:8])}." if names else "The folder has no runs."
    raise ConfigError(f"{word}: no run of this name in {runs}. {hint}")


def open_source(word: str, *, runs: Path, cache: Path | None = None) -> Source:
    """Return a run or a conversation file. Raises: ConfigError: it is neither."""
    path = Path(word)
    if path.is_file():
        _check_conversations(path)
        return ConversationFile(path.resolve(), name=path.name)
    root = find_run(word, runs=runs)
    demonstrations = RunDir(root=root).demonstrations
    if demonstrations.is_file() and not (root / "journal").exists():
        return ConversationFile(demonstrations, name=word)
    return RunSource(root, name=root.name, cache=cache)


def _check_conversations(path: Path) -> None:
    """Check that a file begins with JSON. Raises: ConfigError: it does not."""
    with path.open("rb") as handle:
        head = handle.read(1 << 16)
    text = head.decode(errors="replace").lstrip()
    if text.startswith("["):
        return
    try:
        if b"\n" in head:
            json.loads(head.partition(b"\n")[0])
        elif not text.startswith("{"):
            raise ValueError("not a JSON object")
    except ValueError as error:
        raise ConfigError(f"{path}: neither a run nor a conversation file ({error})") from error


class Sources:
    """The named sources, or every run below `runs`, including runs that appear later."""

    def __init__(self, words: Sequence[str], *, runs: Path, cache: Path | None = None) -> None:
        """Open the named sources; `cache` as in `RunSource`.

        Raises: ConfigError: one is missing.
        """
        self._runs = runs
        self._is_all = not words
        self._cache = cache
        self._known: dict[str, Source] = {}
        for word in words:
            source = open_source(word, runs=runs, cache=cache)
            while source.name in self._known:
                source.name += "'"
            self._known[source.name] = source

    def list_all(self) -> list[Source]:
        """Return all sources, the most recently changed first."""
        if self._is_all:
            folders = [each for each in self._runs.glob("*") if not each.is_symlink()]
            paths = [path for folder in folders for path in (folder, *parts_of(folder))]
            paths = [path for path in paths if is_run(path)]
            for path in sorted(paths, key=changed_at, reverse=True)[:MAX_RUNS]:
                name = path.relative_to(self._runs).as_posix()
                if name not in self._known:
                    self._known[name] = RunSource(path.resolve(), name=name, cache=self._cache)
                demonstrations = RunDir(root=path).demonstrations
                if demonstrations.is_file() and f"{name}/demonstrations" not in self._known:
                    source = ConversationFile(demonstrations, name=f"{name}/demonstrations")
                    self._known[source.name] = source
            gone = [name for name, each in self._known.items() if not each.path.exists()]
            for name in gone:
                del self._known[name]
        return sorted(self._known.values(), key=_changed_at, reverse=True)

    def run_folders(self) -> list[Path]:
        """Return the folders of all runs, without conversation files."""
        return [each.path for each in self.list_all() if isinstance(each, RunSource)]

    def get(self, name: str) -> Source:
        """Return a source by its name. Raises: KeyError."""
        if name not in self._known:
            self.list_all()
        return self._known[name]


def _changed_at(source: Source) -> float:
    """Return when a source's files changed last; 0 if they are gone."""
    try:
        path = source.path
        return max(each.stat().st_mtime for each in (path, path / "metrics.jsonl") if each.exists())
    except (OSError, ValueError):
        return 0.0


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
                self._wake.wait(REFRESH_S)
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
