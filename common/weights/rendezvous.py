"""The rendezvous of process groups: a small key-value store for their members only.

The store of torch accepts every connection. This store is a ROUTER like the others of the run and
accepts only connections with its key. Each member receives this key with its offer, together with
the secret name of its group. Requests without this name cannot access the group's keys.
"""

import secrets
import socket
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field

import zmq

from common.errors import ConfigError, WeightSyncError
from common.weights.messages import StoreAnswer, StoreOp, StoreRequest
from common.wire.addresses import is_here
from common.wire.messages import Rejected
from common.wire.security import RunKeys
from common.wire.sockets import Received, Router

POLL_S = 0.5  # Maximum seconds of one poll. A request or `close` ends it at once.
MAX_WAIT_S = 5.0  # Maximum wait of one request.
MAX_GROUPS = 64  # Maximum number of groups; the oldest one is deleted with its keys.
MAX_GROUP_BYTES = 16 << 20  # Maximum size of all keys and values of one group.


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
            due = min((each.until for each in self._waiting), default=float("inf"))
            rest_s = min(POLL_S, max(0.0, due - time.monotonic()))
            came = self._router.receive_all(timeout_s=rest_s)
            with self._lock:
                for received in came:
                    self._take(received)
                if came or self._waiting:
                    self._answer_waiting()
        for each in self._waiting:
            self._answer(each.received, error="the rendezvous is closing")
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
                total = int(group.values.get(request.keys[0], b"0")) + request.amount
                group.put(request.keys[0], b"%d" % total)
                self._answer(received, values=[b"%d" % total])
            case StoreOp.DELETE:
                is_known = all(key in group.values for key in request.keys)
                for key in request.keys:
                    group.drop(key)
                self._answer(received, is_there=is_known)

    def _answer_waiting(self) -> None:
        """Answer waiting requests whose keys exist or whose wait has timed out."""
        now = time.monotonic()
        waiting = self._waiting
        self._waiting = []
        for each in waiting:
            request: StoreRequest = each.received.message
            group = self._groups.get(request.group)
            if group is None:
                self._answer(each.received, error="this group was closed")
            elif all(key in group.values for key in request.keys):
                self._answer(each.received, values=[group.values[key] for key in request.keys])
            elif now >= each.until:
                self._answer(each.received, is_there=False)
            else:
                self._waiting.append(each)

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
