"""Well-behaved peers during an attack, which measure the time of each answer."""

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq

from common.errors import LongstrideError
from common.host.loopback import loopback
from common.http.blocking import own_connection
from common.weights.messages import WeightsJoin, WeightsLeave, WeightsOffer
from common.wire.addresses import SAME_MACHINE, host_of, with_host
from common.wire.codec import decode, encode
from common.wire.messages import (
    Ack,
    Directory,
    Heartbeat,
    Hello,
    Lease,
    LeaseGrant,
    LeaseRequest,
    Progress,
    Rejected,
    Trajectory,
    Welcome,
)
from common.wire.security import RunKeys
from common.wire.sockets import connect_dealer
from tools.simulator.workload import synthetic_trajectory

NAME = "honest"
PAUSE_S = 0.05  # Time between an answer and the next request.
ANSWER_S = 60.0
MAX_LEASES = 16  # Number of unplayed leases at which requests stop.
NUM_TOKENS = 40
NUM_PROMPT = 20


class Honest(threading.Thread):
    """Sends requests to one listener repeatedly.

    Consumes: its answers.
    Waits for: an answer, `ANSWER_S` at most.
    Unblocked by: the answer; `stop` waits for it. An error ends the thread and is stored.
    """

    def __init__(self, name: str, ask: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._ask = ask
        self._ends = threading.Event()
        self.waits_s: list[float] = []
        # Monotonic time of the unanswered request; None: no request is active.
        self._asked_s: float | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        """Send requests until stopped."""
        try:
            while not self._ends.wait(PAUSE_S):
                self._asked_s = began_s = time.monotonic()
                self._ask()
                self._asked_s = None
                self.waits_s.append(time.monotonic() - began_s)
        except Exception as error:  # noqa: BLE001 - The main thread reports the error.
            self.error = error

    @property
    def pending_s(self) -> list[float]:
        """The seconds since the unanswered request, if there is one."""
        asked_s = self._asked_s
        return [] if asked_s is None else [time.monotonic() - asked_s]

    def stop(self) -> None:
        """Stop the thread."""
        self._ends.set()
        self.join(2 * ANSWER_S)


class RouterClient:
    """A connection to a ROUTER socket."""

    def __init__(self, context: Any, keys: RunKeys, address: str) -> None:
        self._socket = connect_dealer(context, keys, address=address, timeout_s=ANSWER_S)

    def send(self, message: Any) -> None:
        """Send without waiting for an answer."""
        self._socket.send_multipart(encode(message))

    def ask(self, message: Any, *wanted: type) -> Any:
        """Return the next answer of a wanted type. Raises: LongstrideError: refused, or none."""
        self.send(message)
        while True:
            try:
                answer = decode(self._socket.recv_multipart())
            except zmq.Again as error:
                raise LongstrideError(f"no answer within {ANSWER_S:g}s") from error
            if isinstance(answer, Rejected):
                raise LongstrideError(f"an honest peer is refused: {answer.reason}")
            if isinstance(answer, wanted):
                return answer


class Actor:
    """An actor with a simulated engine: leases, heartbeats, trajectories, offers of weights.

    Each method is for a separate thread.
    """

    def __init__(self, keys: RunKeys, scheduler: str) -> None:
        """Connect to a scheduler and send a hello."""
        self._context = zmq.Context()
        self._keys = keys
        self.addresses = {"scheduler": scheduler}  # Addresses by listener.
        self._lines = {"scheduler": RouterClient(self._context, keys, scheduler)}
        hello = Hello(role="actor", name=NAME, incarnation="life-0", version=0)
        self._lines["scheduler"].ask(hello, Welcome)
        self._leases: queue.Queue[Lease] = queue.Queue()
        self._last: Trajectory | None = None
        self._num_lives = 0

    def finds_learner(self) -> bool:
        """Request the learner's address; once there is one, connect to it and return True."""
        beat = Heartbeat(role="actor", name=NAME, version=0, running=[], directory=0)
        directory = self._lines["scheduler"].ask(beat, Directory)
        if directory.learner:
            for name, at in (("trajectories", directory.learner), ("weights", directory.weights)):
                here = with_host(at, loopback()) if host_of(at) == SAME_MACHINE else at
                self.addresses[name] = here
                self._lines[name] = RouterClient(self._context, self._keys, here)
        return bool(directory.learner)

    def ask_scheduler(self) -> None:
        """Request leases if there is room, and send a heartbeat."""
        if self._leases.qsize() < MAX_LEASES:
            ask = LeaseRequest(actor=NAME, num_free_slots=4, version=0)
            grant = self._lines["scheduler"].ask(ask, LeaseGrant)
            for lease in grant.leases:
                self._leases.put(lease)
        running = [lease.episode_id for lease in list(self._leases.queue)]
        beat = Heartbeat(role="actor", name=NAME, version=0, running=running, num_slots=4)
        self._lines["scheduler"].ask(beat, Progress)

    def ask_intake(self) -> None:
        """Deliver an episode; without a lease repeat the last one."""
        with contextlib.suppress(queue.Empty):
            self._last = played(self._leases.get_nowait())
        if self._last is not None:
            ack = self._lines["trajectories"].ask(self._last, Ack)
            if not ack.is_accepted:
                raise LongstrideError(f"an honest episode is refused: {ack.reason}")

    def ask_weights(self) -> None:
        """Join, receive an offer of the weights, and leave."""
        self._num_lives += 1
        line = self._lines["weights"]
        life = f"life-{self._num_lives}"
        join = WeightsJoin(actor=NAME, incarnation=life, devices=[""], version=-1)
        line.ask(join, WeightsOffer)
        line.send(WeightsLeave(actor=NAME, incarnation=life))

    def close(self) -> None:
        """Close all connections."""
        self._context.destroy(linger=0)


def played(lease: Lease) -> Trajectory:
    """Return an episode of one turn; every second member of a group succeeds."""
    mask = np.arange(NUM_TOKENS) >= NUM_PROMPT
    return synthetic_trajectory(
        np.arange(NUM_TOKENS),
        mask,
        version=max(0, lease.opened_at_version),
        actor=NAME,
        reward=float(lease.member % 2),
        is_success=lease.member % 2 == 1,
        logprobs=np.where(mask, -4.0, 0.0).astype(np.float32),
        turn_scores=np.full(1, lease.member % 2, dtype=np.float32),
        **lease.identity(),
    )


class HonestHubClient:
    """Opens a session, makes a step, closes it."""

    def __init__(self, url: str, token: str, *, env: str, item_id: str) -> None:
        self._http = own_connection(url, timeout_s=ANSWER_S)
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._item = {"env": env, "item_id": item_id, "seed": 0}

    def play(self) -> None:
        """Play a turn. Raises: LongstrideError: refused."""
        session = self._ask("POST", "/v1/sessions", self._item)["session_id"]
        self._ask("POST", f"/v1/sessions/{session}/step", {"action": "go forward", "seq": 1})
        self._ask("DELETE", f"/v1/sessions/{session}", None)

    def _ask(self, method: str, path: str, content: object) -> Any:
        body = None if content is None else json.dumps(content)
        self._http.request(method, path, body, self._headers)
        with self._http.getresponse() as answer:
            text = answer.read()
            if answer.status >= 300:
                raise LongstrideError(f"an honest client is refused: {answer.status} {text!r:.200}")
        return json.loads(text) if text else {}

    def close(self) -> None:
        """Close the connection."""
        self._http.close()
