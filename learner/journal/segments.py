"""The segments of a journal on disk: list, read, compress and prune them."""

import gzip
import json
import os
import shutil
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from common.errors import WireError
from common.store.run_dir import read_json, sync_folder, write_atomically
from common.wire.messages import Trajectory
from learner.journal.records import PACKED_SUFFIX, Segment

_SYNCED = struct.Struct("<QQ")
_PRUNED = "pruned.json"
PACK_LEVEL = 1  # Level of zlib. Higher levels hardly reduce the size of token columns.
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class JournalPosition:
    """Position of a record. Positions are ordered as the records were written."""

    segment: int = 0
    offset: int = 0  # Number of bytes of earlier records in the segment.

    def mark(self) -> bytes:
        """Return the content of the file `synced` for this position."""
        content = _SYNCED.pack(self.segment, self.offset)
        return content + zlib.crc32(content).to_bytes(4, "little")


JOURNAL_START = JournalPosition()


def segment_path(folder: Path, segment: int) -> Path:
    """Return the path of an uncompressed segment."""
    return folder / f"{segment:06d}.log"


def list_segments(folder: Path) -> dict[int, Path]:
    """Return the paths of existing segments, in order. Compressed ones end in `.log.gz`."""
    found: dict[int, Path] = {}
    for path in sorted(folder.glob(f"[0-9]*.log{PACKED_SUFFIX}")) + sorted(
        folder.glob("[0-9]*.log")
    ):
        number = path.name.partition(".")[0]
        if number.isdigit():
            found[int(number)] = path
    return dict(sorted(found.items()))


def open_segment(folder: Path, segment: int) -> Segment | None:
    """Open a segment for reading, compressed or not; None if it does not exist."""
    plain = segment_path(folder, segment)
    for path in (plain, plain.with_name(plain.name + PACKED_SUFFIX)):
        try:
            return Segment(path)
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
    segment, offset = _SYNCED.unpack(body)
    return JournalPosition(segment=segment, offset=offset)


def read_around_damage(
    folder: Path, number: int, *, is_last: bool, offset: int = 0
) -> Iterator[Trajectory | str]:
    """Yield the trajectories of a segment from an offset on, and an error text for each damage.

    Args:
        is_last: whether it is the last segment, whose tail may be torn or incomplete.
    """
    synced = synced_end(folder)
    try:
        segment = open_segment(folder, number)
        if segment is None:
            return  # The segment was pruned after it was listed.
        with segment:
            while True:
                try:
                    record = segment.record_at(offset)
                    if record is not None:
                        yield segment.message(record, offset)
                        offset = record.end
                        continue
                except WireError as error:
                    yield str(error)
                following = segment.next_whole(offset)
                if following is None:
                    break
                offset = following
            is_acknowledged = (number, offset) < (synced.segment, synced.offset)
            if (offset < segment.size and not is_last) or (is_acknowledged and is_last):
                yield f"{segment.path}: no valid record from offset {offset} to {segment.size}"
    except WireError as error:
        yield str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """Record of the pruned segments of a journal."""

    before: int = 0  # Segments with smaller numbers were removed.
    at: str = ""  # Local time of the last removal.
    num_bytes: int = 0  # Total size of all removed segments.

    def text(self, folder: Path) -> str:
        return f"segments 0 to {self.before - 1} of {folder} were pruned ({self.at})"


def load_pruned(folder: Path) -> Pruned:
    """Return the pruned segments of a journal. Raises: ConfigError: pruned.json is damaged."""
    path = folder / _PRUNED
    if not path.exists():
        return Pruned()
    kinds = {"before": int, "at": str, "num_bytes": int}
    first = next(iter(list_segments(folder)), 0)
    remedy = f'replace its content by {{"before": {first}, "at": "", "num_bytes": 0}}'
    return Pruned(**read_json(path, kinds, remedy=remedy))


def prune(folder: Path, *, before: int, may_remove: Callable[[int, Path], bool]) -> Pruned:
    """Remove the oldest segments below `before`, up to the first for which `may_remove` is False.

    The removal is recorded first, so that no reader takes the rest for the whole journal.
    """
    pruned = load_pruned(folder)
    going = list[Path]()
    for number, path in list_segments(folder).items():
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


def pack(folder: Path, segment: int, *, check: Callable[[], object] = lambda: None) -> int:
    """Replace a finished segment by a compressed file; return the number of freed bytes.

    Readers find one of the two files at any time. The compressed file is read back and compared
    before the segment is removed.

    Args:
        check: called every megabyte; ends the compression by raising.

    Raises: OSError: the disk is full. WireError: the compressed file differs. After any error the
        segment is unchanged.
    """
    path = segment_path(folder, segment)
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
