"""A consistent cut through the files of a running run.

A restart from the copy must find a state that a crash of all roles could have left. The files are
therefore read in the order of the data that they depend on: the replay point and the checkpoints,
then the scheduler's state, then the step log, then the synced end of the journal. No episode can be
issued after the scheduler's state and be in the journal before its end, because all of these reads
take less than `MAX_WINDOW_S`.
"""

import contextlib
import json
import os
import re
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from common.store.run_dir import RunDir
from learner.journal.journal import (
    MAGIC,
    JournalFile,
    JournalPosition,
    journal_files,
    load_pruned,
    synced_end,
)

MAX_WINDOW_S = 0.05
MAX_TRIES = 20
PAUSE_S = 0.02  # Seconds between two tries.
CHECKPOINT = re.compile(r"checkpoints/step-(\d+)/")
_CHECKPOINT_FOLDER = re.compile(r"step-\d+")
_MARKER = "COMPLETE"  # The last file of a checkpoint.
_STATE_LOG = re.compile(rb'\{"log": (\d+)')
# Files that are appended to. They may be replaced by shorter ones, so they stay open for the copy.
APPENDED = (
    "journal/steps.jsonl",
    "journal/group_rewards.jsonl",  # After the steps, whose groups it must have.
    "journal/parts.jsonl",  # After the steps, whose parts it must have.
    "checksums.jsonl",
    "metrics.jsonl",
    "outcomes.jsonl",
    "config_changes.jsonl",
)
REPLACED = (  # Small files, each of which is replaced as a whole.
    "date.txt",
    "item_digests.json",
    "precision.json",
    "ledger.json",
    "selection.json",
    "eval.jsonl",
    "cpu.json",
    "finished.json",
    "report.json",
    "report.html",
)
# Ids of the run in its trackers, one file for each tracker and job.
TRACKER_IDS = ("wandb_id*", "mlflow_id*", "trackio_id*")
JUDGES = "judges"  # Folder of the judges' answers and totals, in SQLite files.
FOLDERS = ("tokenizer", "policy")  # Files that do not change during the run.


class SourceChanged(Exception):
    """A file was replaced or removed between the cut and its copy. A new cut is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedFile:
    """A file of the cut: its first `size` bytes."""

    name: str  # Path below the run directory.
    size: int
    content: bytes | None = None  # Bytes of a small file, read with the cut.
    descriptor: int | None = None  # Descriptor of a file that may be replaced.
    path: Path | None = None  # Path of a file that is never replaced.
    mtime_ns: int = 0
    inode: int = 0
    is_growing: bool = False

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return some bytes. Raises: SourceChanged."""
        if self.content is not None:
            return self.content[offset : offset + num_bytes]
        if self.descriptor is not None:
            return _read(self.descriptor, offset, num_bytes)
        assert self.path is not None
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise SourceChanged(str(self.path)) from error
        try:
            stat = os.fstat(descriptor)
            is_same = self.is_growing or (stat.st_size, stat.st_mtime_ns) == (
                self.size,
                self.mtime_ns,
            )
            if not is_same or stat.st_ino != self.inode:
                raise SourceChanged(str(self.path))
            return _read(descriptor, offset, num_bytes)
        finally:
            os.close(descriptor)


def _read(descriptor: int, offset: int, num_bytes: int) -> bytes:
    """Return bytes of an open file. Raises: SourceChanged: the file is shorter."""
    content = os.pread(descriptor, num_bytes, offset)
    if len(content) < num_bytes:
        raise SourceChanged(f"{num_bytes - len(content)} bytes after offset {offset} are missing")
    return content


