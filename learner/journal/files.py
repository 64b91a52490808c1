"""Binary format of the journal's files: records with checksums over content and length.

A file begins with MAGIC. A record is a head of 20 bytes, then its payload:
    head     mark, u32 payload size, u64 XXH3 of the payload, u32 CRC-32 of these sixteen bytes
    payload  u32 number of frames, u32 size of each frame, then the frames of a message
All numbers are little endian. Files of earlier product versions stay readable. They have no
MAGIC, and each of their records is u32 length, u32 CRC-32 of the payload, payload.
"""

import gzip
import json
import os
import re
import shutil
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, NamedTuple, cast

import xxhash

from common.errors import WireError
from common.store.run_dir import read_json, sync_folder, write_atomically
from common.wire.codec import decode, unpack_record
from common.wire.messages import Trajectory
from common.wire.versions import OLDEST_RECORD

MAGIC = b"LSJ\xf5\x02\0\0\0"  # As the length of an old record it would exceed the limit.
MAX_RECORD_BYTES = 1024 * 1024 * 1024
PACKED_SUFFIX = ".gz"  # Suffix of a compressed file.
_MARK = b"\xfaREC"
_HEAD = struct.Struct("<4sIQ")
_CHECK = struct.Struct("<I")
_HEAD_BYTES = _HEAD.size + _CHECK.size
_OLD_HEAD = struct.Struct("<II")
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


_SYNCED = struct.Struct("<QQ")
_PRUNED = "pruned.json"
PACK_LEVEL = 1  # Level of zlib. Higher levels hardly reduce the size of token columns.
_CHUNK_BYTES = 1 << 20


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
    for path in sorted(folder.glob(f"[0-9]*.log{PACKED_SUFFIX}")) + sorted(
        folder.glob("[0-9]*.log")
    ):
        number = path.name.partition(".")[0]
        if number.isdigit():
            paths[int(number)] = path
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
    path = folder / _PRUNED
    if not path.exists():
        return Pruned()
    kinds = {"before": int, "at": str, "num_bytes": int}
    first = next(iter(journal_files(folder)), 0)
    remedy = f'replace its content by {{"before": {first}, "at": "", "num_bytes": 0}}'
    return Pruned(**read_json(path, kinds, remedy=remedy))


def prune(folder: Path, *, before: int, may_remove: Callable[[int, Path], bool]) -> Pruned:
    """Remove the oldest files below `before`, up to the first for which `may_remove` is False.

    The removal is recorded first, so that no reader takes the rest for the whole journal.
    """
    pruned = load_pruned(folder)
    going = list[Path]()
    for number, path in journal_files(folder).items():
        if number >= before or not may_remove(number, path):
            break
        going.append(path)
        pruned = Pruned(
            before=number + 1,
            at=time.strftime("%Y-%m-%d %H:%M:%S"),
            num_bytes=pruned.num_bytes + path.stat().st_size,
        )
    if going:
        write_atomically(folder / _PRUNED, json.dumps(asdict(pruned)) + "\n", is_durable=True)
        for path in going:
            path.unlink(missing_ok=True)
    return pruned


def pack(folder: Path, number: int, *, check: Callable[[], object] = lambda: None) -> int:
    """Replace a finished file by a compressed file; return the number of freed bytes.

    Readers find one of the two files at any time. The compressed file is read back and compared
    before the file is removed.

    Args:
        check: called every megabyte; ends the compression by raising.

    Raises: OSError: the disk is full. WireError: the compressed file differs. After any error the
        file is unchanged.
    """
    path = journal_file_path(folder, number)
    packed = path.with_name(path.name + PACKED_SUFFIX)
    partial = packed.with_name(f".{packed.name}.partial")
    try:
        with path.open("rb") as plain, partial.open("wb") as raw:
            with gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=PACK_LEVEL, mtime=0) as out:
                crc = _copy(plain.read, out.write, check)
            raw.flush()
            os.fsync(raw.fileno())
        with gzip.open(partial, "rb") as back:
            if _copy(back.read, lambda _: None, check) != crc:
                raise WireError(f"{partial}: its content differs from the written content")
        shutil.copystat(path, partial)  # Keeps the age, on which pruning depends.
        partial.replace(packed)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(folder)
    freed = path.stat().st_size - packed.stat().st_size
    path.unlink()
    return freed


def _copy(
    read: Callable[[int], bytes], write: Callable[[bytes], object], check: Callable[[], object]
) -> int:
    """Copy bytes in chunks; return their checksum. `check` may end the copy by an exception."""
    crc = 0
    while chunk := read(_CHUNK_BYTES):
        check()
        write(chunk)
        crc = zlib.crc32(chunk, crc)
    return crc
