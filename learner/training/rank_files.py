"""Client of rank 0's file service, for the ranks of other nodes."""

import threading
import time
from dataclasses import dataclass
from pathlib import Path

import zmq

from common.errors import LongstrideError, WireError
from common.join.files import SUFFIXES
from common.text import is_path_inside
from common.wire.codec import decode, encode
from common.wire.rank_messages import FileOp, RankFile, RankFileAnswer
from common.wire.security import RunKeys
from common.wire.sockets import connect_dealer

ANSWER_S = 60.0  # Timeout of an answer. The disk of rank 0's node may be busy.
LOOK_S = 0.25
PART_BYTES = 4_000_000
MARKER = "COMPLETE"  # A small file of a checkpoint without a suffix.
MAX_SMALL_BYTES = 256 << 20  # Largest file that a node copies; weights are read by parts.


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlace:
    """The address of a file service, and the keys of its client."""

    address: str  # tcp://
    keys: RunKeys
    mirrored: dict[str, str]  # Folder of this node -> folder on rank 0's node.


class RankFiles:
    """Reads and writes files of rank 0's node. Thread-safe: it sends one request at a time."""

    def __init__(self, place: FilePlace, *, answer_s: float = ANSWER_S) -> None:
        """Connect. The first request detects a missing service."""
        self._address = place.address
        self._answer_s = answer_s
        self._context = zmq.Context()
        self._socket = connect_dealer(self._context, place.keys, address=place.address)
        self._lock = threading.Lock()
        self._number = 0

    def names(self, folder: str) -> list[str]:
        """Return the relative paths of the files below a folder."""
        return self._ask(FileOp.LIST, folder).names

    def read(self, path: str, offset: int, num_bytes: int) -> bytes:
        """Return the bytes at `offset`, at most `PART_BYTES`; fewer at the end of the file."""
        return self._ask(FileOp.READ, path, offset_bytes=offset, num_bytes=num_bytes).content

    def write(self, path: str, offset: int, content: bytes) -> None:
        """Write bytes at `offset`; offset 0 begins a new file."""
        self._ask(FileOp.WRITE, path, offset_bytes=offset, content=content)

    def mirror(self, remote: str, folder: Path) -> None:
        """Copy the small files below a remote folder, which holds a model or a checkpoint."""
        for name in self.names(remote):
            if not name.endswith(SUFFIXES) and Path(name).name != MARKER:
                continue
            if not is_path_inside(name):
                raise LongstrideError(f"{remote}: {name!r} is not a path in this folder")
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as out:
                while part := self.read(f"{remote}/{name}", out.tell(), PART_BYTES):
                    out.write(part)
                    if out.tell() > MAX_SMALL_BYTES:
                        raise LongstrideError(
                            f"{remote}/{name}: larger than the {MAX_SMALL_BYTES} bytes of a file"
                            " that a node of the learner may copy"
                        )

    def _ask(
        self,
        op: FileOp,
        path: str,
        *,
        offset_bytes: int = 0,
        num_bytes: int = 0,
        content: bytes = b"",
    ) -> RankFileAnswer:
        """Return the answer. Raises: LongstrideError: no answer in time, or an error there."""
        with self._lock:
            self._number += 1
            request = RankFile(
                number=self._number,
                op=op,
                path=path,
                offset_bytes=offset_bytes,
                num_bytes=num_bytes,
                content=content,
            )
            try:
                answer = self._exchange(request)
            except (zmq.ZMQError, WireError) as error:
                raise LongstrideError(
                    f"{path}: rank 0's node at {self._address} does not answer: {error}"
                ) from error
        if answer.error:
            raise LongstrideError(f"{path} on rank 0's node: {answer.error}")
        return answer

    def _exchange(self, request: RankFile) -> RankFileAnswer:
        """Return the answer to one request. Raises: WireError: none in time, or another message."""
        self._socket.send_multipart(encode(request))
        deadline = time.monotonic() + self._answer_s
        while time.monotonic() < deadline:
            if not self._socket.poll(int(LOOK_S * 1_000)):
                continue
            message = decode(self._socket.recv_multipart())
            if not isinstance(message, RankFileAnswer):
                raise WireError(f"unexpected answer: {message!r}"[:300])
            if message.number == request.number:
                return message
        raise WireError(f"no answer within {self._answer_s:g} s")

    def close(self) -> None:
        """Close the connection."""
        self._socket.close(linger=0)
        self._context.term()
