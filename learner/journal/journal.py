"""The journal: every accepted trajectory of a run, append-only, in files on disk.

One process writes while any number of others read. A file begins with MAGIC. A record is a head of
20 bytes, then its payload, with checksums over content and length:
    head     mark, u32 payload size, u64 XXH3 of the payload, u32 CRC-32 of these sixteen bytes
    payload  u32 number of frames, u32 size of each frame, then the frames of a message
All numbers are little endian. Files of earlier product versions stay readable. They have no
MAGIC, and each of their records is u32 length, u32 CRC-32 of the payload, payload.
"""

import fcntl
import gzip
import logging
import os
import re
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, cast

import xxhash

from common.errors import ConfigError, WireError
from common.store.disk import MAX_BUFFERS, AppendFile, is_no_room, with_room
from common.store.run_dir import read_json, sync_folder
from common.wire.codec import decode, encode, unpack_record
from common.wire.messages import Trajectory
from common.wire.versions import OLDEST_RECORD

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 256 * 1024 * 1024
MAGIC = b"LSJ\xf5\x02\0\0\0"  # As the length of an old record it would exceed the limit.
MAX_RECORD_BYTES = 1024 * 1024 * 1024
PACKED_SUFFIX = ".gz"  # Suffix of a compressed file.
_MARK = b"\xfaREC"
_HEAD = struct.Struct("<4sIQ")
_CHECK = struct.Struct("<I")
_HEAD_BYTES = _HEAD.size + _CHECK.size
_OLD_HEAD = struct.Struct("<II")
_SYNCED = struct.Struct("<QQ")
PRUNED = "pruned.json"
# First bytes of a msgpack list of frames, short or long.
_OLD_PAYLOAD = re.compile(rb"(?:[\x90-\x9f]|\xdc..)[\xc4-\xc6]", re.DOTALL)
REMEDY = "`run.py journal RUN verify` lists the readable records; restore the file from a backup"


class JournalRecord(NamedTuple):
    """A complete record."""

    payload: bytes
    end: int  # Offset of the next record.


def record_buffers(frames: Sequence[bytes]) -> list[bytes]:
    """Return the record of a message's frames, as buffers to write one after the other.

    Raises: WireError: the record exceeds MAX_RECORD_BYTES.
    """
    sizes = [len(frame) for frame in frames]
    table = struct.pack(f"<{1 + len(sizes)}I", len(sizes), *sizes)
    num_bytes = len(table) + sum(sizes)
    if num_bytes > MAX_RECORD_BYTES:
        raise WireError(f"a record of {num_bytes} bytes exceeds the limit of {MAX_RECORD_BYTES}")
    digest = xxhash.xxh3_64(table)
    for frame in frames:
        digest.update(frame)
    head = _HEAD.pack(_MARK, num_bytes, digest.intdigest())
    return [head + _CHECK.pack(zlib.crc32(head)) + table, *frames]


