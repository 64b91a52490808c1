"""Laws of versions for several workers of a node: one copy crosses the network for all of them."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from learner.weights.source import LiveWeights, PublishedWeights
from tests.common.weights.test_node_copy import shared_files
from tests.learner.weights.keeping_actor import KeepingActor, is_equal, run_keeping_actor
from tests.learner.weights.test_delta import NUM, SETTINGS, Bench
from tests.learner.weights.toy_actor import HOST

START_S = 120.0  # Seconds for a process to start on a busy machine.
WHOLE_BYTES = 2 * NUM


class NodeBench(Bench):
    """Actors with a node."""

    def start_on(self, node: str, name: str, *, num_workers: int = 1) -> KeepingActor:
        """Start an actor, and wait until it has the current version."""
        actor = KeepingActor(
            self.keys, self.publisher.port, name, num_workers=num_workers, node=node
        )
        self.actors.append(actor)
        actor.start()
        return actor


@contextmanager
def bench_of(root: Path, **settings: object) -> Iterator[NodeBench]:
    bench = NodeBench(root, replace(SETTINGS, **settings))  # type: ignore[arg-type]
    try:
        yield bench
    finally:
        bench.stop()


@pytest.mark.parametrize("keeps_versions", [False, True], ids=["full", "delta"])
def test_version_crosses_the_network_once_for_each_node(
    tmp_path: Path, keeps_versions: bool
) -> None:
    with bench_of(tmp_path, keeps_versions=keeps_versions) as bench:
        bench.publish(0)
        actors = [
            bench.start_on("n", "n-1", num_workers=2),
            bench.start_on("n", "n-2", num_workers=1),
            bench.start_on("m", "m-1", num_workers=2),
            bench.start_on("", "apart", num_workers=2),
        ]
        for actor in actors:
            actor.wait_for(0)
        bench.publish(1)  # The learner has counted all bytes of version 0 by then.
        for version in (2, 3):
            bench.step()
            bench.publisher.drain_metrics()
            sent = bench.publish(version)
            for actor in actors:
                assert is_equal(actor.tensors[version], sent)
                assert len(actor.tensors[version]) == actor._num_workers
            num_bytes = actors[0].offers[-1].total_bytes
            assert (num_bytes == WHOLE_BYTES) is not keeps_versions
            metrics = bench.publisher.drain_metrics()
            # Node n: 1 for three workers. Node m: 1 for two. The engine without a node: 2.
            assert metrics["publish/bytes"] == (1 + 1 + 2) * num_bytes
        first, second, third, apart = (shares(actor) for actor in actors)
        assert sorted([first, second]) == [False, True], "one of the two actors received for both"
        assert (third, apart) == (True, False)


class Held(LiveWeights):
    """Live weights with reads that wait for the test."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__([("w", weight)], torch.bfloat16)
        self.has_begun = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.is_watched = False

    def read(self, start: int, part: Tensor) -> None:
        if self.is_watched and start > 0:
            self.has_begun.set()
            assert self.may_go_on.wait(START_S)
        super().read(start, part)


@pytest.mark.slow
def test_killed_receiver_costs_its_node_no_version(tmp_path: Path) -> None:
    """The receiver of the node is a process of its own, which SIGKILL ends inside a version."""
    with bench_of(tmp_path, keeps_versions=False, silent_after_s=60.0) as bench:
        before = shared_files()
        source = Held(bench.weight)
        bench.source = source
        bench.publish(0)
        context = multiprocessing.get_context("spawn")
        place = (tmp_path / "keys", HOST, bench.publisher.port, "bad", "n", 2)
        process = context.Process(target=run_keeping_actor, args=place, daemon=True)
        process.start()
        try:
            assert becomes(lambda: num_members(bench) == 1)
            actors = [bench.start_on("n", f"good-{number}") for number in (1, 2)]
            for actor in actors:
                actor.wait_for(0)
            bench.publish(1)
            bench.publisher.drain_metrics()
            bench.step()
            sent = bench.publish(2)
            assert bench.publisher.drain_metrics()["publish/bytes"] == WHOLE_BYTES
            assert all(is_equal(actor.tensors[2], sent) for actor in actors)
            assert not any(shares(actor) for actor in actors)
            bench.step()
            source.is_watched = True
            source.may_go_on.clear()
            wanted = bench.weight.to(torch.bfloat16)
            assert bench.publisher.begin(PublishedWeights(version=3, source=source))
            assert source.has_begun.wait(START_S)
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join(START_S)
            source.may_go_on.set()
            assert bench.publisher.wait_done()
            for actor in actors:
                assert actor.wait_for(3)
                assert is_equal(actor.tensors[3], wanted)
            assert num_members(bench) == 2
            assert sorted(shares(actor) for actor in actors) == [False, True]
            assert len(shared_files() - before) == 1, "nothing is left of the killed process"
        finally:
            process.kill()
            process.join(START_S)


def shares(actor: KeepingActor) -> bool:
    """Return whether an actor's first worker holds the memory that its node shares."""
    return actor._stagings[0].memory.for_node is not None


def num_members(bench: Bench) -> float:
    return bench.publisher.drain_metrics()["weights/members"]


def becomes(condition: Callable[[], bool]) -> bool:
    """Return True as soon as a condition holds, False if it does not in `START_S`."""
    deadline = time.monotonic() + START_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()
