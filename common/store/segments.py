"""The segments of a journal on disk: which there are, what was acknowledged, pack, prune."""

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
from common.store.records import PACKED_SUFFIX, Segment
from common.store.run_dir import read_json, sync_folder, write_atomically
from common.wire.messages import Trajectory

_SYNCED = struct.Struct("<QQ")
_PRUNED = "pruned.json"
PACK_LEVEL = 1  # of zlib: columns of tokens gain little by more
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class JournalPosition:
    """Where a record begins. Positions are ordered as the records were written."""

    segment: int = 0
    offset: int = 0  # bytes of records before it in the segment


JOURNAL_START = JournalPosition()


def segment_path(folder: Path, segment: int) -> Path:
    """Return where a segment lies until it is packed."""
    return folder / f"{segment:06d}.log"


def list_segments(folder: Path) -> dict[int, Path]:
    """Return the segments that are there, in order; packed ones end in `.log.gz`."""
    found: dict[int, Path] = {}
    for path in sorted(folder.glob(f"[0-9]*.log{PACKED_SUFFIX}")) + sorted(
        folder.glob("[0-9]*.log")
    ):
        number = path.name.partition(".")[0]
        if number.isdigit():
            found[int(number)] = path
    return dict(sorted(found.items()))


def open_segment(folder: Path, segment: int) -> Segment | None:
    """Open a segment for reading, packed or not; None if it is not there."""
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
    """How far a journal is known to be on disk, in a file that a kill leaves as it was.

    It is written after each sync, in place, and not synced itself: after a power cut it may be
    behind. What lies before it was acknowledged, so it is never taken for a torn tail.
    """

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / "synced", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def move(self, position: JournalPosition) -> None:
        """Note a new end."""
        content = _SYNCED.pack(position.segment, position.offset)
        os.pwrite(self._fd, content + zlib.crc32(content).to_bytes(4, "little"), 0)

    def close(self) -> None:
        os.close(self._fd)


def synced_end(folder: Path) -> JournalPosition:
    """Return how far a journal was synced at least; its start if that is not known."""
    try:
        content = (folder / "synced").read_bytes()
    except FileNotFoundError:
        return JOURNAL_START
    body, check = content[: _SYNCED.size], content[_SYNCED.size :]
    if len(check) != 4 or zlib.crc32(body).to_bytes(4, "little") != check:
        return JOURNAL_START
    segment, offset = _SYNCED.unpack(body)
    return JournalPosition(segment=segment, offset=offset)


def read_around_damage(
    folder: Path, number: int, *, is_last: bool, offset: int = 0
) -> Iterator[Trajectory | str]:
    """Yield what a segment holds from an offset on, and in words what of it is damaged.

    Args:
        is_last: of the journal: its tail may be torn, or in the middle of being written.
    """
    synced = synced_end(folder)
    try:
        segment = open_segment(folder, number)
        if segment is None:
            return  # pruned meanwhile
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
                yield f"{segment.path} from offset {offset} on: nothing whole, up to {segment.size}"
    except WireError as error:
        yield str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What was removed of a journal."""

    before: int = 0  # segments with smaller numbers are gone
    at: str = ""  # when last
    num_bytes: int = 0  # of all that was removed

    def text(self, folder: Path) -> str:
        return f"segments 0 to {self.before - 1} of {folder} were pruned ({self.at})"


def load_pruned(folder: Path) -> Pruned:
    """Return what was removed of a journal. Raises: ConfigError: the note of it is damaged."""
    path = folder / _PRUNED
    if not path.exists():
        return Pruned()
    kinds = {"before": int, "at": str, "num_bytes": int}
    first = next(iter(list_segments(folder)), 0)
    remedy = f'write {{"before": {first}, "at": "", "num_bytes": 0}} to it'
    return Pruned(**read_json(path, kinds, remedy=remedy))


def prune(folder: Path, *, before: int, may_go: Callable[[int, Path], bool]) -> Pruned:
    """Remove the oldest segments below `before`, up to the first that may not go.

    What is removed is noted first, so that no reader takes the rest for the whole.
    """
    pruned, going = load_pruned(folder), list[Path]()
    for number, path in list_segments(folder).items():
        if number >= before or not may_go(number, path):
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
    """Compress a finished segment in place of itself; return the bytes that this freed.

    Readers see either. What was written is read back before the segment itself goes.

    Args:
        check: called every megabyte; ends it by raising, and leaves the segment as it was.

    Raises: OSError: no room; WireError: what was written reads otherwise. The segment is as before.
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
                raise WireError(f"{partial}: reads otherwise than it was written")
        shutil.copystat(path, partial)  # its age counts
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
    crc = 0
    while chunk := read(_CHUNK_BYTES):
        check()
        write(chunk)
        crc = zlib.crc32(chunk, crc)
    return crc