class JournalFile:
    """One file, opened for reading; it may still grow. Offsets count the bytes of records.

    Example: with JournalFile(path) as file: file.record_at(0) -> the first record, its end.
    """

    def __init__(self, path: Path) -> None:
        """Open a file, compressed or not. Raises: FileNotFoundError."""
        self.path = path
        self._is_packed = path.suffix == PACKED_SUFFIX
        self._handle: IO[bytes] = (
            cast(IO[bytes], gzip.GzipFile(path)) if self._is_packed else path.open("rb", 0)
        )
        self._base = 0
        begin = self._read(0, len(MAGIC))
        self.is_old = not MAGIC.startswith(begin) and any(begin)
        if self.is_old and int.from_bytes(begin[:4], "little") > MAX_RECORD_BYTES:
            self._handle.close()
            raise WireError(f"{path}: its first bytes are damaged; {REMEDY}")
        if not self.is_old:
            self._base = len(MAGIC)

    def __enter__(self) -> "JournalFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.close()

    @property
    def size(self) -> int:
        """Current size of all records, in bytes."""
        if not self._is_packed:
            return max(0, os.fstat(self._handle.fileno()).st_size - self._base)
        with self.path.open("rb") as packed:
            packed.seek(-4, os.SEEK_END)  # gzip stores the uncompressed size there.
            return max(0, int.from_bytes(packed.read(4), "little") - self._base)

    def record_at(self, offset: int) -> JournalRecord | None:
        """Return the record at an offset; None at the end, or at the torn tail of a crash.

        Raises: WireError: the record is damaged, and complete records follow it.
        """
        size = self.size  # Records that a writer appends later are ignored.
        if offset >= size:
            return None
        record = self._old_record(offset, size) if self.is_old else self._record(offset, size)
        if record is not None:
            return record
        rest = self._read(offset, size - offset)
        for start in self._candidates(rest):
            find = _is_old_record_at if self.is_old else _is_record_at
            if start and find(rest, start):
                raise WireError(
                    f"{self.path} at offset {offset}: the record is damaged (its checksum does not"
                    f" match), but valid records follow from offset {offset + start} on; {REMEDY}"
                )
        return None

    def records(self, offset: int = 0) -> Iterator[tuple[int, JournalRecord]]:
        """Yield the complete records from an offset on, each with its offset. Raises: WireError."""
        while (record := self.record_at(offset)) is not None:
            yield offset, record
            offset = record.end

    def next_whole(self, offset: int) -> int | None:
        """Return the offset of the first complete record after a damaged one, None without one."""
        rest = self._read(offset, self.size - offset)
        find = _is_old_record_at if self.is_old else _is_record_at
        return next((offset + s for s in self._candidates(rest) if s and find(rest, s)), None)

    def message(self, record: JournalRecord, offset: int) -> Trajectory:
        """Return the message of a record. Raises: WireError: names file and offset."""
        try:
            if self.is_old:
                message = unpack_record(record.payload)
            else:
                message = decode(_frames(record.payload), oldest=OLDEST_RECORD)
        except WireError as error:
            raise WireError(f"{self.path} at offset {offset}: {error}") from error
        if not isinstance(message, Trajectory):
            name = type(message).__name__
            raise WireError(f"{self.path} at offset {offset}: {name} is not a Trajectory")
        return message

    def _record(self, offset: int, size: int) -> JournalRecord | None:
        """Return the record at an offset; None if it is incomplete or damaged."""
        head = self._read(offset, _HEAD_BYTES)
        num_bytes = _payload_bytes(head)
        end = offset + _HEAD_BYTES + num_bytes
        if not num_bytes or end > size:
            return None
        payload = self._read(offset + _HEAD_BYTES, num_bytes)
        is_whole = xxhash.xxh3_64_intdigest(payload) == _HEAD.unpack_from(head)[2]
        return JournalRecord(payload, end) if is_whole else None

    def _old_record(self, offset: int, size: int) -> JournalRecord | None:
        """Do as `_record`, in the format of earlier versions."""
        head = self._read(offset, _OLD_HEAD.size)
        if len(head) < _OLD_HEAD.size:
            return None
        num_bytes, check = _OLD_HEAD.unpack(head)
        end = offset + _OLD_HEAD.size + num_bytes
        if not 0 < num_bytes <= MAX_RECORD_BYTES or end > size:
            return None
        payload = self._read(offset + _OLD_HEAD.size, num_bytes)
        return JournalRecord(payload, end) if zlib.crc32(payload) == check else None

    def _candidates(self, content: bytes) -> Iterator[int]:
        """Yield the offsets in `content` at which a record may begin."""
        if self.is_old:
            yield from (found.start() - _OLD_HEAD.size for found in _OLD_PAYLOAD.finditer(content))
            return
        start = content.find(_MARK)
        while start >= 0:
            yield start
            start = content.find(_MARK, start + 1)

    def _read(self, offset: int, num: int) -> bytes:
        """Return bytes of the records, unpacked. Raises: WireError: the file is damaged."""
        try:
            self._handle.seek(self._base + offset)
            return self._handle.read(num)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise WireError(f"{self.path}: damaged ({error}); {REMEDY}") from error


def _payload_bytes(head: bytes) -> int:
    """Return the size of the payload that follows a head, 0 if the head is invalid."""
    if len(head) < _HEAD_BYTES or not head.startswith(_MARK):
        return 0
    (check,) = _CHECK.unpack_from(head, _HEAD.size)
    num_bytes = _HEAD.unpack_from(head)[1]
    is_head = zlib.crc32(head[: _HEAD.size]) == check and num_bytes <= MAX_RECORD_BYTES
    return num_bytes if is_head else 0


def _is_record_at(content: bytes, start: int) -> bool:
    """Return whether a complete record with a right checksum begins at `start`."""
    num_bytes = _payload_bytes(content[start : start + _HEAD_BYTES])
    begin = start + _HEAD_BYTES
    if not num_bytes or begin + num_bytes > len(content):
        return False
    digest = xxhash.xxh3_64_intdigest(memoryview(content)[begin : begin + num_bytes])
    return digest == _HEAD.unpack_from(content, start)[2]


def _is_old_record_at(content: bytes, start: int) -> bool:
    """Do as `_is_record_at`, in the format of earlier versions."""
    num_bytes, check = _OLD_HEAD.unpack_from(content, start) if start >= 0 else (0, 0)
    begin = start + _OLD_HEAD.size
    if not 0 < num_bytes <= len(content) - begin:
        return False
    return zlib.crc32(memoryview(content)[begin : begin + num_bytes]) == check


