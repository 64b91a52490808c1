"""Laws of publishing live weights: beside training, whole versions only, to unlike engines."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.config.learner import WeightsTransport
from common.wire.security import RunKeys, create_keys
from common.wire.sockets import Router
from learner.policy.finite import WeightsNotFinite
from learner.weights.lock import WeightsLock
from learner.weights.publisher import Publisher
from learner.weights.source import LiveWeights, PublishedWeights
from learner.weights.transfer import PublishSettings
from tests.learner.weights.toy_actor import HOST, Actor

TIMEOUT_S = 20.0
SETTINGS = PublishSettings(host=HOST, timeout_s=TIMEOUT_S, max_canary_delta=0.05, bucket_bytes=16)


class Held(LiveWeights):
    """Live weights with reads that wait for the test."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__([("w", weight)], torch.float32)
        self.may_go_on = threading.Event()
        self.has_begun = threading.Event()
        self.may_go_on.set()

    def read(self, start: int, part: Tensor) -> None:
        self.has_begun.set()
        assert self.may_go_on.wait(TIMEOUT_S)
        super().read(start, part)


class Bench:
    """A publisher of one weight vector, and actors."""

    def __init__(self, folder: Path, settings: PublishSettings) -> None:
        self.keys: RunKeys = create_keys(folder / "keys")
        self.weights_lock = WeightsLock(timeout_s=TIMEOUT_S)
        self.publisher = Publisher(
            Router(self.keys, host=HOST, port=0), settings, weights_lock=self.weights_lock
        )
        self.weight = torch.zeros(100)
        self.source = Held(self.weight)
        self.actors: list[Actor] = []
        self.done: list[int] = []
        self.publisher.start()

    def start(self, name: str, **habits: object) -> Actor:
        actor = Actor(self.keys, self.publisher.port, name, **habits)  # type: ignore[arg-type]
        self.actors.append(actor)
        actor.start()
        return actor

    def begin(self, version: int) -> None:
        """Begin to publish the weight as it is; its value is the version's number."""
        weights = PublishedWeights(version=version, source=self.source)
        assert self.publisher.begin(weights, on_done=lambda: self.done.append(version))

    def step(self, version: int) -> None:
        """Update the weight to be a version, as a trainer does."""
        self.weights_lock.close()
        self.weight.fill_(float(version))

    def stop(self) -> None:
        for actor in self.actors:
            actor.stop()
        self.publisher.stop()
        assert not self.publisher.is_alive()


@contextmanager
def bench_of(root: Path, **settings: object) -> Iterator[Bench]:
    bench = Bench(root, replace(SETTINGS, **settings))  # type: ignore[arg-type]
    try:
        yield bench
    finally:
        bench.stop()


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_training_continues_during_transfer_until_update(tmp_path: Path) -> None:
    with bench_of(tmp_path) as bench:
        bench.begin(0)
        actor = bench.start("a")
        actor.wait_for(0)
        bench.step(1)
        bench.source.may_go_on.clear()
        bench.source.has_begun.clear()
        bench.begin(1)
        assert bench.source.has_begun.wait(TIMEOUT_S)
        # Here the next gradient is computed; version 1 is still on its way.
        assert bench.done == [0]
        update = threading.Thread(target=bench.step, args=(2,), daemon=True)
        update.start()
        update.join(0.1)
        assert update.is_alive(), "the weights must not change before the last bucket has left"
        bench.source.may_go_on.set()
        update.join(TIMEOUT_S)
        assert not update.is_alive()
        assert actor.wait_for(1) == 1.0, "not the value of the update that waited"
        bench.begin(2)
        assert bench.done == [0, 1], "one version is on its way at most"
        assert actor.wait_for(2) == 2.0
        assert bench.publisher.wait_done()
        metrics = bench.publisher.drain_metrics()
        assert metrics["publish/gate_wait_s"] > 0.05
        assert metrics["publish/pause_s_per_gb"] == pytest.approx(0.25 / 400e-9)
        assert 0 < metrics["publish/transfer_s"] < metrics["publish/transfer_s_per_gb"]


def test_late_joiner_never_receives_mixed_weights(tmp_path: Path) -> None:
    with bench_of(tmp_path) as bench:
        bench.begin(0)
        assert bench.publisher.wait_done()
        bench.step(1)
        actor = bench.start("late")
        assert eventually(lambda: bench.publisher.drain_metrics()["weights/members"] == 1)
        time.sleep(0.1)
        assert actor.loaded == []
        bench.begin(1)
        assert actor.wait_for(1) == 1.0
        assert actor.loaded == [1]


def test_overlong_transfer_is_aborted_and_the_next_version_arrives(tmp_path: Path) -> None:
    with bench_of(tmp_path) as bench:
        bench.weights_lock._timeout_s = 0.2
        bench.begin(0)
        actor = bench.start("a")
        actor.wait_for(0)
        bench.step(1)
        bench.source.has_begun.clear()
        bench.source.may_go_on.clear()
        bench.begin(1)
        assert bench.source.has_begun.wait(TIMEOUT_S)
        started = time.monotonic()
        bench.step(2)
        assert time.monotonic() - started < TIMEOUT_S / 2
        bench.source.may_go_on.set()
        bench.begin(2)
        assert actor.wait_for(2) == 2.0
        assert actor.loaded == [0, 2]


def test_non_finite_weights_are_not_sent_and_end_the_run(tmp_path: Path) -> None:
    with bench_of(tmp_path) as bench:
        bench.begin(0)
        actor = bench.start("a")
        actor.wait_for(0)
        bench.step(1)
        bench.weight[70] = float("nan")
        bench.begin(1)
        with pytest.raises(WeightsNotFinite, match="w has NaN or infinite values"):
            bench.publisher.wait_done()
        assert actor.loaded == [0]


@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_every_worker_in_every_fleet_part_receives_weights(tmp_path: Path, num_parts: int) -> None:
    with bench_of(tmp_path, num_parts=num_parts) as bench:
        bench.begin(0)
        actors = [bench.start(f"tp-{n}", num_workers=n) for n in (1, 2, 3)]
        for actor in actors:
            actor.wait_for(0)
        bench.step(1)
        bench.begin(1)
        for actor in actors:
            assert actor.wait_for(1) == 1.0
        bench.step(2)
        bench.begin(2)
        assert bench.publisher.wait_done()
        assert [actor.loaded for actor in actors] == [[0, 1, 2]] * 3
        assert bench.done == [0, 1, 2]


def test_unreachable_engine_receives_the_transports_refusal(tmp_path: Path) -> None:
    with bench_of(tmp_path, transport=WeightsTransport.NCCL) as bench:
        bench.begin(0)
        assert bench.publisher.wait_done()
        actor = bench.start("a")
        reason = actor.wait_for_refusal()
        assert reason == (
            "learner.weights_transport=nccl cannot reach a on the CPU from the CPU;"
            " use learner.weights_transport=auto"
        )
        assert bench.publisher.drain_metrics()["weights/members"] == 0