@dataclass(slots=True, kw_only=True)
class RunCapture:
    """The files of a cut. Close it, since some files are open."""

    at: float  # Unix time.
    journal: JournalPosition  # Synced end of the journal.
    pruned_before: int  # The journal's files with smaller numbers were removed.
    files: list[CapturedFile] = field(default_factory=list[CapturedFile])

    def close(self) -> None:
        """Close the open files."""
        for file in self.files:
            if file.descriptor is not None:
                os.close(file.descriptor)

    def __enter__(self) -> "RunCapture":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def capture(
    run_dir: RunDir, *, with_temporary: bool = False, now: Callable[[], float] = time.monotonic
) -> RunCapture:
    """Return a consistent cut through the files of a run.

    Args:
        with_temporary: whether temporary checkpoints, which the next one replaces, are included.
            Without another checkpoint they always are.

    Raises: OSError: a file is missing, or the reads took too long `MAX_TRIES` times.
    """
    reason = ""
    for _ in range(MAX_TRIES):
        cut = RunCapture(at=time.time(), journal=JournalPosition(), pruned_before=0)
        with contextlib.ExitStack() as stack:
            stack.callback(cut.close)
            try:
                took_s = _fill(cut, run_dir, with_temporary=with_temporary, now=now)
                reason = f"the reads took {took_s:.2f} s"
                if took_s <= MAX_WINDOW_S:
                    stack.pop_all()
                    return cut
            except (SourceChanged, FileNotFoundError) as error:
                reason = f"{error} was replaced or is missing"
        time.sleep(PAUSE_S)
    raise OSError(f"{run_dir.root}: no consistent state after {MAX_TRIES} tries: {reason}")


def _fill(
    cut: RunCapture, run_dir: RunDir, *, with_temporary: bool, now: Callable[[], float]
) -> float:
    """Add the files; return the seconds between the scheduler's state and the journal's end."""
    root = run_dir.root
    files = cut.files
    files += _config(root)
    files += _replaced(root, "journal/replay_point.json")
    files += _checkpoints(root, with_temporary=with_temporary)
    for name in FOLDERS:
        files += _tree(root, root / name)
    started = now()
    files += _scheduler(root)
    for name in APPENDED:
        files += _appended(root, name)
    cut.journal = synced_end(run_dir.journal)
    took_s = now() - started
    cut.pruned_before = _add_journal(cut, run_dir)
    for name in (*REPLACED, *_tracker_ids(root)):
        files += _replaced(root, name)
    for path in sorted((root / "tensorboard").rglob("events.*")):
        files += _appended(root, path.relative_to(root).as_posix())
    return took_s


def _tracker_ids(root: Path) -> list[str]:
    """Return the names of the files with the trackers' ids."""
    return sorted(path.name for pattern in TRACKER_IDS for path in root.glob(pattern))


def add_judges(cut: RunCapture, run_dir: RunDir) -> None:
    """Add the judges' answers and totals. Raises: OSError: a file is damaged."""
    for path in sorted((run_dir.root / JUDGES).glob("*.sqlite")):
        cut.files.append(_database(run_dir.root, path))


def _database(root: Path, path: Path) -> CapturedFile:
    """Return the state of a SQLite file that other processes write to.

    Raises: OSError: the file is damaged, or busy for too long.
    """
    with tempfile.NamedTemporaryFile(prefix="longstride-") as temporary:
        try:
            with (
                closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True)) as base,
                closing(sqlite3.connect(temporary.name)) as target,
            ):
                base.backup(target)
        except sqlite3.Error as error:
            raise OSError(f"{path}: {error}") from error
        descriptor = os.open(temporary.name, os.O_RDONLY)
    name = path.relative_to(root).as_posix()
    return CapturedFile(name=name, size=os.fstat(descriptor).st_size, descriptor=descriptor)


def _config(root: Path) -> Iterator[CapturedFile]:
    """Yield the run's configuration without tokens and credentials in URLs, if it exists."""
    try:
        text = (root / "config.yaml").read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    head = text.partition("\n")[0]
    tree = _without_secrets(yaml.safe_load(text))
    bare = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    content = (f"{head}\n{bare}" if head.startswith("#") else bare).encode()
    yield CapturedFile(name="config.yaml", size=len(content), content=content)


def _without_secrets(value: Any) -> Any:
    """Return a value of the configuration without tokens and credentials in URLs."""
    match value:
        case dict():
            tree = cast(dict[str, Any], value)
            return {k: "" if k == "token" else _without_secrets(v) for k, v in tree.items()}
        case list():
            return [_without_secrets(each) for each in cast(list[Any], value)]
        case str():
            return re.sub(r"(?<=://)[^/@\s]*@", "", value)
        case _:
            return value


