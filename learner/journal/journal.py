"""The journal: every accepted trajectory of a run, append-only, in segments on disk.

`learner/journal/files.py` defines the format. One process writes while any number of others read.
"""

import fcntl
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from common.errors import ConfigError, WireError
from common.store.disk import MAX_BUFFERS, AppendFile, is_no_room, with_room
from common.store.run_dir import sync_folder
from common.wire.codec import encode
from common.wire.messages import Trajectory
from learner.journal.files import (
    JOURNAL_START,
    MAGIC,
    PACKED_SUFFIX,
    REMEDY,
    JournalPosition,
    JournalRecord,
    Segment,
    SyncedMark,
    list_segments,
    load_pruned,
    open_segment,
    record_buffers,
    segment_path,
    synced_end,
)

__all__ = ["JOURNAL_START", "JournalPosition", "JournalWriter", "read_journal"]

logger = logging.getLogger(__name__)

MAX_SEGMENT_BYTES = 256 * 1024 * 1024


class JournalWriter:
    """Appends trajectories from one thread. A trajectory is durable only after `sync`.

    Example: append two trajectories, sync, then acknowledge both to their actors. A crash before
    the sync may leave a torn record. The next writer removes it, and the actor sends that episode
    again. It also syncs the complete records that a crash left, before the run uses them.
    """

    def __init__(self, folder: Path, *, max_segment_bytes: int = MAX_SEGMENT_BYTES) -> None:
        """Open the journal of `folder` at its end, and create it if it is missing.

        Raises:
            ConfigError: another process is writing this journal.
            WireError: an acknowledged record is damaged or missing; names file and offset.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = self._folder = folder
        self._max_segment_bytes = max_segment_bytes
        self._sync_lock = threading.Lock()  # Prevents closing a file during its sync.
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
        """Position of the next record, unless it begins a new segment."""
        return JournalPosition(segment=self._segment, offset=self._file.size - len(MAGIC))

    def append(self, message: Trajectory, frames: Sequence[bytes] | None = None) -> JournalPosition:
        """Write one trajectory and return its position. It is not durable before `sync`.

        Args:
            frames: the received frames of the message, which are written unchanged; None: the
                message is encoded.

        Raises: as in `append_some`.
        """
        return self.append_some([(message, encode(message) if frames is None else frames)])[0]

    def append_some(
        self, records: Iterable[tuple[Trajectory, Sequence[bytes]]]
    ) -> list[JournalPosition]:
        """Write the first of these records: as many as fit into one system call and one segment.

        Args:
            records: at least one trajectory with its frames.

        Returns: the positions of the written records, at least one.

        Raises:
            OSError: the write failed. The journal is unchanged, and the caller may retry.
            WireError: a record exceeds MAX_RECORD_BYTES.
        """
        buffers = list[bytes]()
        starts = list[int]()
        end = self.position.offset
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
        """Wait until all appended records survive a power cut. Thread-safe.

        Waits while the disk is full. Raises: OSError: the disk failed, or `close` ended the wait.
        """
        with self._sync_lock:
            self._sync()

    def _sync(self) -> None:
        """Sync the current segment, and record its end as synced."""
        end = self.position
        try:
            self._file.sync()
        except OSError as error:
            if not is_no_room(error):
                raise
            with_room(self._sync_again, self._file.path, check=self._check_not_stopped)
            end = self.position
        self._synced.move(end)

    def _sync_again(self) -> None:
        """Write the records since the last sync once more, and sync them."""
        known = synced_end(self._folder)
        start = known.offset if known.segment == self._segment else 0
        self._file.write_again(len(MAGIC) + start, self._file.size)
        self._file.sync()

    def _check_not_stopped(self) -> None:
        if self._is_stopping.is_set():
            raise OSError("the journal is closed while the disk is full")

    def close(self) -> None:
        """Sync, and release the lock for another process. Closing twice is allowed."""
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
        """Sync and close the current segment, and continue with a new one."""
        following = self._new_segment(self._segment + 1)
        with self._sync_lock:
            self._sync()
            self._file.close()
            self._segment = self._segment + 1
            self._file = following

    def _new_segment(self, segment: int) -> AppendFile:
        """Return a segment without records. An incomplete MAGIC of a crash is overwritten."""
        file = AppendFile(segment_path(self._folder, segment))
        try:
            file.truncate(0)
            file.append([MAGIC])
            sync_folder(self._folder)  # Without it a power cut could remove the new file.
        except OSError:
            file.close()
            file.path.unlink()  # Readers would take the segment before it for complete.
            raise
        return file

    def _open_last(self) -> tuple[int, AppendFile]:
        """Return the segment to append to, durable; a new one if the last is packed or old."""
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
                raise _loss_of_acknowledged(segment, end, synced)
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
        """Move torn bytes to a separate `.torn` file, and sync the remaining records."""
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
    """Yield every complete record from `start` on, each with its position.

    Ends at the last complete record. A record that is being written is not included. A missing
    folder is an empty journal.

    Args:
        start: None is the first record that was not pruned.

    Raises:
        WireError: an acknowledged record is damaged, a segment is missing or was pruned, or `start`
            is beyond the end of its segment; names file and offset.
    """
    pruned = load_pruned(folder)
    if start is not None and start.segment < pruned.before:
        raise WireError(f"{pruned.text(folder)}, but {start} is needed; restore them from a backup")
    if start is None and pruned.before:
        logger.warning("%s; the remaining segments are read", pruned.text(folder))
    first = start or JournalPosition(segment=pruned.before)
    number = first.segment
    offset = first.offset
    while (segment := open_segment(folder, number)) is not None:
        with segment:
            if offset > segment.size:
                raise WireError(f"{segment.path}: offset {offset} is beyond the end of the file")
            for here, record in _records(folder, segment, number, offset):
                position = JournalPosition(segment=number, offset=here)
                yield position, segment.message(record, here)
        number = number + 1
        offset = 0
    last = max(max(list_segments(folder), default=-1), synced_end(folder).segment)
    if last > number or (last == number and synced_end(folder).offset):
        raise WireError(f"{segment_path(folder, number)} is missing; {REMEDY}")


def _records(
    folder: Path, segment: Segment, number: int, offset: int
) -> Iterator[tuple[int, JournalRecord]]:
    """Yield the complete records of a segment, each with its offset. Raises: WireError."""
    is_sealed = False
    while True:
        # Checked before the read: a segment is complete if its successor existed by then.
        is_sealed = is_sealed or _has(folder, number + 1)
        record = segment.record_at(offset)
        if record is not None:
            yield offset, record
            offset = record.end
        elif is_sealed and offset < segment.size:
            raise WireError(
                f"{segment.path} at offset {offset}: incomplete record in a finished segment;"
                f" {REMEDY}"
            )
        elif is_sealed:
            return
        else:
            synced = synced_end(folder)
            if synced <= JournalPosition(segment=number, offset=offset):
                if not _has(folder, number + 1):
                    return
            elif segment.record_at(offset) is None and not _has(folder, number + 1):
                raise _loss_of_acknowledged(segment, offset, synced)


def _has(folder: Path, number: int) -> bool:
    """Return whether a segment exists, compressed or not."""
    path = segment_path(folder, number)
    return path.exists() or path.with_name(path.name + PACKED_SUFFIX).exists()


def _loss_of_acknowledged(segment: Segment, offset: int, synced: JournalPosition) -> WireError:
    """Return the error for damage within records that were acknowledged."""
    folder = segment.path.parent
    number = int(segment.path.name.partition(".")[0])
    lost = f"{segment.path} at offset {offset}: damaged"
    if synced.segment > number:
        lost = f"{segment_path(folder, number + 1)} is missing"
    return WireError(
        f"{lost}, but acknowledged records extend to offset {synced.offset} of segment"
        f" {synced.segment}; {REMEDY}, or remove {folder / 'synced'} to continue without them"
    )


def _lock_folder(folder: Path) -> IO[bytes]:
    """Acquire the folder's lock. The system releases it when the process ends."""
    lock = (folder / "lock").open("ab")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise ConfigError(
            f"{folder}: another process writes this journal; stop its run first"
        ) from error
    return lock
