"""The cache of dequantised checkpoints: one folder for each quantised one and each dtype."""

import errno
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from common.errors import ConfigError
from common.host.process_settings import cache_home
from common.repository import ROOT
from common.store.disk import is_no_room
from common.store.run_dir import sync_folder
from tools.dequantise.base import found_again
from tools.dequantise.checkpoints import Quantised, find_quantised
from tools.dequantise.record import RECORD, Record, is_complete, read_record

NOTE_S = 30.0  # Seconds between two lines about the progress.
PARTIAL = ".partial"  # Ends of the names of incomplete folders, and of the files that lock them.
LOCK = ".lock"


def cache_folder(configured: str) -> Path:
    """Return the folder of all dequantised checkpoints; `model.cache_folder`, or the default."""
    return ROOT / configured if configured else cache_home() / "longstride/dequantised"


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModels:
    """The dequantised checkpoints in a folder of the cache."""

    folder: Path
    current: list[Path]  # A start of their sources uses these folders.
    outdated: list[Path]  # Folders that no start writes or finds again, and rests of killed starts.

    @property
    def outdated_bytes(self) -> int:
        return sum(map(_bytes_in, self.outdated))

    @property
    def num_bytes(self) -> int:
        return sum(map(_bytes_in, self.current)) + self.outdated_bytes


def cached_models(folder: Path) -> CachedModels:
    """Return the dequantised checkpoints in a folder of the cache.

    A checkpoint is outdated if its source is missing, or gives a folder of another name: its files
    have changed.
    """
    models = CachedModels(folder=folder, current=[], outdated=[])
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        record = read_record(path)
        if record is not None:
            (models.current if _is_current(path, record) else models.outdated).append(path)
        elif path.name.endswith(PARTIAL) and not _is_locked(path):
            models.outdated.append(path)
    return models


def _is_current(path: Path, record: Record) -> bool:
    """Return whether a start of the source of a checkpoint finds this folder."""
    try:
        source = found_again(Path(record.source), record.method, record.dtype) or find_quantised(
            Path(record.source), record.dtype, key="model.path"
        )
    except ConfigError:  # Several models instead of one.
        return False
    return source is not None and source.name == path.name


def _is_locked(partial: Path) -> bool:
    """Return whether a start dequantises into a folder now."""
    lock = partial.with_name(partial.name.removesuffix(PARTIAL) + LOCK)
    if not lock.is_file():
        return False
    with lock.open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def dequantise(quantised: Quantised, folder: Path, *, key: str) -> None:
    """Write the dequantised checkpoint to a folder of the cache, if it is not there.

    A folder with this name is always complete: it is renamed after its last byte. Starts of the
    same checkpoint wait for each other.

    Raises: ConfigError: the disk is full or not writable, or a file is damaged.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if not is_complete(folder):
                _write(quantised, folder)
    except OSError as error:
        if is_no_room(error):
            raise _no_room(quantised, folder, key=key) from error
        raise ConfigError(
            f"model.cache_folder={folder.parent}: {error.strerror or error}, and the weights of"
            f" {key}={quantised.path} are dequantised into it. Set another folder"
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder of the cache; the system releases it if the process ends."""
    with (folder.parent / f".{folder.name}{LOCK}").open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            show(f"another start dequantises into {folder}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(quantised: Quantised, folder: Path) -> None:
    partial = folder.parent / f".{folder.name}{PARTIAL}"
    for path in (partial, folder):  # The rest of a killed start, or a damaged folder.
        shutil.rmtree(path, ignore_errors=True)
    needed = quantised.num_bytes
    if shutil.disk_usage(folder.parent).free < needed:
        raise OSError(errno.ENOSPC, "No space left on device")
    partial.mkdir()
    started = time.monotonic()
    show(
        f"dequantising {quantised.path} ({quantised.method}) to {quantised.dtype}:"
        f" {needed / 1e9:,.2f} GB in {folder}"
    )
    try:
        _fill(quantised, partial, folder, started)
        partial.rename(folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    show(f"dequantised {quantised.path} in {time.monotonic() - started:.0f} s")


def _fill(quantised: Quantised, partial: Path, folder: Path, started: float) -> None:
    """Write all files of a checkpoint; the record comes last."""
    note_at = started + NOTE_S

    def note(num_bytes: int) -> None:
        nonlocal note_at
        if time.monotonic() > note_at:
            note_at = time.monotonic() + NOTE_S
            show(f"dequantised {num_bytes / 1e9:,.1f} of {quantised.num_bytes / 1e9:,.1f} GB")

    quantised.write_small_files(partial)
    record = quantised.write_weights(partial, folder, note=note)
    path = partial / RECORD
    with path.open("w", encoding="utf-8") as file:
        json.dump(asdict(record), file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(partial)


def _no_room(quantised: Quantised, folder: Path, *, key: str) -> ConfigError:
    free = shutil.disk_usage(folder.parent).free
    return ConfigError(
        f"{key}={quantised.path}: the weights are quantised ({quantised.method}), and"
        f" dequantised they need {quantised.num_bytes / 1e9:,.1f} GB in {folder.parent}, where"
        f" {free / 1e9:,.1f} GB are free. Free disk space, or set model.cache_folder to a folder on"
        " another disk"
    )


def show(text: str) -> None:
    """Print a line on stderr: the log of the command is not open yet."""
    print(text, file=sys.stderr, flush=True)
