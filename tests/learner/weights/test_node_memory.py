"""Laws of versions in the learner's memory, which engines of its node map: no bytes travel."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import zmq
from torch import Tensor

from common.config.learner import WeightsTransport
from common.errors import WeightSyncError
from common.weights.messages import WeightsOffer
from common.weights.node_copy import CopyView, node_id
from common.weights.transport import TransferCancelled, WeightGroup
from learner.policy.finite import WeightsNotFinite
from learner.weights.source import LiveWeights, PublishedWeights
from learner.weights.transfer import NodeMemory
from tests.common.weights.meeting import NOWHERE
from tests.common.weights.test_node_copy import shared_files
from tests.learner.weights.keeping_actor import KeepingActor, is_equal, run_keeping_actor
from tests.learner.weights.test_delta import NUM
from tests.learner.weights.test_publisher_live import eventually
from tests.learner.weights.test_shared_copies import (
    START_S,
    WHOLE_BYTES,
    Held,
    becomes,
    bench_of,
    num_members,
)
from tests.learner.weights.toy_actor import HOST

NODE = node_id()


@pytest.mark.parametrize("keeps_versions", [False, True], ids=["full", "delta"])
def test_engines_near_and_far_load_the_same_bytes(tmp_path: Path, keeps_versions: bool) -> None:
    with bench_of(tmp_path, keeps_versions=keeps_versions) as bench:
        bench.publish(0)
        near = [
            bench.start_on(NODE, "near-1", num_workers=2),
            bench.start_on(NODE, "near-2", num_workers=1),
        ]
        far = bench.start_on("", "far")
        for actor in (*near, far):
            actor.wait_for(0)
        bench.publish(1)  # The learner has counted all bytes of version 0 by then.
        for version in (2, 3):
            bench.step()
            bench.publisher.drain_metrics()
            sent = bench.publish(version)
            for actor in (*near, far):
                assert is_equal(actor.tensors[version], sent)
            metrics = bench.publisher.drain_metrics()
            assert metrics["publish/bytes"] == WHOLE_BYTES + far.offers[-1].total_bytes
        assert [offer.transport for actor in near for offer in actor.offers] == ["memory"] * 8
        assert {offer.transport for offer in far.offers} == {"gloo"}
        assert (far.offers[-1].total_bytes == WHOLE_BYTES) is not keeps_versions


def test_late_engine_maps_the_copy_that_exists(tmp_path: Path) -> None:
    with bench_of(tmp_path, keeps_versions=False) as bench:
        bench.publish(0)
        bench.start_on(NODE, "first").wait_for(0)
        assert eventually(lambda: bench.count_bytes() == WHOLE_BYTES)
        sent = bench.weight.to(torch.bfloat16)
        bench.step()  # The live weights are no version any more.
        late = bench.start_on(NODE, "late")
        bench.weights_lock.open()
        late.wait_for(0)
        assert is_equal(late.tensors[0], sent)
        assert bench.count_bytes() == WHOLE_BYTES, "the version was written once"


class Confined(KeepingActor):
    """An engine that must not open memory of the learner, and leaves its node as engines do."""

    def _receive_all(self, socket: zmq.Socket, offer: WeightsOffer) -> tuple[list[Tensor], str]:
        if not offer.is_in_memory:
            return super()._receive_all(socket, offer)
        self.offers.append(offer)
        self._node = ""
        return [], "the memory of another process cannot be opened"


@pytest.mark.parametrize("keeps_versions", [False, True], ids=["full", "delta"])
def test_engine_without_permission_gets_every_version_over_gloo(
    tmp_path: Path, keeps_versions: bool
) -> None:
    with bench_of(tmp_path, keeps_versions=keeps_versions) as bench:
        bench.publish(0)
        good = bench.start_on(NODE, "good")
        bad = Confined(bench.keys, bench.publisher.port, "bad", node=NODE)
        bench.actors.append(bad)
        bad.start()
        for version in (0, 1, 2):
            if version > 0:
                bench.step()
                bench.publish(version)
            for actor in (good, bad):
                actor.wait_for(version)
                assert is_equal(actor.tensors[version], bench.weight.to(torch.bfloat16))
        assert [offer.transport for offer in bad.offers] == ["memory", "gloo", "gloo", "gloo"]
        assert {offer.transport for offer in good.offers} == {"memory"}


def test_chosen_memory_refuses_engines_elsewhere(tmp_path: Path) -> None:
    options = {"transport": WeightsTransport.MEMORY, "keeps_versions": False}
    with bench_of(tmp_path, **options) as bench:
        bench.publish(0)
        bench.start_on(NODE, "near").wait_for(0)
        far = bench.start_on("elsewhere", "far")
        assert "cannot reach far because it cannot map memory" in far.wait_for_refusal()


class FullMachine(NodeMemory):
    """Has no memory for any version."""

    def reserve(self, weights: PublishedWeights) -> bool:
        return False


def test_full_memory_costs_no_version(tmp_path: Path) -> None:
    with bench_of(tmp_path, keeps_versions=True) as bench:
        bench.publisher._transfers._memory = FullMachine()
        bench.publish(0)
        actor = bench.start_on(NODE, "near", num_workers=2)
        actor.wait_for(0)
        bench.publisher._transfers._memory = NodeMemory()
        for version in (1, 2):
            bench.step()
            sent = bench.publish(version)
            assert is_equal(actor.tensors[version], sent)
        assert {offer.transport for offer in actor.offers} == {"gloo"}
        assert actor.bases == [(0, -1), (1, 0), (2, 1)], "changes never replace a whole version"


@pytest.mark.slow
def test_killed_engine_costs_the_others_nothing(tmp_path: Path) -> None:
    """The engine is a process of its own, which SIGKILL ends while it maps a version."""
    with bench_of(tmp_path, keeps_versions=False, silent_after_s=60.0) as bench:
        before = shared_files()
        bench.publish(0)
        context = multiprocessing.get_context("spawn")
        place = (tmp_path / "keys", HOST, bench.publisher.port, "bad", NODE, 2)
        process = context.Process(target=run_keeping_actor, args=place, daemon=True)
        process.start()
        try:
            assert becomes(lambda: num_members(bench) == 1)
            good = bench.start_on(NODE, "good")
            good.wait_for(0)
            assert process.pid is not None
            os.kill(process.pid, signal.SIGSTOP)
            bench.step()
            wanted = bench.weight.to(torch.bfloat16)
            assert bench.publisher.begin(PublishedWeights(version=1, source=bench.source))
            assert good.wait_for(1)
            os.kill(process.pid, signal.SIGKILL)
            process.join(START_S)
            assert bench.publisher.wait_done()
            assert is_equal(good.tensors[1], wanted)
            assert [offer.version for offer in good.offers] == [0, 1], "it was offered once"
            assert len(shared_files() - before) == 1
        finally:
            process.kill()
            process.join(START_S)


# --- the memory itself ---------------------------------------------------------------------------


def version_of(number: int) -> PublishedWeights:
    """Return a version that is full of its number."""
    source = LiveWeights([("w", torch.full((NUM,), float(number)))], torch.bfloat16)
    return PublishedWeights(version=number, source=source)


def write(
    memory: NodeMemory,
    weights: PublishedWeights,
    *,
    slots: Sequence[Tensor] = (),
    is_cancelled: Callable[[], bool] = lambda: False,
    group: WeightGroup | None = None,
) -> None:
    offer = WeightsOffer(
        version=weights.version,
        group_epoch=1,
        rank=0,
        world_size=2,
        **NOWHERE,
        transport="memory",
        timeout_s=START_S,
        tensors=weights.tensors,
        total_bytes=weights.source.total_bytes,
        bucket_bytes=4_096,
        canary_token_ids=[],
    )
    memory.write(weights, group or WeightGroup(), slots, offer, is_cancelled=is_cancelled)


def numbers(view: CopyView) -> list[float]:
    return view.buffer.view(torch.bfloat16).unique().tolist()


def test_slow_engine_keeps_its_version_in_the_memory() -> None:
    memory = NodeMemory()
    place = ""
    for number in (0, 1):
        weights = version_of(number)
        assert memory.reserve(weights)
        write(memory, weights)
        assert memory.has(weights)
        assert memory.place != place
        place = memory.place
        if number == 0:
            slow = CopyView(place, 0)
    assert numbers(slow) == [0.0]
    assert numbers(CopyView(place, 1)) == [1.0]
    assert len(shared_files()) == 2
    del slow
    assert len(shared_files()) == 1


def test_memory_is_used_again_once_all_engines_have_loaded() -> None:
    memory = NodeMemory()
    slots = [torch.zeros(4_096, dtype=torch.uint8) for _ in range(2)]
    for number in (0, 1):
        assert memory.reserve(version_of(number))
        write(memory, version_of(number), slots=slots)
        view = CopyView(memory.place, number)
        assert numbers(view) == [float(number)]
        view.unlock()
    assert len(shared_files()) == 1


def test_cancelled_write_is_no_version() -> None:
    memory = NodeMemory()
    first = version_of(0)
    assert memory.reserve(first)
    write(memory, first)
    group = WeightGroup()
    source = Held(torch.zeros(NUM))
    source.is_watched = True
    source.may_go_on.clear()
    second = PublishedWeights(version=1, source=source)
    assert memory.reserve(second)
    with pytest.raises(TransferCancelled):
        write(memory, second, is_cancelled=source.has_begun.is_set, group=group)
    assert not memory.has(first)
    assert not memory.has(second)
    with pytest.raises(WeightSyncError):
        CopyView(memory.place, 0)
    third = version_of(2)
    assert memory.reserve(third)
    write(memory, third)
    source.may_go_on.set()  # The cancelled thread goes on, in the old memory.
    group.join(timeout_s=START_S)
    assert numbers(CopyView(memory.place, 2)) == [2.0]


def test_non_finite_weights_are_named_and_no_version() -> None:
    memory = NodeMemory()
    weight = torch.zeros(NUM)
    weight[-1] = float("nan")
    bad = PublishedWeights(version=1, source=LiveWeights([("w", weight)], torch.bfloat16))
    assert memory.reserve(bad)
    with pytest.raises(WeightsNotFinite, match=r"^w has NaN or infinite values"):
        write(memory, bad)
    assert not memory.has(bad)


def test_version_larger_than_the_memory_is_left_to_gloo(caplog: pytest.LogCaptureFixture) -> None:
    weights = version_of(0)
    weights.source.total_bytes = 1 << 50
    assert not NodeMemory().reserve(weights)
    assert "engines of this node receive over gloo version=0" in caplog.text