def _replaced(root: Path, name: str) -> Iterator[CapturedFile]:
    """Yield a small file with its content, if it exists."""
    try:
        content = (root / name).read_bytes()
    except FileNotFoundError:
        return
    yield CapturedFile(name=name, size=len(content), content=content)


def _appended(root: Path, name: str) -> Iterator[CapturedFile]:
    """Yield a file that is appended to, if it exists. It stays open."""
    try:
        descriptor = os.open(root / name, os.O_RDONLY)
    except FileNotFoundError:
        return
    yield CapturedFile(name=name, size=os.fstat(descriptor).st_size, descriptor=descriptor)


def _tree(root: Path, folder: Path) -> Iterator[CapturedFile]:
    """Yield the files of a folder that do not change."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield _whole(root, path)


def _whole(root: Path, path: Path) -> CapturedFile:
    """Return a file that does not change."""
    stat = path.stat()
    return CapturedFile(
        name=path.relative_to(root).as_posix(),
        size=stat.st_size,
        path=path,
        mtime_ns=stat.st_mtime_ns,
        inode=stat.st_ino,
    )


def _checkpoints(root: Path, *, with_temporary: bool) -> Iterator[CapturedFile]:
    """Yield the files of the complete checkpoints. Raises: SourceChanged."""
    folders = [
        path
        for path in sorted((root / "checkpoints").glob("step-*"))
        if _CHECKPOINT_FOLDER.fullmatch(path.name) and (path / _MARKER).exists()
    ]
    lasting = [path for path in folders if not _is_temporary(path / _MARKER)]
    for folder in folders if with_temporary or not lasting else lasting:
        before = folder.stat().st_ino
        yield from _tree(root, folder)
        if folder.stat().st_ino != before:
            raise SourceChanged(str(folder))


def _is_temporary(marker: Path) -> bool:
    """Return whether the next checkpoint replaces this one."""
    try:
        return bool(json.loads(marker.read_bytes()).get("is_passing"))
    except (OSError, ValueError, AttributeError):
        return False  # A restore reports the damage.


def _scheduler(root: Path) -> Iterator[CapturedFile]:
    """Yield the scheduler's snapshot and the log that it names. Raises: SourceChanged."""
    yield from (files := list(_replaced(root, "scheduler.json")))
    log_number = _STATE_LOG.match(files[0].content or b"") if files else None
    if log_number is not None:
        name = f"scheduler.{int(log_number[1])}.log"
        log = list(_replaced(root, name))
        if not log:
            raise SourceChanged(name)
        yield from log


def _add_journal(cut: RunCapture, run_dir: RunDir) -> int:
    """Add the journal up to its synced end; return the number of its first file."""
    root = run_dir.root
    end = cut.journal
    pruned = load_pruned(run_dir.journal)
    files = {n: path for n, path in journal_files(run_dir.journal).items() if n <= end.file}
    if files and [*files] != [*range(pruned.before, end.file + 1)]:
        raise SourceChanged(f"a file of {run_dir.journal}")
    for number, path in files.items():
        file = _whole(root, path)
        cut.files.append(file if number < end.file else _last_file(file, path, end))
    cut.files += _replaced(root, "journal/pruned.json")
    if (run_dir.journal / "synced").exists():
        mark = end.mark()
        cut.files.append(CapturedFile(name="journal/synced", size=len(mark), content=mark))
    return pruned.before


def _last_file(file: CapturedFile, path: Path, end: JournalPosition) -> CapturedFile:
    """Return the synced part of the last file. Raises: OSError: it is shorter."""
    with JournalFile(path) as journal_file:
        size = end.offset + (0 if journal_file.is_old else len(MAGIC))
    if path.suffix != ".log":
        return file
    if file.size < size and end.offset:
        raise OSError(f"{path}: acknowledged records are missing after byte {file.size}")
    return CapturedFile(
        name=file.name, size=min(size, file.size), path=path, inode=file.inode, is_growing=True
    )
