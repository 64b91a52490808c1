"""The run directory: where every file of a run lies, and where its scheduler and hub are found."""

import contextlib
import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

from common.errors import ConfigError, PeerMissing

DESCRIPTORS_S = 10.0
T = TypeVar("T")
ADDRESS_POLL_S = 0.05  # a file tells it, at times on a shared disk, where no event does


class _Below:
    """A path below the root of a run."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, run_dir: "RunDir", owner: type) -> Path:
        return run_dir.root / self._path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDir:
    """Paths of one run. Owns nothing but the names."""

    root: Path

    config = _Below("config.yaml")  # resolved, as the roles load it
    journal = _Below("journal")  # trajectories
    steps = _Below("journal/steps.jsonl")  # what each step consumed
    replay_point = _Below("journal/replay_point.json")
    precision = _Below("precision.json")  # in which the learner computes
    checkpoints = _Below("checkpoints")
    metrics = _Below("metrics.jsonl")  # one line per step
    checksums = _Below("checksums.jsonl")  # of each step's stages and weights
    logs = _Below("logs")  # <role>.log
    ledger = _Below("ledger.json")
    selection = _Below("selection.json")  # who was dropped
    cpu = _Below("cpu.json")  # the launcher's, every few seconds: what each role has used
    outcomes = _Below("outcomes.jsonl")  # what became of each episode, as the scheduler booked it
    date = _Below("date.txt")  # that every prompt names, YYYY-MM-DD
    tokenizer = _Below("tokenizer")  # with which the journal was written
    status = _Below("status.json")  # the scheduler's, once a second
    launch = _Below("launch.json")  # the launcher's, while it runs
    alive = _Below("alive")  # what each role on this machine is doing
    stalls = _Below("stalls")  # reports of what stood still
    finished = _Below("finished.json")  # only after the last step
    report = _Below("report.json")
    keys = _Below("keys")  # 0600
    addresses = _Below("addresses")  # where roles listen

    def read_date(self) -> str:
        """Return the date that the run's prompts name, "" if it kept none."""
        return self.date.read_text(encoding="utf-8").strip() if self.date.is_file() else ""

    def publish_address(self, role: str, address: str) -> None:
        """Tell the roles on this disk where `role` listens: the scheduler, which tells the rest."""
        self.addresses.mkdir(parents=True, exist_ok=True)
        write_atomically(self.addresses / role, address)

    def forget_address(self, role: str) -> None:
        """Remove a stale address before its role starts again."""
        (self.addresses / role).unlink(missing_ok=True)

    def find_address(self, role: str) -> str | None:
        """Return where `role` listens now, None if it has not said so. Does not wait."""
        try:
            return (self.addresses / role).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None

    def wait_for_address(self, role: str, *, timeout_s: float) -> str:
        """Return where `role` listens, blocking this thread until it says so.

        Raises: PeerMissing: nothing was published in time; names the role and the file.
        """
        deadline = time.monotonic() + timeout_s
        while (address := self.find_address(role)) is None:
            if time.monotonic() > deadline:
                path = self.addresses / role
                raise PeerMissing(f"no {role} within {timeout_s:g}s: {path} does not exist")
            time.sleep(ADDRESS_POLL_S)
        return address


def cut_head(path: Path, start: int, *, head: bytes = b"") -> None:
    """Replace what lies before an offset of a file; a power cut leaves the old or the new file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with path.open("rb") as old, opened(lambda: temporary.open("wb")) as new:
            old.seek(start)
            new.write(head)
            shutil.copyfileobj(old, new, 1 << 20)
            new.flush()
            os.fsync(new.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # on a full disk it is in the way
        raise
    sync_folder(path.parent)


def write_atomically(
    path: Path, text: str, *, is_durable: bool = False, mode: int | None = None
) -> None:
    """Replace a file so that a reader sees the old or the new text, never a part.

    If `is_durable`, return only when a power cut leaves one of the two as well.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with opened(lambda: _create(temporary, mode)) as handle:
            handle.write(text)
            if is_durable:
                handle.flush()
                os.fsync(handle.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # on a full disk it is in the way
        raise
    if is_durable:
        sync_folder(path.parent)


def _create(path: Path, mode: int | None) -> TextIO:
    """Return an empty text file that has its mode from the beginning, whatever the umask is."""
    if mode is None:
        return path.open("w", encoding="utf-8")
    path.unlink(missing_ok=True)  # A file that was there would keep its mode.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    return os.fdopen(os.open(path, flags, mode), "w", encoding="utf-8")


def remove_partial_files(folder: Path) -> None:
    """Remove what writers that are dead have left half-written: `.<name>.<process id>`."""
    for path in folder.glob(".*.*[0-9]"):
        pid = path.name.rpartition(".")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(OSError):  # a folder, or gone: either is nobody's
                path.unlink()


def opened(open_it: Callable[[], T]) -> T:
    """Return what is opened; wait, `DESCRIPTORS_S` at most, while there are no descriptors left.

    Strangers may connect faster than they are sent away.
    """
    deadline = time.monotonic() + DESCRIPTORS_S
    while True:
        try:
            return open_it()
        except OSError as error:
            is_full = error.errno in (errno.EMFILE, errno.ENFILE)
            if not is_full or time.monotonic() > deadline:
                raise
        time.sleep(ADDRESS_POLL_S)


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder survive a power cut."""
    descriptor = opened(lambda: os.open(folder, os.O_RDONLY))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path, kinds: Mapping[str, type], *, remedy: str) -> dict[str, Any]:
    """Return a file's JSON object.

    Args:
        kinds: the entries that it must have, with their types.
        remedy: what to do about a damaged one; ends the error.

    Raises: ConfigError: it is damaged; names the file. OSError: it cannot be read.
    """
    try:
        found: object = json.loads(path.read_bytes())
    except ValueError as error:  # of JSON, or of UTF-8
        raise ConfigError(f"{path}: damaged, not JSON ({error}); {remedy}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: damaged, no JSON object; {remedy}")
    entries = cast(dict[str, Any], found)
    for name, kind in kinds.items():
        value = entries.get(name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{path}: damaged, {name!r} is no {kind.__name__}; {remedy}")
    return entries


def write_json(path: Path, value: object, *, indent: int | None = 2) -> None:
    """Replace a JSON file atomically; without indent it is on one line, ten times as fast."""
    write_atomically(path, json.dumps(value, indent=indent, sort_keys=True) + "\n")
