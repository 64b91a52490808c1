"""Client of the rendezvous: a `dist.Store` for torch's process groups."""
# torch's type stubs lack its stores:
# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false
# pyright: reportUntypedBaseClass=false, reportUnknownVariableType=false

import threading
import time
from datetime import timedelta

import torch.distributed as dist
import zmq

from common.errors import WeightSyncError, WireError
from common.weights.messages import StoreAnswer, StoreOp, StoreRequest
from common.weights.rendezvous import StorePlace
from common.wire.addresses import bracketed
from common.wire.codec import decode, encode
from common.wire.messages import SCHEMA_VERSION
from common.wire.security import RunKeys
from common.wire.sockets import connect_dealer
from common.wire.versions import accepted_version

WAIT_S = 1.0  # Maximum wait for a key in one request. Longer waits use several requests.
ANSWER_S = 5.0  # Further seconds after which a server that has not answered counts as failed.
POLL_S = 0.1  # Seconds between two checks whether the caller still needs the answer.


class StoreConnection:
    """A connection to a rendezvous. Thread-safe: it sends one request at a time."""

    def __init__(self, place: StorePlace, *, answer_s: float = ANSWER_S) -> None:
        """Connect. A missing server is detected by the first request only."""
        keys = RunKeys(
            server_public=place.public,
            client_public=zmq.curve_public(place.secret.encode()).decode(),
            client_secret=place.secret,
            hub_token="",
        )
        self._place = place
        self._context = zmq.Context()
        address = f"tcp://{bracketed(place.host)}:{place.port}"
        self._timeout_s = WAIT_S + min(answer_s, ANSWER_S)
        self._socket = connect_dealer(
            self._context, keys, address=address, timeout_s=self._timeout_s
        )
        self._lock = threading.Lock()
        self._number = 0
        self._version = SCHEMA_VERSION  # Schema version that the server understands.
        self._is_closed = False
        self.is_left = threading.Event()  # Set to abort all waits on this connection.

    def ask(
        self,
        group: str,
        op: StoreOp,
        keys: list[str],
        *,
        value: bytes = b"",
        amount: int = 0,
        wait_s: float = 0.0,
    ) -> StoreAnswer:
        """Return the answer to a request.

        Raises: WeightSyncError: the server refused the request or did not answer.
        """
        with self._lock:
            if self._is_closed:
                raise WeightSyncError("this process left the rendezvous")
            self._number += 1
            request = StoreRequest(
                number=self._number,
                group=group,
                op=op,
                keys=keys,
                value=value,
                amount=amount,
                wait_s=wait_s,
            )
            try:
                answer = self._exchange(request)
            except (zmq.ZMQError, WireError) as error:
                place = f"{self._place.host}:{self._place.port}"
                raise WeightSyncError(f"no rendezvous store at {place}: {error}") from error
        if answer.error:
            raise WeightSyncError(f"the rendezvous refused a request: {answer.error}")
        return answer

    def _exchange(self, request: StoreRequest) -> StoreAnswer:
        """Return the answer to one request. Raises: WireError: none arrived in time."""
        self._socket.send_multipart(encode(request, self._version))
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline and not self.is_left.is_set():
            if not self._socket.poll(int(POLL_S * 1_000)):
                continue
            frames = self._socket.recv_multipart()
            message = decode(frames)
            version = accepted_version(message, frames, current=self._version)
            if version != self._version:
                self._version = version
                self._socket.send_multipart(encode(request, version))
                continue
            if not isinstance(message, StoreAnswer):
                raise WireError(f"unexpected answer: {message!r}"[:300])
            if message.number == self._number:  # Skips answers to cancelled requests.
                return message
        raise WireError("this process left it" if self.is_left.is_set() else "no answer in time")

    def close(self) -> None:
        """Close the connection after the current request."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._socket.close(linger=0)
                self._context.term()

    def __del__(self) -> None:
        self.close()


class GroupStore(dist.Store):
    """The keys of one group. The C++ code of torch calls these methods by their names."""

    def __init__(self, connection: StoreConnection, group: str, *, timeout_s: float) -> None:
        """Create a store with `timeout_s` as timeout of `get` and `wait`."""
        super().__init__()
        self.connection = connection
        self._group = group
        self._timeout_s = timeout_s
        self._is_left = threading.Event()

    def leave(self) -> None:
        """Make all waits fail at once. No thread may be in torch when a process ends."""
        self._is_left.set()
        self.connection.is_left.set()

    def clone(self) -> "GroupStore":
        """Return a second store with the same connection and group."""
        return GroupStore(self.connection, self._group, timeout_s=self._timeout_s)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value of at most 4 MiB."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        self.connection.ask(self._group, StoreOp.SET, [key], value=content)

    def get(self, key: str) -> bytes:
        """Wait for a key; return its value. Raises: WeightSyncError: the wait timed out."""
        return self._wait_for([key], self._timeout_s)[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until the keys exist. Raises: WeightSyncError: the wait timed out."""
        self._wait_for(list(keys), self._timeout_s if timeout is None else timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        """Return whether all the keys exist now."""
        return self.has(list(keys), within_s=0.0)

    def has(self, keys: list[str], *, within_s: float) -> bool:
        """Return whether all the keys exist within `within_s`, capped at `WAIT_S`."""
        wait_s = min(within_s, WAIT_S)
        return self.connection.ask(self._group, StoreOp.WAIT, keys, wait_s=wait_s).is_there

    def add(self, key: str, value: int) -> int:
        """Add to a counter; return its new value."""
        return int(self.connection.ask(self._group, StoreOp.ADD, [key], amount=value).values[0])

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        return self.delete([key])

    def delete(self, keys: list[str]) -> bool:
        """Delete keys; return whether all of them existed."""
        return self.connection.ask(self._group, StoreOp.DELETE, keys).is_there

    def _wait_for(self, keys: list[str], timeout_s: float) -> list[bytes]:
        """Return the values of keys once all exist. Raises: WeightSyncError."""
        deadline = time.monotonic() + timeout_s
        while not self._is_left.is_set():
            wait_s = min(WAIT_S, max(0.0, deadline - time.monotonic()))
            answer = self.connection.ask(self._group, StoreOp.WAIT, keys, wait_s=wait_s)
            if answer.is_there:
                return answer.values
            if time.monotonic() >= deadline:
                raise WeightSyncError(f"no process set {keys} in the rendezvous in {timeout_s:g} s")
        raise WeightSyncError("this process left the rendezvous")
