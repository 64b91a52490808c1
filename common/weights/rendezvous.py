"""The rendezvous of process groups: a small key-value store for their members only.

The store of torch accepts every connection. This store is a ROUTER like the others of the run and
accepts only connections with its key. Each member receives this key with its offer, together with
the secret name of its group. Requests without this name cannot access the group's keys.
`GroupStore` is the client: a `dist.Store` for torch's process groups.
"""
# torch's type stubs lack its stores:
# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false
# pyright: reportUntypedBaseClass=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import hashlib
import hmac
import os
import secrets
import socket
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
import zmq

from common.errors import ConfigError, WeightSyncError, WireError
from common.weights.messages import StoreAnswer, StoreOp, StoreRequest
from common.wire.addresses import bracketed, is_here, is_loopback
from common.wire.codec import decode, encode
from common.wire.messages import SCHEMA_VERSION, Rejected
from common.wire.security import RunKeys
from common.wire.sockets import Received, Router, connect_dealer
from common.wire.versions import accepted_version

PROOF_BYTES = 16
PROOF_TIMEOUT_S = 10.0  # Maximum duration of the mutual membership proof.
POLL_S = 0.5  # Maximum seconds of one poll. A request or `close` ends it at once.
MAX_WAIT_S = 5.0  # Maximum wait of one request.
MAX_GROUPS = 64  # Maximum number of groups; the oldest one is deleted with its keys.
MAX_GROUP_BYTES = 16 << 20  # Maximum size of all keys and values of one group.
WAIT_S = 1.0  # Maximum wait for a key in one request. Longer waits use several requests.
ANSWER_S = 5.0  # Further seconds after which a server that has not answered counts as failed.
ASK_POLL_S = 0.1  # Seconds between two checks whether the caller still needs the answer.


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Address and keys of a store."""

    host: str
    port: int
    public: str  # Public key of the server, Z85.
    secret: str = field(repr=False)  # Secret key with which a client authenticates itself, Z85.


@dataclass(slots=True)
class _Group:
    """The keys and values of one process group."""

    values: dict[str, bytes] = field(default_factory=dict[str, bytes])
    num_bytes: int = 0

    def put(self, key: str, value: bytes) -> bool:
        """Set a value; False if the group would exceed its maximum size."""
        grown = len(value) - len(self.values.get(key, b"")) + (key not in self.values) * len(key)
        if self.num_bytes + grown > MAX_GROUP_BYTES:
            return False
        self.num_bytes += grown
        self.values[key] = value
        return True

    def drop(self, key: str) -> None:
        """Delete a key, if it exists."""
        value = self.values.pop(key, None)
        if value is not None:
            self.num_bytes -= len(key) + len(value)


@dataclass(slots=True)
class _Waiting:
    """A request that waits for keys, and the time of its timeout."""

    received: Received
    until: float


class StoreServer(threading.Thread):
    """A thread that serves the groups opened by its owner.

    Consumes: requests of the groups' members.
    Waits for: requests. It keeps a WAIT request for up to `MAX_WAIT_S` until its keys exist.
    Unblocked by: `close`.

    Example: the owner calls `open_group` and offers the name to members A and B. A waits for a key
    of the group. B sets the key, and the server answers A. A former member has the key of the
    store but not the name of the new group. The server therefore refuses its requests.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        """Listen on `host`, or on all interfaces if `host` is not an address of this machine.

        Raises: WeightSyncError: the server cannot bind the address.
        """
        super().__init__(name="rendezvous", daemon=True)
        server = zmq.curve_keypair()
        client = zmq.curve_keypair()
        keys = RunKeys(
            server_public=server[0].decode(),
            server_secret=server[1].decode(),
            client_public=client[0].decode(),
            client_secret=client[1].decode(),
            hub_token="",
        )
        try:
            self._router = Router(keys, host=_bindable(host), port=port)
        except (ConfigError, OSError) as error:
            raise WeightSyncError(f"cannot open a rendezvous at {host}:{port}: {error}") from error
        self.place = StorePlace(host, self._router.port, keys.server_public, keys.client_secret)
        self.port = self._router.port
        self._groups: OrderedDict[str, _Group] = OrderedDict()
        self._lock = threading.Lock()  # Guards `_groups`.
        self._waiting: list[_Waiting] = []
        self._stop_requested = threading.Event()
        self.start()

    def open_group(self) -> str:
        """Return the secret name of a new group."""
        name = secrets.token_urlsafe(24)
        with self._lock:
            self._groups[name] = _Group()
            while len(self._groups) > MAX_GROUPS:
                self._groups.popitem(last=False)
        return name

    def close(self) -> None:
        """Stop the server. Requests that still wait receive an error."""
        self._stop_requested.set()
        self._router.wake()
        self.join(timeout=5.0)

    def num_refused(self) -> dict[str, int]:
        """Return the numbers of refused messages and connections, as `Router.num_refused` does."""
        return self._router.num_refused("rendezvous")

    def run(self) -> None:
        """Serve until closed."""
        while not self._stop_requested.is_set():
            due = min((waiting.until for waiting in self._waiting), default=float("inf"))
            rest_s = min(POLL_S, max(0.0, due - time.monotonic()))
            came = self._router.receive_all(timeout_s=rest_s)
            with self._lock:
                for received in came:
                    self._take(received)
                if came or self._waiting:
                    self._answer_waiting()
        for waiting in self._waiting:
            self._answer(waiting.received, error="the rendezvous is closing")
        self._router.close()

    def _take(self, received: Received) -> None:
        """Answer a request, or add it to the waiting ones."""
        request = received.message
        if not isinstance(request, StoreRequest):
            reason = f"{type(request).__name__} is not a request to the rendezvous"
            self._router.send(received.sender, Rejected(reason=reason))
            return
        group = self._groups.get(request.group)
        if group is None:
            self._answer(received, error="this group is not open")
            return
        match request.op:
            case StoreOp.WAIT:
                wait_s = min(request.wait_s, MAX_WAIT_S)
                self._waiting.append(_Waiting(received, time.monotonic() + wait_s))
            case StoreOp.SET:
                is_full = not all(group.put(key, request.value) for key in request.keys)
                self._answer(received, error="this group is full" * is_full)
            case StoreOp.ADD:
                try:
                    (key,) = request.keys
                    total = int(group.values.get(key, b"0")) + request.amount
                except ValueError:
                    self._answer(received, error="a sum needs one key, and a number as its value")
                    return
                is_full = not group.put(key, b"%d" % total)
                self._answer(received, values=[b"%d" % total], error="this group is full" * is_full)
            case StoreOp.DELETE:
                is_known = all(key in group.values for key in request.keys)
                for key in request.keys:
                    group.drop(key)
                self._answer(received, is_there=is_known)

    def _answer_waiting(self) -> None:
        """Answer waiting requests whose keys exist or whose wait has timed out."""
        now = time.monotonic()
        pending = self._waiting
        self._waiting = []
        for waiting in pending:
            request: StoreRequest = waiting.received.message
            group = self._groups.get(request.group)
            if group is None:
                self._answer(waiting.received, error="this group was closed")
            elif all(key in group.values for key in request.keys):
                self._answer(waiting.received, values=[group.values[key] for key in request.keys])
            elif now >= waiting.until:
                self._answer(waiting.received, is_there=False)
            else:
                self._waiting.append(waiting)

    def _answer(
        self,
        received: Received,
        *,
        values: list[bytes] | None = None,
        is_there: bool = True,
        error: str = "",
    ) -> None:
        """Send the answer to a request."""
        number = received.message.number
        answer = StoreAnswer(number=number, is_there=is_there, values=values or [], error=error)
        self._router.send(received.sender, answer)


