"""The scheduler's persistent state: a snapshot, and a log of all messages since, for replay.

A message is logged after it was handled and before it is answered. So every answered message
survives a `kill -9` of the scheduler. A record is a head, the head's checksum, the sender's name
and the message's frames. If the snapshot has no checksum, an older version of the product wrote
snapshot and log; the heads of such a log have no checksum either.
"""

import json
import logging
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.store.disk import AppendFile, if_room
from common.store.run_dir import opened, read_json, write_atomically
from common.wire.codec import pack_frames, unpack_record

logger = logging.getLogger(__name__)

REMEDY = (
    "restore it from a backup, or start a run with another name from the newest checkpoint:"
    " model.path=RUN/checkpoints/step-..."
)
# Events in a log before a new snapshot; replay of so many takes two or three seconds.
MAX_EVENTS = 40_000
_HEAD = struct.Struct("<dIII")  # Time, bytes of the sender's name, bytes of the record, CRC-32.
_CHECK = struct.Struct("<I")  # CRC-32 of the head.


class EventLog:
    """The snapshot `scheduler.json` and the log file that it names.

    Example: save(state) writes log 8 (empty), then a snapshot that names log 8, then removes log 7.
    After a kill at any point in between, the snapshot on disk names a log that exists.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._state_path = root / "scheduler.json"
        self._number = 0
        self._is_old = False
        self._file: AppendFile | None = None
        self._pending: list[bytes] = []  # Records not written to the file yet.
        self._num_events = 0  # Events since the last snapshot.
        self._long_at = MAX_EVENTS

    @property
    def is_long(self) -> bool:
        """True if a new snapshot is due because replay of the log would take too long."""
        return self._num_events >= self._long_at

    @property
    def path(self) -> Path:
        """Path of the current log file."""
        return self._path(self._number)

    def load(self) -> dict[str, Any] | None:
        """Return the last saved state, None if there is none.

        Raises: ConfigError: the state is damaged.
        """
        if not self._state_path.exists():
            return None
        saved = read_json(self._state_path, {"log": int, "state": dict}, remedy=REMEDY)
        self._number, state, checksum = saved["log"], saved["state"], saved.get("checksum")
        self._is_old = checksum is None
        is_known = saved.keys() <= {"log", "state", "checksum"}
        if not is_known or (not self._is_old and checksum != _checksum(json.dumps(state))):
            raise self.damaged(ValueError("its checksum does not match"))
        return state

    def damaged(self, error: Exception) -> ConfigError:
        """Return the error to raise for a state that cannot be restored."""
        return ConfigError(f"{self._state_path}: damaged ({error!r}); {REMEDY}")

    def events(self) -> Iterator[tuple[float, str, Any]]:
        """Yield (time, sender name, message) since the snapshot; message None is a tick.

        A record that a kill cut off, or that a power failure left unwritten, ends the log.

        Raises: ConfigError: a record is damaged; names file and offset.
        """
        path = self._path(self._number)
        try:
            content = path.read_bytes()
        except FileNotFoundError as error:
            raise ConfigError(
                f"{path}: missing, but {self._state_path} needs it; {REMEDY}"
            ) from error
        start = 0
        while start < len(content):
            event = _record_at(content, start, is_old=self._is_old)
            if event is None:
                if not self._is_old and not _is_torn(content, start):
                    raise ConfigError(
                        f"{path} at offset {start}: the record is damaged (its checksum does not"
                        f" match); {REMEDY}"
                    )
                logger.warning(
                    "ignored an incomplete record at the end of path=%s offset_bytes=%d",
                    path,
                    start,
                )
                return
            time_s, name, record, start = event
            yield time_s, name.decode(), unpack_record(record) if record else None

    def append(self, time_s: float, sender_name: str, frames: list[bytes]) -> None:
        """Buffer a record of one handled message (its frames) or of a tick ([]).

        `flush` writes the record to the file, where it survives a kill. The frames are stored as
        received, so that a replay handles the same bytes.
        """
        record = pack_frames(frames) if frames else b""
        name = sender_name.encode()
        head = _HEAD.pack(time_s, len(name), len(record), zlib.crc32(name + record))
        self._pending.append(head + _CHECK.pack(zlib.crc32(head)) + name + record)
        self._num_events += 1

    def flush(self) -> None:
        """Write the buffered records to the file. Raises: OSError: the records stay buffered."""
        if self._file is not None and self._pending:
            self._file.append(self._pending)
            self._pending = []

    def save(self, state: dict[str, Any]) -> None:
        """Replace snapshot and log; the snapshot survives a power failure when this returns.

        Raises: OSError: the previous snapshot and log are unchanged and remain in use.
        """
        number = self._number + 1
        file = opened(lambda: AppendFile(self._path(number)))
        try:
            file.truncate(0)
            plain = json.dumps(state)
            text = f'{{"log": {number}, "checksum": {_checksum(plain)}, "state": {plain}}}'
            write_atomically(self._state_path, text, is_durable=True)
        except OSError:
            file.close()
            file.path.unlink()
            self._long_at = self._num_events + MAX_EVENTS  # The next attempt is delayed.
            raise
        if self._file is not None:
            self._file.close()
        self._path(self._number).unlink(missing_ok=True)
        self._number = number
        self._file = file
        self._pending = []
        self._num_events = 0
        self._long_at = MAX_EVENTS

    def close(self) -> None:
        """Close the log file; it stays on disk."""
        if self._file is not None:
            # Records that do not fit on the disk belong to messages that were never answered.
            if_room(self.flush, self._file.path)
            self._file.close()
            self._file = None

    def _path(self, number: int) -> Path:
        return self._root / f"scheduler.{number}.log"


def _checksum(text: str) -> int:
    return zlib.crc32(text.encode())


def _record_at(
    content: bytes, start: int, *, is_old: bool
) -> tuple[float, bytes, bytes, int] | None:
    """Return (time, sender's name, frames, offset of the next record); None: no whole record."""
    body = start + _HEAD.size + (0 if is_old else _CHECK.size)
    if body > len(content):
        return None
    head = content[start : start + _HEAD.size]
    if not is_old and _CHECK.unpack_from(content, start + _HEAD.size)[0] != zlib.crc32(head):
        return None
    time_s, num_name, num_record, checksum = _HEAD.unpack(head)
    end = body + num_name + num_record
    if end > len(content) or zlib.crc32(content[body:end]) != checksum:
        return None
    return time_s, content[body : body + num_name], content[body + num_name : end], end


def _is_torn(content: bytes, start: int) -> bool:
    """Return whether the record was never fully written: it is cut short, or all zeros."""
    body = start + _HEAD.size + _CHECK.size
    if body > len(content) or not any(content[start:]):
        return True
    head, (checksum,) = content[start : start + _HEAD.size], _CHECK.unpack_from(content, body - 4)
    _, num_name, num_record, _ = _HEAD.unpack(head)
    return checksum == zlib.crc32(head) and body + num_name + num_record > len(content)
