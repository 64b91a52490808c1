"""Simulated actors and a learner for the scheduler's measurements: each actor a real socket."""

import heapq
import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from common.errors import LongstrideError
from common.wire.codec import decode, encode
from common.wire.messages import (
    EndReason,
    EpisodeOutcome,
    EpisodeSeen,
    GroupArrived,
    Heartbeat,
    Hello,
    Lease,
    LeaseGrant,
    LeaseRequest,
    Outcome,
    Outcomes,
    StepDone,
    Welcome,
)
from common.wire.security import RunKeys
from common.wire.sockets import connect_dealer

LEARNER = "learner-0"
BEAT_S = 1.0
ANSWER_S = 0.02  # Time from a request to the first check for its answer.
REPORT_S = 0.05  # Interval of the learner's reports.
MAX_SOCKETS = 8_192
JOIN_S = 60.0  # Limit of the time until all actors are welcomed.


class BenchLearner:
    """Sends a learner's reports: arrived episodes, complete groups, finished steps.

    Example (groups of 2, 1 a step): arrive(g/0), arrive(g/1) -> messages() reports both, calls g
    ready, trains on it and ends step 1.
    """

    def __init__(self, *, group_size: int, per_step: int) -> None:
        self._group_size = group_size
        self._per_step = per_step
        self._seen: list[EpisodeSeen] = []
        self._groups: defaultdict[str, list[str]] = defaultdict(list)  # Arrived members by group.
        self._ready: list[str] = []
        self._said_ready: list[str] = []
        self.version = 0
        self.num_arrived = 0

    def arrive(self, lease: Lease, *, wall_s: float) -> None:
        """Record the arrival of an episode."""
        self.num_arrived += 1
        self._seen.append(
            EpisodeSeen(
                episode_id=lease.episode_id,
                reward=float(lease.member % 2),
                is_success=lease.member % 2 == 1,
                end_reason=EndReason.DONE,
                num_turns=4,
                wall_s=wall_s,
            )
        )
        members = self._groups[lease.group_id]
        members.append(lease.episode_id)
        if len(members) == self._group_size:
            self._ready.append(lease.group_id)

    def messages(self) -> list[Any]:
        """Return the messages since the last call."""
        groups = [GroupArrived(group_id=each, is_ready=True) for each in self._ready]
        said: list[Any] = []
        if self._seen or groups:
            said.append(Outcomes(seen=self._seen, groups=groups))
        self._said_ready += self._ready
        self._ready = []
        self._seen = []
        while len(self._said_ready) >= self._per_step:
            batch = self._said_ready[: self._per_step]
            del self._said_ready[: self._per_step]
            trained = [each for group_id in batch for each in self._groups.pop(group_id)]
            self.version += 1
            outcomes = [
                EpisodeOutcome(episode_id=each, outcome=Outcome.TRAINED, cause="")
                for each in trained
            ]
            done = StepDone(version=self.version, is_last=False, max_ahead_steps=1_000, signals={})
            said += [Outcomes(outcomes=outcomes), done]
        return said


@dataclass(slots=True)
class _Peer:
    """The learner, or an actor that plays one episode at a time."""

    name: str
    socket: Any
    lease: Lease | None = None
    asked_at: float = 0.0
    is_welcome: bool = False


class SimulatedPeers:
    """Many actors and a learner, all in one thread, each with its own socket."""

    def __init__(
        self,
        keys: RunKeys,
        *,
        address: str,
        num_peers: int,
        episode_s: float,
        learner: BenchLearner,
    ) -> None:
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._episode_s = episode_s
        self._learner = learner
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        names = [LEARNER, *(f"actor-{i}" for i in range(num_peers))]
        self._learner_peer, *self._peers = [
            _Peer(name, connect_dealer(self._context, keys, address=address)) for name in names
        ]
        # Times from a request to its detected grant, since the last reset.
        self.answer_s: list[float] = []

    def join(self) -> None:
        """Send the hello of all peers and wait until all are welcomed.

        Raises: LongstrideError: some were not.
        """
        for peer in (self._learner_peer, *self._peers):
            _send(peer.socket, hello(peer.name))
        deadline = time.monotonic() + JOIN_S
        while missing := [peer for peer in self._peers if not peer.is_welcome]:
            if time.monotonic() > deadline:
                raise LongstrideError(f"{len(missing)} of {len(self._peers)} are not welcome")
            for peer in missing:
                peer.is_welcome = any(isinstance(each, Welcome) for each in _receive(peer.socket))
            time.sleep(ANSWER_S)
        for i, peer in enumerate(self._peers):  # The start times differ, so that the load is even.
            self._at(self._episode_s * i / len(self._peers), self._ask, peer)
            self._at(BEAT_S * i / len(self._peers), self._beat, peer)
        self._at(0.0, self._report)
        self._at(0.0, self._beat, self._learner_peer)

    def run(self, seconds: float) -> None:
        """Simulate the peers for this time."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            due, _, action, arguments = self._events[0]
            if due > now:
                time.sleep(min(due, end) - now)
                continue
            heapq.heappop(self._events)
            action(*arguments)

    def _at(self, after_s: float, action: Callable[..., None], *arguments: Any) -> None:
        event = (time.monotonic() + after_s, next(self._numbers), action, arguments)
        heapq.heappush(self._events, event)

    def _ask(self, peer: _Peer) -> None:
        if peer.lease is not None:
            self._learner.arrive(peer.lease, wall_s=self._episode_s)
            peer.lease = None
        _receive(peer.socket)
        request = LeaseRequest(actor=peer.name, num_free_slots=1, version=self._learner.version)
        _send(peer.socket, request)
        peer.asked_at = time.monotonic()
        self._at(ANSWER_S, self._look, peer)

    def _look(self, peer: _Peer) -> None:
        """Read the grant if it has arrived; repeat the request if it was empty."""
        grants = [each for each in _receive(peer.socket) if isinstance(each, LeaseGrant)]
        if not grants:
            self._at(ANSWER_S, self._look, peer)
            return
        now = time.monotonic()
        self.answer_s.append(now - peer.asked_at)
        if grants[0].leases:
            peer.lease = grants[0].leases[0]
            self._at(self._episode_s - (now - peer.asked_at), self._ask, peer)
        else:
            self._at(grants[0].retry_after_s, self._ask, peer)

    def _beat(self, peer: _Peer) -> None:
        running = [peer.lease.episode_id] if peer.lease else []
        role = peer.name.partition("-")[0]
        version = self._learner.version
        _send(
            peer.socket,
            Heartbeat(role=role, name=peer.name, version=version, running=running, num_slots=1),
        )
        self._at(BEAT_S, self._beat, peer)

    def _report(self) -> None:
        _receive(self._learner_peer.socket)  # The answers to the learner are not used.
        for message in self._learner.messages():
            _send(self._learner_peer.socket, message)
        self._at(REPORT_S, self._report)

    def close(self) -> None:
        """Close all sockets."""
        for peer in (self._learner_peer, *self._peers):
            peer.socket.close(linger=0)
        self._context.term()


def hello(name: str) -> Hello:
    """Return the hello of a role with a name like "actor-0"."""
    return Hello(role=name.partition("-")[0], name=name, incarnation="life-1", version=0)


def _send(socket: Any, message: Any) -> None:
    socket.send_multipart(encode(message))


def _receive(socket: Any) -> list[Any]:
    """Return the messages that have arrived."""
    messages: list[Any] = []
    while True:
        try:
            messages.append(decode(socket.recv_multipart(zmq.NOBLOCK)))
        except zmq.Again:
            return messages
