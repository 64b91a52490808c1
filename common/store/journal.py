"""The journal: every accepted trajectory of a run, append-only, in segments on disk.

A segment `000000.log` is a row of records: u32 length, u32 crc32 of the payload (both little
endian), payload. One writer, any number of readers, at the same time.
"""

import fcntl
import logging
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from common.errors import ConfigError, WireError
from common.store.run_dir import sync_folder
from common.wire.codec import pack_frames, pack_record, unpack_record
from common.wire.messages import Trajectory

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<II")
MAX_RECORD_BYTES = 1024 * 1024 * 1024
MAX_SEGMENT_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class JournalPosition:
    """Where a record begins. Positions are ordered as the records were written."""

    segment: int = 0
    offset: int = 0  # bytes from the start of the segment


JOURNAL_START = JournalPosition()


class JournalWriter:
    """Appends trajectories, from one thread. Nothing is promised until `sync` has returned.

    Example: append, append, sync, then acknowledge both to their actors. A crash before the sync
    may leave a torn record; the next writer cuts it off, and its actor sends that episode again.
    """

    def __init__(self, folder: Path, *, max_segment_bytes: int = MAX_SEGMENT_BYTES) -> None:
        """Open the journal of `folder` at its end, creating it when it is new.

        Raises:
            ConfigError: another process is writing this journal.
            WireError: the last segment is damaged before its end; names file and offset.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._max_segment_bytes = max_segment_bytes
        self._lock = _lock_folder(folder)
        self._segment = max(_segments(folder), default=0)
        self._fd = self._open_segment(self._segment)
        try:
            self._cut_torn_tail()
        except WireError:
            os.close(self._fd)
            self._lock.close()
            raise
        self._offset = os.fstat(self._fd).st_size
        self._sync_lock = threading.Lock()  # while a file is synced it is not closed

    @property
    def position(self) -> JournalPosition:
        """Where the next record will begin, unless a new segment is due."""
        return JournalPosition(segment=self._segment, offset=self._offset)

    def append(self, message: Trajectory, frames: list[bytes] | None = None) -> JournalPosition:
        """Write one trajectory and return where it begins. Not durable before `sync`.

        Args:
            frames: those that the message came in, if it did; they are what is written then.

        Raises:
            OSError: the disk refused; the journal is as before and may be tried again.
            WireError: the message cannot be packed, or is over MAX_RECORD_BYTES.
        """
        payload = pack_record(message) if frames is None else pack_frames(frames)
        if len(payload) > MAX_RECORD_BYTES:
            raise WireError(f"{message.episode_id}: {len(payload)} bytes is over the record limit")
        record = _HEADER.pack(len(payload), zlib.crc32(payload)) + payload
        if self._offset and self._offset + len(record) > self._max_segment_bytes:
            self._rotate()
        position = self.position
        try:
            _write_all(self._fd, record)
        except OSError:
            os.ftruncate(self._fd, self._offset)  # a torn record in the middle would end reading
            raise
        self._offset += len(record)
        return position

    def sync(self) -> None:
        """Return when everything appended so far survives a power cut. From any thread."""
        with self._sync_lock:
            os.fsync(self._fd)

    def close(self) -> None:
        """Sync, and let another process write. Closing twice is allowed."""
        if self._fd < 0:
            return
        self.sync()
        os.close(self._fd)
        self._fd = -1
        self._lock.close()

    def _rotate(self) -> None:
        following = self._open_segment(self._segment + 1)
        with self._sync_lock:
            os.fsync(self._fd)
            full, self._fd = self._fd, following
        os.close(full)
        self._segment += 1
        self._offset = 0

    def _open_segment(self, segment: int) -> int:
        path = _segment_path(self._folder, segment)
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        sync_folder(self._folder)  # else the new name itself may be lost in a power cut
        return fd

    def _cut_torn_tail(self) -> None:
        """Move torn bytes to a file beside the journal."""
        path = _segment_path(self._folder, self._segment)
        with path.open("rb", buffering=0) as handle:
            end = 0
            while (payload := _read_record(handle, path, end)) is not None:
                end += _HEADER.size + len(payload)
            handle.seek(end)
            torn = handle.read()
        if torn:
            path.with_name(f"{path.stem}-{end}.torn").write_bytes(torn)
            os.ftruncate(self._fd, end)
            os.fsync(self._fd)
            logger.warning("cut torn tail file=%s offset=%d bytes=%d", path, end, len(torn))


def read_journal(
    folder: Path, *, start: JournalPosition = JOURNAL_START
) -> Iterator[tuple[JournalPosition, Trajectory]]:
    """Yield every whole record from `start` on, each with the position where it begins.

    Ends at the last whole record; what a writer is in the middle of appending is not seen. A
    missing folder is an empty journal.

    Raises:
        WireError: a record that has successors is damaged, a segment is missing, or `start` lies
            behind the end of its segment; names file and offset.
    """
    segment, offset = start.segment, start.offset
    while (path := _segment_path(folder, segment)).exists():
        with path.open("rb", buffering=0) as handle:
            if offset > os.fstat(handle.fileno()).st_size:
                raise WireError(f"{path}: no offset {offset}, the file is shorter")
            yield from _read_segment(handle, path, segment, offset)
        segment, offset = segment + 1, 0
    last = max(_segments(folder), default=-1)
    if last >= segment:
        raise WireError(f"{path} is missing, but segment {last} exists")


def _read_segment(
    handle: IO[bytes], path: Path, segment: int, offset: int
) -> Iterator[tuple[JournalPosition, Trajectory]]:
    successor = _segment_path(path.parent, segment + 1)
    while True:
        # Asked before reading: a segment that had a successor by then is complete.
        is_sealed = successor.exists()
        payload = _read_record(handle, path, offset)
        if payload is not None:
            position = JournalPosition(segment=segment, offset=offset)
            yield position, _unpack(payload, path, offset)
            offset += _HEADER.size + len(payload)
        elif is_sealed and offset < os.fstat(handle.fileno()).st_size:
            raise WireError(f"{path} at offset {offset}: torn record in a finished segment")
        elif is_sealed or not successor.exists():
            return


def _read_record(handle: IO[bytes], path: Path, offset: int) -> bytes | None:
    """Return the payload at `offset`, or None at the end of the file or at a torn tail."""
    size = os.fstat(handle.fileno()).st_size
    handle.seek(offset)
    header = handle.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    length, crc = _HEADER.unpack(header)
    end = offset + _HEADER.size + length
    if length == 0 and _is_zero(handle, offset):
        return None  # after a power cut a file may be long enough and yet hold only zeros
    if not 0 < length <= MAX_RECORD_BYTES:
        raise WireError(f"{path} at offset {offset}: record length {length}")
    if end > size:
        return None
    payload = handle.read(length)
    if len(payload) == length and zlib.crc32(payload) == crc:
        return payload
    if end >= size:
        return None
    raise WireError(f"{path} at offset {offset}: checksum does not match, the record is damaged")


def _is_zero(handle: IO[bytes], offset: int) -> bool:
    handle.seek(offset)
    return not any(any(chunk) for chunk in iter(lambda: handle.read(1 << 20), b""))


def _unpack(payload: bytes, path: Path, offset: int) -> Trajectory:
    message = unpack_record(payload)
    if not isinstance(message, Trajectory):
        name = type(message).__name__
        raise WireError(f"{path} at offset {offset}: {name} is not a Trajectory")
    return message


def _segment_path(folder: Path, segment: int) -> Path:
    return folder / f"{segment:06d}.log"


def _segments(folder: Path) -> list[int]:
    return [int(path.stem) for path in folder.glob("[0-9]*.log") if path.stem.isdigit()]


def _write_all(fd: int, record: bytes) -> None:
    view = memoryview(record)
    while view:
        view = view[os.write(fd, view) :]


def _lock_folder(folder: Path) -> IO[bytes]:
    """Hold the folder's lock; it falls with the process, however that ends."""
    lock = (folder / "lock").open("ab")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise ConfigError(f"another process is writing the journal in {folder}") from error
    return lock
