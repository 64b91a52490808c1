"""An engine's side of the weight plane for the publisher's tests: real sockets and groups."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
import zmq

from common.errors import WeightSyncError
from common.weights.buckets import CPU, views
from common.weights.messages import (
    CanaryCheck,
    CanaryScores,
    WeightsCancel,
    WeightsJoin,
    WeightsLeave,
    WeightsLoaded,
    WeightsOffer,
    WeightsPing,
    WeightsReady,
)
from common.weights.transport import WeightGroup
from common.wire.codec import decode, encode
from common.wire.messages import Rejected
from common.wire.security import RunKeys, load_keys
from common.wire.sockets import connect_dealer

HOST = "127.0.0.1"
BEAT_S = 0.2
SLOW_S = 6.0
CANARY = [[1, 2, 3]]
CANARY_LOGPROBS = [[-1.0, -2.0]]


class Actor(threading.Thread):
    """Takes weights like an engine does; from `odd_from` on it misbehaves.

    habit: "mute" takes no offer and goes on beating, "busy" says so meanwhile, "silent" says
    nothing any more, "vanish" says ready and leaves, "damage" reports other bytes than were sent,
    "stop" says ready and stops its process as SIGSTOP does, "quiet" has a worker that does not
    answer, "slow" loads for `SLOW_S`, "lose" loads and its report is lost, "reconnect" loses the
    offer with its connection.
    """

    def __init__(
        self,
        keys: RunKeys,
        port: int,
        name: str,
        *,
        habit: str = "",
        odd_from: int = 1,
        scores: list[list[float]] = CANARY_LOGPROBS,
        num_workers: int = 1,
        node: str = "",
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._keys = keys
        self._port = port
        self._habit = habit
        self._odd_from = odd_from
        self._scores = scores
        self._num_workers = num_workers
        self._node = node
        self.learner_host = HOST
        self._groups = [WeightGroup() for _ in range(num_workers)]
        self._stop_requested = threading.Event()
        self._is_asked_to_join = threading.Event()
        self._is_polite = False
        self._refusal = ""
        self._version = -1
        self._busy_epoch = 0
        self._quiet_since: float | None = None
        self._is_mute = False
        self._beaten_at = 0.0
        self._given_up = threading.Event()
        self._queue: list[WeightsOffer] = []
        self.cancelled: list[int] = []  # epochs
        self._changed = threading.Condition()
        self._loaded: list[tuple[int, float]] = []  # (version, first weight)

    def run(self) -> None:
        context = zmq.Context()
        socket = self._connect(context)
        while not self._stop_requested.is_set():
            if self._is_asked_to_join.is_set():
                self._is_asked_to_join.clear()
                self._join(socket)
            self._pump(socket)
            if self._refusal:
                break
            if not self._queue:
                continue
            offer = self._queue.pop()
            self._queue.clear()
            habit = self._habit if offer.version >= self._odd_from else ""
            if habit == "reconnect":
                self._habit = ""
                socket.close(linger=0)
                socket = self._connect(context)
            elif self._answer(socket, offer, habit) == "gone":
                break
        if self._is_polite:
            leave = WeightsLeave(actor=self.name, incarnation=f"{self.name}-1")
            socket.send_multipart(encode(leave))
        for group in self._groups:
            group.leave()
        socket.close(linger=500)
        context.term()

    def _connect(self, context: zmq.Context) -> zmq.Socket:
        address = f"tcp://{self.learner_host}:{self._port}"
        socket = connect_dealer(context, self._keys, address=address, timeout_s=60.0)
        self._join(socket)
        return socket

    def _pump(self, socket: zmq.Socket) -> None:
        """Handle the messages of 20 ms and send a heartbeat."""
        if socket.poll(20):
            message = decode(socket.recv_multipart())
            match message:
                case WeightsOffer():
                    self._queue.append(message)
                case WeightsCancel():
                    self.cancelled.append(message.group_epoch)
                    if message.group_epoch == self._busy_epoch:
                        self._given_up.set()
                case CanaryCheck():
                    self._score(socket, message.version, number=message.number)
                case Rejected():
                    self._refusal = message.reason
                case _:
                    assert isinstance(message, WeightsPing)
        if time.monotonic() - self._beaten_at > BEAT_S and not self._is_mute:
            self._join(socket)

    def _join(self, socket: zmq.Socket) -> None:
        self._beaten_at = time.monotonic()
        quiet_s = 0.0 if self._quiet_since is None else self._beaten_at - self._quiet_since
        join = WeightsJoin(
            actor=self.name,
            incarnation=f"{self.name}-1",
            devices=[""] * self._num_workers,
            version=self._version,
            busy_epoch=self._busy_epoch,
            quiet_s=quiet_s,
            node=self._node,
        )
        socket.send_multipart(encode(join))

    def _score(self, socket: zmq.Socket, version: int, *, number: int = 0) -> None:
        scores = CanaryScores(
            actor=self.name, version=version, logprobs=self._scores, number=number
        )
        socket.send_multipart(encode(scores))

    def _answer(self, socket: zmq.Socket, offer: WeightsOffer, habit: str) -> str:
        if habit == "mute":
            return ""
        self._is_mute = habit == "silent"
        self._busy_epoch = offer.group_epoch
        if habit in ("busy", "silent"):
            return ""
        place = {
            "actor": self.name,
            "incarnation": f"{self.name}-1",
            "version": offer.version,
            "group_epoch": offer.group_epoch,
        }
        socket.send_multipart(encode(WeightsReady(**place)))
        if habit == "vanish":
            return "gone"
        if habit == "quiet":
            self._quiet_since = time.monotonic()
            return ""
        if habit == "stop":
            time.sleep(0.2)  # The socket's own thread has no event for a sent message.
            os.kill(os.getpid(), signal.SIGSTOP)
        tensors, error = self._receive_all(socket, offer)
        if habit == "damage":
            error = "damaged"
        slow_until = time.monotonic() + (SLOW_S if habit == "slow" else 0.0)
        while time.monotonic() < slow_until and not self._stop_requested.is_set():
            self._pump(socket)
        loaded = WeightsLoaded(**place, is_ok=not error, error=error, stage_s=0.5, pause_s=0.25)
        if not error:
            self._version = offer.version
            with self._changed:
                first = tensors[0][0].item()
                self._loaded.append((offer.version, first))
                self._changed.notify_all()
        self._busy_epoch = 0
        if habit == "lose":
            return ""
        socket.send_multipart(encode(loaded))
        if not error:
            self._score(socket, offer.version)
        elif habit != "damage":
            self._join(socket)
        return ""

    def _receive_all(
        self, socket: zmq.Socket, offer: WeightsOffer
    ) -> tuple[list[torch.Tensor], str]:
        """Let every worker receive; return the last one's tensors, and the error or ""."""
        buffers = [torch.zeros(offer.total_bytes, dtype=torch.uint8) for _ in self._groups]
        self._given_up.clear()
        with ThreadPoolExecutor(len(buffers)) as pool:
            receiving = [
                pool.submit(
                    group.receive,
                    buffer,
                    CPU,
                    replace(offer, rank=offer.rank + index),
                    is_cancelled=lambda: self._given_up.is_set() or self._stop_requested.is_set(),
                )
                for index, (group, buffer) in enumerate(zip(self._groups, buffers, strict=True))
            ]
            while not all(each.done() for each in receiving):
                self._pump(socket)
        errors = [each.exception() for each in receiving]
        unexpected = [e for e in errors if e is not None and not isinstance(e, WeightSyncError)]
        assert not unexpected, unexpected
        tensors = [tensor for _, tensor in views(buffers[-1], offer.tensors)]
        return tensors, "; ".join(str(error) for error in errors if error is not None)

    @property
    def loaded(self) -> list[int]:
        with self._changed:
            return [version for version, _ in self._loaded]

    def wait_for(self, version: int) -> float:
        """The first weight of a version, once it is loaded."""
        with self._changed:
            has_come = self._changed.wait_for(lambda: version in dict(self._loaded), timeout=60.0)
            assert has_come, f"{self.name} has {self._loaded}, not {version}"
            return dict(self._loaded)[version]

    def wait_for_refusal(self) -> str:
        """Why the learner takes no such engine."""
        self.join(timeout=60.0)
        return self._refusal

    def join_again(self) -> None:
        """Send the hello again."""
        self._is_asked_to_join.set()

    def leave(self) -> None:
        """Send a refusal of weights and stop."""
        self._is_polite = True
        self.stop()

    def stop(self) -> None:
        self._stop_requested.set()
        self.join(timeout=60.0)
        assert not self.is_alive()


def run_actor(keys: Path, port: int, name: str, habit: str) -> None:
    """Be an actor, as the whole of a process."""
    Actor(load_keys(keys), port, name, habit=habit).run()
