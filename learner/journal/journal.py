"""The journal: every accepted trajectory of a run, append-only, in files on disk.

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
    JournalFile,
    JournalPosition,
    JournalRecord,
    SyncedMark,
    journal_file_path,
    journal_files,
    load_pruned,
    open_journal_file,
    record_buffers,
    synced_end,
)

__all__ = ["JOURNAL_START", "JournalPosition", "JournalWriter", "read_journal"]

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 256 * 1024 * 1024


class JournalWriter:
    """Appends trajectories from one thread. A trajectory is durable only after `sync`.

    Example: append two trajectories, sync, then acknowledge both to their actors. A crash before
    the sync may leave a torn record. The next writer removes it, and the actor sends that episode
    again. It also syncs the complete records that a crash left, before the run uses them.
    """

    def __init__(self, folder: Path, *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        """Open the journal of `folder` at its end, and create it if it is missing.

        Raises:
            ConfigError: another process is writing this journal.
            WireError: an acknowledged record is damaged or missing; names file and offset.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = self._folder = folder
        self._max_file_bytes = max_file_bytes
        self._sync_lock = threading.Lock()  # Prevents closing a file during its sync.
        self._is_stopping = threading.Event()
        self._lock = _lock_folder(folder)
        try:
            self._number, self._file = self._open_last()
        except BaseException:
            self._lock.close()
            raise
        self._synced = SyncedMark(folder)
        self._sync()

    @property
    def position(self) -> JournalPosition:
        """Position of the next record, unless it begins a new file."""
        return JournalPosition(file=self._number, offset=self._file.size - len(MAGIC))

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
        """Write the first of these records: as many as fit into one system call and one file.

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
            is_over = end > 0 and end + num_bytes > self._max_file_bytes
            if starts and (is_over or len(buffers) + len(record) > MAX_BUFFERS):
                break
            if is_over:
                self._rotate()
                end = 0
            buffers += record
            starts.append(end)
            end += num_bytes
        self._file.append(buffers)
        return [JournalPosition(file=self._number, offset=offset) for offset in starts]

    def sync(self) -> None:
        """Wait until all appended records survive a power cut. Thread-safe.

        Waits while the disk is full. Raises: OSError: the disk failed, or `close` ended the wait.
        """
        with self._sync_lock:
            self._sync()

    def _sync(self) -> None:
        """Sync the current file, and record its end as synced."""
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
        synced = synced_end(self._folder)
        start = synced.offset if synced.file == self._number else 0
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
        """Sync and close the current file, and continue with a new one."""
        following = self._new_file(self._number + 1)
        with self._sync_lock:
            self._sync()
            self._file.close()
            self._number = self._number + 1
            self._file = following

    def _new_file(self, number: int) -> AppendFile:
        """Return a file without records. An incomplete MAGIC of a crash is overwritten."""
        file = AppendFile(journal_file_path(self._folder, number))
        try:
            file.truncate(0)
            file.append([MAGIC])
            sync_folder(self._folder)  # Without it a power cut could remove the new file.
        except OSError:
            file.close()
            file.path.unlink()  # Readers would take the file before it for complete.
            raise
        return file

    def _open_last(self) -> tuple[int, AppendFile]:
        """Return the file to append to, durable; a new one if the last is packed or old."""
        number = max(journal_files(self._folder), default=load_pruned(self._folder).before)
        synced = synced_end(self._folder)
        if synced.file > number:
            raise WireError(f"{journal_file_path(self._folder, synced.file)} is missing; {REMEDY}")
        journal_file = open_journal_file(self._folder, number)
        if journal_file is None:
            return number, self._new_file(number)
        with journal_file:
            end = 0
            for _, record in journal_file.records():
                end = record.end
            if synced > JournalPosition(file=number, offset=end):
                raise _loss_of_acknowledged(journal_file, end, synced)
            is_packed = journal_file.path != journal_file_path(self._folder, number)
            if is_packed or (journal_file.is_old and end):
                self._cut(journal_file, end, is_packed=is_packed)
                return number + 1, self._new_file(number + 1)
            if not end:
                self._cut(journal_file, end)
                return number, self._new_file(number)
            self._cut(journal_file, end)
        file = AppendFile(journal_file_path(self._folder, number))
        sync_folder(self._folder)
        return number, file

    def _cut(self, journal_file: JournalFile, end: int, *, is_packed: bool = False) -> None:
        """Move torn bytes to a separate `.torn` file, and sync the remaining records."""
        if is_packed:
            return
        file = AppendFile(journal_file.path)
        num_torn = journal_file.size - end
        torn = file.truncate(file.size - num_torn) if num_torn > 0 else b""
        file.sync()
        file.close()
        if torn:
            path = journal_file.path
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
        WireError: an acknowledged record is damaged, a file is missing or was pruned, or `start`
            is beyond the end of its file; names file and offset.
    """
    pruned = load_pruned(folder)
    if start is not None and start.file < pruned.before:
        raise WireError(f"{pruned.text(folder)}, but {start} is needed; restore them from a backup")
    if start is None and pruned.before:
        logger.warning("%s; the remaining files are read", pruned.text(folder))
    first = start or JournalPosition(file=pruned.before)
    number = first.file
    offset = first.offset
    while (journal_file := open_journal_file(folder, number)) is not None:
        with journal_file:
            if offset > journal_file.size:
                raise WireError(
                    f"{journal_file.path}: offset {offset} is beyond the end of the file"
                )
            for here, record in _records(folder, journal_file, number, offset):
                position = JournalPosition(file=number, offset=here)
                yield position, journal_file.message(record, here)
        number = number + 1
        offset = 0
    last = max(max(journal_files(folder), default=-1), synced_end(folder).file)
    if last > number or (last == number and synced_end(folder).offset):
        raise WireError(f"{journal_file_path(folder, number)} is missing; {REMEDY}")


def _records(
    folder: Path, journal_file: JournalFile, number: int, offset: int
) -> Iterator[tuple[int, JournalRecord]]:
    """Yield the complete records of a file, each with its offset. Raises: WireError."""
    is_sealed = False
    while True:
        # Checked before the read: a file is complete if its successor existed by then.
        is_sealed = is_sealed or _has(folder, number + 1)
        record = journal_file.record_at(offset)
        if record is not None:
            yield offset, record
            offset = record.end
        elif is_sealed and offset < journal_file.size:
            raise WireError(
                f"{journal_file.path} at offset {offset}: incomplete record in a finished file;"
                f" {REMEDY}"
            )
        elif is_sealed:
            return
        else:
            synced = synced_end(folder)
            if synced <= JournalPosition(file=number, offset=offset):
                if not _has(folder, number + 1):
                    return
            elif journal_file.record_at(offset) is None and not _has(folder, number + 1):
                raise _loss_of_acknowledged(journal_file, offset, synced)


def _has(folder: Path, number: int) -> bool:
    """Return whether a file exists, compressed or not."""
    path = journal_file_path(folder, number)
    return path.exists() or path.with_name(path.name + PACKED_SUFFIX).exists()


def _loss_of_acknowledged(
    journal_file: JournalFile, offset: int, synced: JournalPosition
) -> WireError:
    """Return the error for damage within records that were acknowledged."""
    folder = journal_file.path.parent
    number = int(journal_file.path.name.partition(".")[0])
    lost = f"{journal_file.path} at offset {offset}: damaged"
    if synced.file > number:
        lost = f"{journal_file_path(folder, number + 1)} is missing"
    return WireError(
        f"{lost}, but acknowledged records extend to offset {synced.offset} of file"
        f" {synced.file}; {REMEDY}, or remove {folder / 'synced'} to continue without them"
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
