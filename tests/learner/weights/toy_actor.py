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
from common.wire.codec import decode, encode
from common.wire.collective import CPU, views
from common.wire.messages import Rejected
from common.wire.security import RunKeys, load_keys
from common.wire.sockets import connect_dealer
from common.wire.weight_group import WeightGroup
from common.wire.weight_messages import (
    CanaryScores,
    WeightsJoin,
    WeightsLeave,
    WeightsLoaded,
    WeightsOffer,
    WeightsReady,
)

HOST = "127.0.0.1"
CANARY = [[1, 2, 3]]
CANARY_LOGPROBS = [[-1.0, -2.0]]


class Actor(threading.Thread):
    """Takes weights like an engine does; from `odd_from` on it misbehaves.

    habit: "mute" says nothing to an offer, "vanish" says ready and leaves, "damage" reports other
    bytes than were sent, "stop" says ready and stops its process as SIGSTOP does.
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
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._keys = keys
        self._port = port
        self._habit = habit
        self._odd_from = odd_from
        self._scores = scores
        self._num_workers = num_workers
        self._groups = [WeightGroup() for _ in range(num_workers)]
        self._stop_requested = threading.Event()
        self._is_asked_to_join = threading.Event()
        self._is_polite = False
        self._refusal = ""
        self._changed = threading.Condition()
        self._loaded: list[tuple[int, float]] = []  # (version, first weight)

    def run(self) -> None:
        context = zmq.Context()
        address = f"tcp://{HOST}:{self._port}"
        socket = connect_dealer(context, self._keys, address=address, timeout_s=5.0)
        self._join(socket)
        while not self._stop_requested.is_set():
            if self._is_asked_to_join.is_set():
                self._is_asked_to_join.clear()
                self._join(socket)
            if socket.poll(20):
                offer = decode(socket.recv_multipart())
                if isinstance(offer, Rejected):
                    self._refusal = offer.reason
                    break
                is_odd = offer.version >= self._odd_from
                if self._answer(socket, offer, self._habit if is_odd else "") == "gone":
                    break
        if self._is_polite:
            leave = WeightsLeave(actor=self.name, incarnation=f"{self.name}-1")
            socket.send_multipart(encode(leave))
        for group in self._groups:
            group.leave()
        socket.close(linger=500)
        context.term()

    def _join(self, socket: zmq.Socket) -> None:
        join = WeightsJoin(
            actor=self.name,
            incarnation=f"{self.name}-1",
            devices=[""] * self._num_workers,
            version=-1,
        )
        socket.send_multipart(encode(join))

    def _answer(self, socket: zmq.Socket, offer: WeightsOffer, habit: str) -> str:
        if habit == "mute":
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
        if habit == "stop":
            time.sleep(0.2)  # for the socket's own thread, which has no event for "it is sent"
            os.kill(os.getpid(), signal.SIGSTOP)
        buffers = [torch.zeros(offer.total_bytes, dtype=torch.uint8) for _ in self._groups]
        error = self._receive_all(buffers, offer)
        if habit == "damage":
            error = "damaged"
        loaded = WeightsLoaded(**place, is_ok=not error, error=error, stage_s=0.5, pause_s=0.25)
        buffer = buffers[-1]
        if not error:
            with self._changed:
                first = next(views(buffer, offer.tensors))[1][0].item()
                self._loaded.append((offer.version, first))
                self._changed.notify_all()
        socket.send_multipart(encode(loaded))
        if not error:
            scores = CanaryScores(actor=self.name, version=offer.version, logprobs=self._scores)
            socket.send_multipart(encode(scores))
        elif habit != "damage":
            self._join(socket)
        return ""

    def _receive_all(self, buffers: list[torch.Tensor], offer: WeightsOffer) -> str:
        """Let every worker receive; return what went wrong, or ""."""
        with ThreadPoolExecutor(len(buffers)) as pool:
            receiving = [
                pool.submit(group.receive, buffer, CPU, replace(offer, rank=offer.rank + index))
                for index, (group, buffer) in enumerate(zip(self._groups, buffers, strict=True))
            ]
        errors = [each.exception() for each in receiving]
        unexpected = [e for e in errors if e is not None and not isinstance(e, WeightSyncError)]
        assert not unexpected, unexpected
        return "; ".join(str(error) for error in errors if error is not None)

    @property
    def loaded(self) -> list[int]:
        with self._changed:
            return [version for version, _ in self._loaded]

    def wait_for(self, version: int) -> float:
        """The first weight of a version, once it is loaded."""
        with self._changed:
            has_come = self._changed.wait_for(lambda: version in dict(self._loaded), timeout=8.0)
            assert has_come, f"{self.name} has {self._loaded}, not {version}"
            return dict(self._loaded)[version]

    def wait_for_refusal(self) -> str:
        """Why the learner takes no such engine."""
        self.join(timeout=8.0)
        return self._refusal

    def join_again(self) -> None:
        """Say hello once more."""
        self._is_asked_to_join.set()

    def leave(self) -> None:
        """Say that it takes no weights any more, and end."""
        self._is_polite = True
        self.stop()

    def stop(self) -> None:
        self._stop_requested.set()
        self.join(timeout=5.0)
        assert not self.is_alive()


def run_actor(keys: Path, port: int, name: str, habit: str) -> None:
    """Be an actor, as the whole of a process."""
    Actor(load_keys(keys), port, name, habit=habit).run()
