"""The displayed runs and files: the named ones, or all current and future runs of a folder."""

import json
from collections.abc import Sequence
from pathlib import Path

from common.errors import ConfigError
from common.store.run_dir import RunDir
from tools.dashboard.reading.conversations import ConversationFile
from tools.dashboard.reading.run_source import RunSource

Source = RunSource | ConversationFile
MAX_RUNS = 200  # Maximum number of runs of a folder. The newest runs are kept.
RUN_FILES = ("config.yaml", "journal", "metrics.jsonl")
PARTS = ("eval", "sft", "dpo", "evolve", "iteration-*")  # Folders of commands within a run's.


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run of any version and age."""
    return folder.is_dir() and any((folder / name).exists() for name in RUN_FILES)


def parts_of(folder: Path) -> list[Path]:
    """Return the folders of the commands beside a run, the most recently changed first."""
    parts = [part for pattern in PARTS for part in folder.glob(pattern) if is_run(part)]
    return sorted(parts, key=lambda part: -part.stat().st_mtime)


def find_run(word: str, *, runs: Path) -> Path:
    """Return the folder of a run, given its name or path.

    Without a training run of this name, it is the newest part: an evaluation, for example.

    Raises: ConfigError: there is no such run; lists the runs that exist.
    """
    for path in (runs / word, Path(word)):
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
            for path in sorted(paths, key=lambda each: -each.stat().st_mtime)[:MAX_RUNS]:
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
