"""The journal: every accepted trajectory of a run, append-only, in segments on disk.

`common/store/records.py` tells the bytes. One writer, any number of readers, at the same time.
"""

import fcntl
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from common.errors import ConfigError, WireError
from common.store.disk import MAX_BUFFERS, AppendFile, is_no_room, with_room
from common.store.records import MAGIC, PACKED_SUFFIX, REMEDY, Record, Segment, record_buffers
from common.store.run_dir import sync_folder
from common.store.segments import (
    JOURNAL_START,
    JournalPosition,
    SyncedMark,
    list_segments,
    load_pruned,
    open_segment,
    segment_path,
    synced_end,
)
from common.wire.codec import encode
from common.wire.messages import Trajectory

__all__ = ["JOURNAL_START", "JournalPosition", "JournalWriter", "read_journal"]

logger = logging.getLogger(__name__)

MAX_SEGMENT_BYTES = 256 * 1024 * 1024


class JournalWriter:
    """Appends trajectories, from one thread. Nothing is promised until `sync` has returned.

    Example: append, append, sync, then acknowledge both to their actors. A crash before the sync
    may leave a torn record; the next writer cuts it off, and its actor sends that episode again.
    What a crash left whole is synced before the next writer says that it knows it.
    """

    def __init__(self, folder: Path, *, max_segment_bytes: int = MAX_SEGMENT_BYTES) -> None:
        """Open the journal of `folder` at its end, creating it when it is new.

        Raises:
            ConfigError: another process is writing this journal.
            WireError: something that was acknowledged is damaged or missing; names file and offset.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = self._folder = folder
        self._max_segment_bytes = max_segment_bytes
        self._sync_lock = threading.Lock()  # while a file is synced it is not closed
        self._is_stopping = threading.Event()
        self._lock = _lock_folder(folder)
        try:
            self._segment, self._file = self._open_last()
        except BaseException:
            self._lock.close()
            raise
        self._synced = SyncedMark(folder)
        self._sync()

    @property
    def position(self) -> JournalPosition:
        """Where the next record will begin, unless a new segment is due."""
        return JournalPosition(segment=self._segment, offset=self._file.size - len(MAGIC))

    def append(self, message: Trajectory, frames: Sequence[bytes] | None = None) -> JournalPosition:
        """Write one trajectory and return where it begins. Not durable before `sync`.

        Args:
            frames: those that the message came in, if it did; they are what is written then.

        Raises: as `append_some`.
        """
        return self.append_some([(message, encode(message) if frames is None else frames)])[0]

    def append_some(
        self, records: Iterable[tuple[Trajectory, Sequence[bytes]]]
    ) -> list[JournalPosition]:
        """Write the first of these records in one go: as many as one call and one segment take.

        Args:
            records: trajectories with the frames that they came in; at least one.

        Returns: where each begins that was written, the first in any case.

        Raises:
            OSError: the disk refused; the journal is as before and may be tried again.
            WireError: a record is over MAX_RECORD_BYTES.
        """
        buffers, starts, end = list[bytes](), list[int](), self.position.offset
        for message, frames in records:
            try:
                record = record_buffers(frames)
            except WireError as error:
                raise WireError(f"{message.episode_id}: {error}") from error
            num_bytes = sum(map(len, record))
            is_over = end > 0 and end + num_bytes > self._max_segment_bytes
            if starts and (is_over or len(buffers) + len(record) > MAX_BUFFERS):
                break
            if is_over:
                self._rotate()
                end = 0
            buffers += record
            starts.append(end)
            end += num_bytes
        self._file.append(buffers)
        segment = self._segment
        return [JournalPosition(segment=segment, offset=offset) for offset in starts]

    def sync(self) -> None:
        """Return when everything appended so far survives a power cut. From any thread.

        While the disk is full it waits. Raises: OSError: the disk failed; DiskFull: closed first.
        """
        with self._sync_lock:
            self._sync()

    def _sync(self) -> None:
        end = self.position
        try:
            self._file.sync()
        except OSError as error:
            if not is_no_room(error):
                raise
            with_room(self._sync_again, self._file.path, check=self._check)
            end = self.position
        self._synced.move(end)

    def _sync_again(self) -> None:
        known = synced_end(self._folder)
        start = known.offset if known.segment == self._segment else 0
        self._file.write_again(len(MAGIC) + start, self._file.size)
        self._file.sync()

    def _check(self) -> None:
        if self._is_stopping.is_set():
            raise OSError("the journal is closed while the disk is full")

    def close(self) -> None:
        """Sync, and let another process write. Closing twice is allowed."""
        if self._lock.closed:
            return
        self._is_stopping.set()
        try:
            self.sync()
        finally:
            self._file.close()
            self._synced.close()
            self._lock.close()

    def _rotate(self) -> None:
        following = self._new_segment(self._segment + 1)
        with self._sync_lock:
            self._sync()
            self._file.close()
            self._segment, self._file = self._segment + 1, following

    def _new_segment(self, segment: int) -> AppendFile:
        """Return a segment without records; what a crash left of its first bytes is cut off."""
        file = AppendFile(segment_path(self._folder, segment))
        try:
            file.truncate(0)
            file.append([MAGIC])
            sync_folder(self._folder)  # else the new name itself may be lost in a power cut
        except OSError:
            file.close()
            file.path.unlink()  # to a reader it would say that the one before is complete
            raise
        return file

    def _open_last(self) -> tuple[int, AppendFile]:
        """Return the segment to go on with, durable: a new one behind one of the old format."""
        number = max(list_segments(self._folder), default=load_pruned(self._folder).before)
        synced = synced_end(self._folder)
        if synced.segment > number:
            raise WireError(f"{segment_path(self._folder, synced.segment)} is missing; {REMEDY}")
        segment = open_segment(self._folder, number)
        if segment is None:
            return number, self._new_segment(number)
        with segment:
            end = 0
            for _, record in segment.records():
                end = record.end
            if synced > JournalPosition(segment=number, offset=end):
                raise _acknowledged(segment, end, synced)
            is_packed = segment.path != segment_path(self._folder, number)
            if is_packed or (segment.is_old and end):
                self._cut(segment, end, is_packed=is_packed)
                return number + 1, self._new_segment(number + 1)
            if not end:
                self._cut(segment, end)
                return number, self._new_segment(number)
            self._cut(segment, end)
        file = AppendFile(segment_path(self._folder, number))
        sync_folder(self._folder)
        return number, file

    def _cut(self, segment: Segment, end: int, *, is_packed: bool = False) -> None:
        """Move torn bytes to a file beside the journal; what is left is durable."""
        if is_packed:
            return
        file = AppendFile(segment.path)
        num_torn = segment.size - end
        torn = file.truncate(file.size - num_torn) if num_torn > 0 else b""
        file.sync()
        file.close()
        if torn:
            path = segment.path
            path.with_name(f"{path.stem}-{end}.torn").write_bytes(torn)
            logger.warning("cut torn tail file=%s offset=%d bytes=%d", path, end, len(torn))


def read_journal(
    folder: Path, *, start: JournalPosition | None = None
) -> Iterator[tuple[JournalPosition, Trajectory]]:
    """Yield every whole record from `start` on, each with the position where it begins.

    Ends at the last whole record; what a writer is in the middle of appending is not seen. A
    missing folder is an empty journal.

    Args:
        start: None is the first record that is there, whatever was pruned.

    Raises:
        WireError: an acknowledged record is damaged, a segment is missing or was pruned, or `start`
            lies behind the end of its segment; names file and offset.
    """
    pruned = load_pruned(folder)
    if start is not None and start.segment < pruned.before:
        raise WireError(f"{pruned.text(folder)}, and {start} is needed; restore them from a backup")
    if start is None and pruned.before:
        logger.warning("%s; what is left is read", pruned.text(folder))
    first = start or JournalPosition(segment=pruned.before)
    number, offset = first.segment, first.offset
    while (segment := open_segment(folder, number)) is not None:
        with segment:
            if offset > segment.size:
                raise WireError(f"{segment.path}: no offset {offset}, the file is shorter")
            for here, record in _records(folder, segment, number, offset):
                position = JournalPosition(segment=number, offset=here)
                yield position, segment.message(record, here)
        number, offset = number + 1, 0
    last = max(max(list_segments(folder), default=-1), synced_end(folder).segment)
    if last > number or (last == number and synced_end(folder).offset):
        raise WireError(f"{segment_path(folder, number)} is missing; {REMEDY}")


def _records(
    folder: Path, segment: Segment, number: int, offset: int
) -> Iterator[tuple[int, Record]]:
    is_sealed = False
    while True:
        # Asked before reading: a segment that had a successor by then is complete.
        is_sealed = is_sealed or _has(folder, number + 1)
        record = segment.record_at(offset)
        if record is not None:
            yield offset, record
            offset = record.end
        elif is_sealed and offset < segment.size:
            raise WireError(
                f"{segment.path} at offset {offset}: torn record in a finished segment; {REMEDY}"
            )
        elif is_sealed:
            return
        else:
            synced = synced_end(folder)
            if synced <= JournalPosition(segment=number, offset=offset):
                if not _has(folder, number + 1):
                    return
            elif segment.record_at(offset) is None and not _has(folder, number + 1):
                raise _acknowledged(segment, offset, synced)


def _has(folder: Path, number: int) -> bool:
    path = segment_path(folder, number)
    return path.exists() or path.with_name(path.name + PACKED_SUFFIX).exists()


def _acknowledged(segment: Segment, offset: int, synced: JournalPosition) -> WireError:
    folder = segment.path.parent
    number = int(segment.path.name.partition(".")[0])
    lost = f"{segment.path} at offset {offset}: damaged"
    if synced.segment > number:
        lost = f"{segment_path(folder, number + 1)} is missing"
    return WireError(
        f"{lost}, and acknowledged records go on to offset {synced.offset} of segment"
        f" {synced.segment}; {REMEDY}, or remove {folder / 'synced'} to go on without them"
    )


def _lock_folder(folder: Path) -> IO[bytes]:
    """Hold the folder's lock; it falls with the process, however that ends."""
    lock = (folder / "lock").open("ab")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise ConfigError(f"another process is writing the journal in {folder}") from error
    return lock
