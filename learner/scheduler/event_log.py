"""The scheduler's memory on disk: a saved state, and every message since, to be handled again.

A message is logged after it was handled and before it is answered, so what was answered survives
a `kill -9` of the scheduler. A record is a head, a checksum of that, the sender's name and the
message's frames. Where the state has no checksum, both are of a version before: heads have none.
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
    "restore it from a backup; without it begin a run of another name from the newest checkpoint:"
    " model.path=RUN/checkpoints/step-..."
)
MAX_EVENTS = 40_000  # a restart handles them again, in two or three seconds
_HEAD = struct.Struct("<dIII")  # time, bytes of the sender's name, bytes of the record, CRC-32
_CHECK = struct.Struct("<I")  # CRC-32 of the head


class EventLog:
    """`scheduler.json` plus the log it names.

    Example: save(state) writes log 8 (empty), then a state that names log 8, then removes log 7.
    Killed at any point in between, the state that is there names a log that is there.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._state_path = root / "scheduler.json"
        self._number = 0
        self._is_old = False
        self._file: AppendFile | None = None
        self._pending: list[bytes] = []  # not handed to the operating system yet
        self._num_events = 0  # since the saved state
        self._long_at = MAX_EVENTS

    @property
    def is_long(self) -> bool:
        """Whether so much was logged that the state is to be saved, for a quick restart."""
        return self._num_events >= self._long_at

    @property
    def path(self) -> Path:
        """The log that is being written."""
        return self._path(self._number)

    def load(self) -> dict[str, Any] | None:
        """Return what `save` wrote last, None if nothing. Raises: ConfigError: it is damaged."""
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
        """Return what to raise over a state that cannot be restored."""
        return ConfigError(f"{self._state_path}: damaged ({error!r}); {REMEDY}")

    def events(self) -> Iterator[tuple[float, str, Any]]:
        """Yield (time, sender name, message) since the saved state; message None is a tick.

        A record cut off by a kill, or never written by a machine that lost its power, ends the log.

        Raises: ConfigError: a record is damaged; names file and offset.
        """
        path = self._path(self._number)
        try:
            content = path.read_bytes()
        except FileNotFoundError as error:
            raise ConfigError(f"{path}: missing, {self._state_path} names it; {REMEDY}") from error
        start = 0
        while start < len(content):
            found = _record_at(content, start, is_old=self._is_old)
            if found is None:
                if not self._is_old and not _is_torn(content, start):
                    raise ConfigError(
                        f"{path} at offset {start}: the record is damaged (its checksum does not"
                        f" match); {REMEDY}"
                    )
                logger.warning("log cut off path=%s offset_bytes=%d", path, start)
                return
            time_s, name, record, start = found
            yield time_s, name.decode(), unpack_record(record) if record else None

    def append(self, time_s: float, sender_name: str, frames: list[bytes]) -> None:
        """Log one handled message by its frames, or a tick ([]). `flush` makes it safe from a kill.

        It is as it came, so that what is handled again is what was handled.
        """
        record = pack_frames(frames) if frames else b""
        name = sender_name.encode()
        head = _HEAD.pack(time_s, len(name), len(record), zlib.crc32(name + record))
        self._pending.append(head + _CHECK.pack(zlib.crc32(head)) + name + record)
        self._num_events += 1

    def flush(self) -> None:
        """Hand what was appended to the operating system. Raises: OSError: and keeps it."""
        if self._file is not None and self._pending:
            self._file.append(self._pending)
            self._pending = []

    def save(self, state: dict[str, Any]) -> None:
        """Replace state and log; the state survives a power cut when this returns.

        Raises: OSError: state and log are as before, and may be gone on with.
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
            self._long_at = self._num_events + MAX_EVENTS  # not again at once
            raise
        if self._file is not None:
            self._file.close()
        self._path(self._number).unlink(missing_ok=True)
        self._number, self._file, self._pending = number, file, []
        self._num_events, self._long_at = 0, MAX_EVENTS

    def close(self) -> None:
        """Close the log; it stays on disk."""
        if self._file is not None:
            if_room(self.flush, self._file.path)  # what is kept was answered to nobody
            self._file.close()
            self._file = None

    def _path(self, number: int) -> Path:
        return self._root / f"scheduler.{number}.log"


def _checksum(text: str) -> int:
    return zlib.crc32(text.encode())


def _record_at(
    content: bytes, start: int, *, is_old: bool
) -> tuple[float, bytes, bytes, int] | None:
    """Return (time, sender's name, frames, where the next one begins); None: no whole record."""
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
    """Return whether what lies there was never written: cut short by a kill, or zeros."""
    body = start + _HEAD.size + _CHECK.size
    if body > len(content) or not any(content[start:]):
        return True
    head, (checksum,) = content[start : start + _HEAD.size], _CHECK.unpack_from(content, body - 4)
    _, num_name, num_record, _ = _HEAD.unpack(head)
    return checksum == zlib.crc32(head) and body + num_name + num_record > len(content)
