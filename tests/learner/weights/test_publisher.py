"""Laws of publishing: a real publisher against actors made of real sockets and groups."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import zmq

from common.errors import WeightSyncError
from common.wire.codec import decode, encode
from common.wire.collective import BroadcastGroup, backend_for, checksum, open_store, views
from common.wire.messages import (
    CanaryScores,
    Rejected,
    WeightsJoin,
    WeightsLoaded,
    WeightsOffer,
    WeightsReady,
)
from common.wire.security import RunKeys, create_keys
from common.wire.sockets import Router, connect_dealer
from learner.weights.publisher import PublishedWeights, Publisher, snapshot

HOST = "127.0.0.1"
TIMEOUT_S = 1.0
CANARY = [[1, 2, 3]]
CANARY_LOGPROBS = [[-1.0, -2.0]]


def make_weights(version: int, *, num: int = 8) -> PublishedWeights:
    """Weights that are full of their version's number."""
    return snapshot(
        version,
        [("w", torch.full((num,), float(version))), ("b", torch.full((3,), version).bfloat16())],
        canary_token_ids=CANARY,
        canary_logprobs=CANARY_LOGPROBS,
    )


class Actor(threading.Thread):
    """Takes weights like an engine does; from `odd_from` on it misbehaves.

    habit: "mute" says nothing to an offer, "vanish" says ready and leaves, "damage" reports other
    bytes than were sent.
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
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._keys = keys
        self._port = port
        self._habit = habit
        self._odd_from = odd_from
        self._scores = scores
        self._group: BroadcastGroup | None = None
        self._stop_requested = threading.Event()
        self._changed = threading.Condition()
        self._loaded: list[tuple[int, float]] = []  # (version, first weight)

    def run(self) -> None:
        context = zmq.Context()
        address = f"tcp://{HOST}:{self._port}"
        socket = connect_dealer(context, self._keys, address=address, timeout_s=5.0)
        self._join(socket)
        while not self._stop_requested.is_set():
            if socket.poll(20):
                offer = decode(socket.recv_multipart())
                is_odd = offer.version >= self._odd_from
                if self._answer(socket, offer, self._habit if is_odd else "") == "gone":
                    break
        if self._group is not None:
            self._group.close()
        socket.close(linger=500)
        context.term()

    def _join(self, socket: zmq.Socket) -> None:
        join = WeightsJoin(actor=self.name, incarnation="i", device="", version=-1)
        socket.send_multipart(encode(join))

    def _answer(self, socket: zmq.Socket, offer: WeightsOffer, habit: str) -> str:
        if habit == "mute":
            return ""
        place = {
            "actor": self.name,
            "incarnation": "i",
            "version": offer.version,
            "group_epoch": offer.group_epoch,
        }
        socket.send_multipart(encode(WeightsReady(**place)))
        if habit == "vanish":
            return "gone"
        buffer = torch.zeros(offer.total_bytes, dtype=torch.uint8)
        error = ""
        try:
            self._group_for(offer).broadcast(buffer)
            if habit == "damage":
                buffer[0] ^= 1
            if checksum(buffer) != offer.checksum:
                error = "damaged"
        except WeightSyncError as e:
            error = str(e)
            self._group = None
        loaded = WeightsLoaded(**place, is_ok=not error, error=error, pause_s=0.25, load_s=0.1)
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

    def _group_for(self, offer: WeightsOffer) -> BroadcastGroup:
        if self._group is None or self._group.epoch != offer.group_epoch:
            if self._group is not None:
                self._group.close()
            self._group = BroadcastGroup(
                open_store(HOST, offer.store_port, is_server=False, timeout_s=offer.timeout_s),
                epoch=offer.group_epoch,
                rank=offer.rank,
                world_size=offer.world_size,
                backend=offer.backend,
                timeout_s=offer.timeout_s,
                bind_host=HOST,
            )
        return self._group

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

    def stop(self) -> None:
        self._stop_requested.set()
        self.join(timeout=5.0)
        assert not self.is_alive()


@pytest.fixture
def keys(tmp_path: Path) -> RunKeys:
    return create_keys(tmp_path / "keys")


@pytest.fixture
def publisher(keys: RunKeys) -> Iterator[Publisher]:
    router = Router(keys, host=HOST, port=0)
    publisher = Publisher(router, host=HOST, timeout_s=TIMEOUT_S, max_canary_delta=0.05)
    publisher.start()
    yield publisher
    publisher.stop()
    assert not publisher.is_alive()


Start = Callable[..., Actor]


@pytest.fixture
def start_actor(keys: RunKeys, publisher: Publisher) -> Iterator[Start]:
    """Yields a function that starts an actor; it returns once the actor has version 0."""
    actors: list[Actor] = []

    def start(name: str = "a", **habits: object) -> Actor:
        actors.append(Actor(keys, publisher.port, name, **habits))  # type: ignore[arg-type]
        actors[-1].start()
        actors[-1].wait_for(0)
        return actors[-1]

    yield start
    for actor in actors:
        actor.stop()


def eventually(condition: Callable[[], bool]) -> bool:
    """True as soon as the condition holds, False if it does not within 5 s."""
    deadline, never = time.monotonic() + 5.0, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        never.wait(0.01)
    return True


def test_a_snapshot_is_a_copy(publisher: Publisher) -> None:
    weight = torch.zeros(4)
    taken = snapshot(1, [("w", weight)], canary_token_ids=[], canary_logprobs=[])
    weight += 1
    assert next(views(taken.buffer, taken.tensors))[1].tolist() == [0.0] * 4
    assert taken.checksum == checksum(taken.buffer)


def test_publishing_to_nobody_returns_at_once(publisher: Publisher) -> None:
    started = time.monotonic()
    publisher.publish(make_weights(0))
    assert time.monotonic() - started < TIMEOUT_S
    assert publisher.drain_metrics()["weights/members"] == 0


def test_every_version_reaches_every_actor_and_a_late_joiner_gets_the_current_one(
    publisher: Publisher, start_actor: Start, keys: RunKeys
) -> None:
    publisher.publish(make_weights(0))
    first, second = start_actor("first"), start_actor("second")
    for version in (1, 2):
        publisher.publish(make_weights(version))
        for actor in (first, second):
            assert actor.loaded[-1] == version, "publish returned too early"
            assert actor.wait_for(version) == float(version)
    late = Actor(keys, publisher.port, "late")
    late.start()
    assert late.wait_for(2) == 2.0
    assert late.loaded == [2]
    late.stop()
    metrics = publisher.drain_metrics()
    assert metrics["weights/members"] == 3
    assert metrics["publish/pause_s"] == 0.25
    assert metrics["weights/canary_abs_logprob"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("habit", ["mute", "vanish"])
@pytest.mark.parametrize("odd_from", [1, 2], ids=["new_group", "old_group"])
def test_an_actor_that_dies_costs_bounded_time_and_the_other_gets_the_version(
    publisher: Publisher, start_actor: Start, habit: str, odd_from: int
) -> None:
    publisher.publish(make_weights(0))
    start_actor("bad", habit=habit, odd_from=odd_from)
    good = start_actor("good")
    for version in range(1, odd_from + 1):
        started = time.monotonic()
        publisher.publish(make_weights(version))
    assert time.monotonic() - started < 2.9 * TIMEOUT_S
    assert good.wait_for(odd_from) == float(odd_from)
    assert publisher.drain_metrics()["weights/members"] == 1
    started = time.monotonic()
    publisher.publish(make_weights(odd_from + 1))
    assert time.monotonic() - started < TIMEOUT_S, "the dead cost once"
    assert good.wait_for(odd_from + 1) == odd_from + 1


@pytest.mark.slow
def test_several_actors_that_vanish_at_once_cost_no_more_than_one(
    publisher: Publisher, start_actor: Start
) -> None:
    publisher.publish(make_weights(0))
    for number in range(3):
        start_actor(f"bad-{number}", habit="vanish")
    good = start_actor("good")
    started = time.monotonic()
    publisher.publish(make_weights(1))
    assert time.monotonic() - started < 2.9 * TIMEOUT_S
    assert good.wait_for(1) == 1.0
    assert publisher.drain_metrics()["weights/members"] == 1


def test_an_actor_that_loads_other_bytes_is_dropped(
    publisher: Publisher, start_actor: Start
) -> None:
    publisher.publish(make_weights(0))
    bad, good = start_actor("bad", habit="damage"), start_actor("good")
    publisher.publish(make_weights(1))
    assert good.wait_for(1) == 1.0
    assert bad.loaded == [0]
    assert publisher.drain_metrics()["weights/members"] == 1


@pytest.mark.parametrize(
    "scores", [[[-1.5, -2.0]], [[float("nan"), -2.0]], [[-1.0]], [], [[-1.0, -2.0], [-1.0]]]
)
def test_canaries_that_differ_raise_the_alarm(
    publisher: Publisher, start_actor: Start, scores: list[list[float]]
) -> None:
    publisher.publish(make_weights(0))
    start_actor("a", scores=scores)
    assert eventually(lambda: publisher.num_canary_alarms == 1)
    publisher.publish(make_weights(1))
    assert eventually(lambda: publisher.num_canary_alarms == 2)


def test_a_good_engine_does_not_silence_the_alarm_of_a_bad_one(
    publisher: Publisher, start_actor: Start
) -> None:
    publisher.publish(make_weights(0))
    start_actor("bad", scores=[[-1.5, -2.0]])
    start_actor("good")
    for version in (1, 2):
        publisher.publish(make_weights(version))
    assert eventually(lambda: publisher.num_canary_alarms == 3)


def test_canaries_within_the_limit_are_no_alarm(publisher: Publisher, start_actor: Start) -> None:
    publisher.publish(make_weights(0))
    start_actor("a", scores=[[-1.04, -2.04]])
    measured: list[float] = []
    assert eventually(
        lambda: bool(
            measured.append(publisher.drain_metrics().get("weights/canary_abs_logprob", 0.0))
            or max(measured)
        )
    )
    assert max(measured) == pytest.approx(0.04)
    assert publisher.num_canary_alarms == 0


def test_a_message_that_is_not_about_weights_is_rejected(
    publisher: Publisher, keys: RunKeys
) -> None:
    context = zmq.Context()
    address = f"tcp://{HOST}:{publisher.port}"
    dealer = connect_dealer(context, keys, address=address, timeout_s=5.0)
    dealer.send_multipart(encode(Rejected(reason="")))
    assert decode(dealer.recv_multipart()) == Rejected(reason="Rejected is not for weights")
    dealer.close(linger=0)
    context.term()


@pytest.mark.parametrize(
    ("devices", "backend"),
    [
        (["", ""], "gloo"),
        (["GPU-1", "GPU-2", "GPU-3"], "nccl"),
        (["GPU-1", "GPU-1"], "gloo"),  # NCCL takes no two ranks on one GPU
        (["GPU-1", "GPU-2", "GPU-2"], "gloo"),
        (["GPU-1", ""], "gloo"),
    ],
)
def test_weights_go_by_nccl_only_where_every_rank_has_a_gpu_of_its_own(
    devices: list[str], backend: str
) -> None:
    assert backend_for(devices) == backend
