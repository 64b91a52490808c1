"""The scheduler's memory on disk: a saved state, and every message since, to be handled again.

A message is logged after it was handled and before it is answered, so what was answered survives
a `kill -9` of the scheduler.
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
_HEAD = struct.Struct("<dIII")  # time, bytes of the sender's name, bytes of the record, CRC-32


class EventLog:
    """`scheduler.json` plus the log it names.

    Example: save(state) writes log 8 (empty), then a state that names log 8, then removes log 7.
    Killed at any point in between, the state that is there names a log that is there.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._state_path = root / "scheduler.json"
        self._number = 0
        self._file: AppendFile | None = None
        self._pending: list[bytes] = []  # not handed to the operating system yet

    @property
    def path(self) -> Path:
        """The log that is being written."""
        return self._path(self._number)

    def load(self) -> dict[str, Any] | None:
        """Return what `save` wrote last, None if nothing. Raises: ConfigError: it is damaged."""
        if not self._state_path.exists():
            return None
        saved = read_json(self._state_path, {"log": int, "state": dict}, remedy=REMEDY)
        self._number = saved["log"]
        return saved["state"]

    def damaged(self, error: Exception) -> ConfigError:
        """Return what to raise over a state that cannot be restored."""
        return ConfigError(f"{self._state_path}: damaged ({error!r}); {REMEDY}")

    def events(self) -> Iterator[tuple[float, str, Any]]:
        """Yield (time, sender name, message) since the saved state; message None is a tick.

        A record cut off by a kill ends the log.
        """
        path = self._path(self._number)
        content = path.read_bytes() if path.exists() else b""
        start = 0
        while start + _HEAD.size <= len(content):
            time_s, num_name, num_record, checksum = _HEAD.unpack_from(content, start)
            start += _HEAD.size
            body = content[start : start + num_name + num_record]
            if len(body) < num_name + num_record or zlib.crc32(body) != checksum:
                logger.warning("log cut off path=%s offset_bytes=%d", path, start)
                return
            start += len(body)
            record = body[num_name:]
            yield time_s, body[:num_name].decode(), unpack_record(record) if record else None

    def append(self, time_s: float, sender_name: str, frames: list[bytes]) -> None:
        """Log one handled message by its frames, or a tick ([]). `flush` makes it safe from a kill.

        It is as it came, so that what is handled again is what was handled.
        """
        record = pack_frames(frames) if frames else b""
        name = sender_name.encode()
        head = _HEAD.pack(time_s, len(name), len(record), zlib.crc32(name + record))
        self._pending.append(head + name + record)

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
            text = json.dumps({"log": number, "state": state})
            write_atomically(self._state_path, text, is_durable=True)
        except OSError:
            file.close()
            file.path.unlink()
            raise
        if self._file is not None:
            self._file.close()
        self._path(self._number).unlink(missing_ok=True)
        self._number, self._file, self._pending = number, file, []

    def close(self) -> None:
        """Close the log; it stays on disk."""
        if self._file is not None:
            if_room(self.flush, self._file.path)  # what is kept was answered to nobody
            self._file.close()
            self._file = None

    def _path(self, number: int) -> Path:
        return self._root / f"scheduler.{number}.log"