def _bindable(host: str) -> str:
    """Return the address to bind. Raises: OSError: the host name cannot be resolved."""
    address = str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])
    if not is_here(host):  # No interface has this address: it is an external one of this machine.
        return "::" if ":" in address else "0.0.0.0"
    return address


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
            if not self._socket.poll(int(ASK_POLL_S * 1_000)):
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


def prove_members(group: Any, store: dist.Store, name: str, *, timeout: timedelta) -> None:
    """Exchange a proof of membership between each pair of ranks of a group of gloo.

    gloo accepts the first process that connects. NCCL needs no proof: its id, which members
    read from the store, is a shared secret.

    Args:
        group: the group of gloo, before its first transfer.
        store: the rendezvous, which only members can read.
        name: name of the group in the store.

    Raises: WeightSyncError: a process outside the group occupies a rank, or a rank is silent.
    """
    rank = group.rank()
    size = group.size()
    if rank == 0:
        store.set(name, secrets.token_hex(32))
    secret = store.get(name)
    proofs = [_proof(secret, rank, other) for other in range(size)]
    sent = torch.frombuffer(bytearray(b"".join(proofs)), dtype=torch.uint8)
    came = torch.zeros_like(sent)
    options = dist.AllToAllOptions()
    options.timeout = timeout
    try:
        group.alltoall_base(came, sent, [], [], options).wait(timeout)
    except RuntimeError as error:
        raise WeightSyncError(f"a rank has not proved its membership: {error}") from error
    for other, proof in enumerate(came.view(size, PROOF_BYTES)):
        if not hmac.compare_digest(bytes(proof.tolist()), _proof(secret, other, rank)):
            raise WeightSyncError(f"a process outside the group connected as rank {other}")


def _proof(secret: bytes, sender: int, receiver: int) -> bytes:
    """Return the membership proof of `sender` for `receiver`: a MAC with the group's secret."""
    return hmac.digest(secret, b"%d>%d" % (sender, receiver), hashlib.sha256)[:PROOF_BYTES]


def choose_interface(host: str) -> None:
    """Set the network interface of NCCL to the one with address `host`, unless the user set one.

    NCCL reads the setting once per process. A loopback address therefore leaves it unset.
    """
    if not is_loopback(host):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface_of(host)}")


def interface_of(host: str) -> str:
    """Return the name of this machine's network interface with the address, "lo" for loopback.

    Raises: WeightSyncError: no interface has this address.
    """
    address = str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return name
    raise WeightSyncError(f"{host}: no network interface of this machine has this address")