def _frames(payload: bytes) -> list[bytes]:
    """Return the frames of a payload."""
    (num,) = struct.unpack_from("<I", payload)
    sizes = struct.unpack_from(f"<{num}I", payload, 4)
    start = 4 + 4 * num
    frames = list[bytes]()
    for size in sizes:
        frames.append(payload[start : start + size])
        start += size
    return frames


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class JournalPosition:
    """Position of a record. Positions are ordered as the records were written."""

    file: int = 0  # Number of the file.
    offset: int = 0  # Number of bytes of earlier records in the file.

    def plain(self) -> dict[str, int]:
        """Return the fields for JSON, with the name that earlier versions of the product read."""
        return {"segment": self.file, "offset": self.offset}

    @classmethod
    def of_plain(cls, plain: Mapping[str, int]) -> "JournalPosition":
        """Return the position of `plain`. Raises: TypeError, KeyError: it is none."""
        file, offset = plain["segment"], plain["offset"]
        if not (isinstance(file, int) and isinstance(offset, int)):
            raise TypeError(f"{dict(plain)} is not a journal position")
        return cls(file=file, offset=offset)

    def mark(self) -> bytes:
        """Return the content of the file `synced` for this position."""
        content = _SYNCED.pack(self.file, self.offset)
        return content + zlib.crc32(content).to_bytes(4, "little")


JOURNAL_START = JournalPosition()


def journal_file_path(folder: Path, number: int) -> Path:
    """Return the path of an uncompressed file."""
    return folder / f"{number:06d}.log"


def journal_files(folder: Path) -> dict[int, Path]:
    """Return the paths of existing files, in order. Compressed ones end in `.log.gz`."""
    paths: dict[int, Path] = {}
    # A file that is being compressed has both names, and then only the second one.
    for pattern in ("[0-9]*.log", f"[0-9]*.log{PACKED_SUFFIX}"):
        for path in folder.glob(pattern):
            number = path.name.partition(".")[0]
            if number.isdigit():
                paths.setdefault(int(number), path)
    return dict(sorted(paths.items()))


def open_journal_file(folder: Path, number: int) -> JournalFile | None:
    """Open a file for reading, compressed or not; None if it does not exist."""
    plain = journal_file_path(folder, number)
    for path in (plain, plain.with_name(plain.name + PACKED_SUFFIX)):
        try:
            return JournalFile(path)
        except FileNotFoundError:
            continue
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise WireError(f"{path}: damaged ({error})") from error
    return None


class SyncedMark:
    """The synced end of a journal, in a file that survives the kill of a process.

    It is written in place after each sync, and is not synced itself. After a power cut it may be
    too low. Records before it were acknowledged, so damage there is never a torn tail.
    """

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / "synced", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def move(self, position: JournalPosition) -> None:
        """Write a new end."""
        os.pwrite(self._fd, position.mark(), 0)

    def close(self) -> None:
        os.close(self._fd)


def synced_end(folder: Path) -> JournalPosition:
    """Return a lower bound of a journal's synced end; its start if that is unknown."""
    try:
        content = (folder / "synced").read_bytes()
    except FileNotFoundError:
        return JOURNAL_START
    body = content[: _SYNCED.size]
    check = content[_SYNCED.size :]
    if len(check) != 4 or zlib.crc32(body).to_bytes(4, "little") != check:
        return JOURNAL_START
    number, offset = _SYNCED.unpack(body)
    return JournalPosition(file=number, offset=offset)


def read_around_damage(
    folder: Path, number: int, *, is_last: bool, offset: int = 0
) -> Iterator[Trajectory | str]:
    """Yield the trajectories of a file from an offset on, and an error text for each damage.

    Args:
        is_last: whether it is the last file, whose tail may be torn or incomplete.
    """
    synced = synced_end(folder)
    try:
        journal_file = open_journal_file(folder, number)
        if journal_file is None:
            return  # The file was pruned after it was listed.
        with journal_file:
            while True:
                try:
                    record = journal_file.record_at(offset)
                    if record is not None:
                        yield journal_file.message(record, offset)
                        offset = record.end
                        continue
                except WireError as error:
                    yield str(error)
                following = journal_file.next_whole(offset)
                if following is None:
                    break
                offset = following
            is_acknowledged = (number, offset) < (synced.file, synced.offset)
            if (offset < journal_file.size and not is_last) or (is_acknowledged and is_last):
                end = journal_file.size
                yield f"{journal_file.path}: no valid record from offset {offset} to {end}"
    except WireError as error:
        yield str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """Record of the pruned files of a journal."""

    before: int = 0  # Files with smaller numbers were removed.
    at: str = ""  # Local time of the last removal.
    num_bytes: int = 0  # Total size of all removed files.

    def text(self, folder: Path) -> str:
        return f"files 0 to {self.before - 1} of {folder} were pruned ({self.at})"


def load_pruned(folder: Path) -> Pruned:
    """Return the pruned files of a journal. Raises: ConfigError: pruned.json is damaged."""
    path = folder / PRUNED
    if not path.exists():
        return Pruned()
    kinds = {"before": int, "at": str, "num_bytes": int}
    first = next(iter(journal_files(folder)), 0)
    remedy = f'replace its content by {{"before": {first}, "at": "", "num_bytes": 0}}'
    return Pruned(**read_json(path, kinds, remedy=remedy))


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
