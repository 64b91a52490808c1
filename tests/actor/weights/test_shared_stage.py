"""Laws of workers of one node that stage one copy of a version together."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from actor.weights.stage import Staged, Staging, failure_of
from common.errors import WeightSyncError
from common.weights.buckets import CPU
from common.weights.messages import WeightsOffer
from common.weights.node_copy import CopyUnreachable
from common.weights.transport import TransferCancelled, WeightGroup
from learner.weights.source import KeptVersion, LiveWeights, PublishedWeights, VersionKeeper
from tests.common.weights.meeting import Meeting

TIMEOUT_S = 60.0
BUCKET_BYTES = 4_096
NUM = 20_000
NUM_WORKERS = 3


class Node:
    """A learner's weights, and the workers of one node: the first receives for all."""

    def __init__(self, prepare: Callable[[Iterable[tuple[str, Tensor]]], None] | None) -> None:
        torch.manual_seed(0)
        self.weight = torch.randn(NUM).to(torch.bfloat16)
        self.keeper = VersionKeeper()  # Every version has a digest, so that it may be a base.
        self.meeting = Meeting()
        self.sender = WeightGroup()
        self.workers = [Staging(CPU, prepare) for _ in range(NUM_WORKERS)]
        self._num_offers = 0

    def version(self, number: int) -> KeptVersion:
        """Move some numbers to the next bit pattern, and return the result as a version."""
        self.weight.view(torch.int16)[number::100] += 1
        source = LiveWeights([("w", self.weight)], None)
        return self.keeper.keep(PublishedWeights(version=number, source=source))

    def offer(self, weights: PublishedWeights, *, epoch: int = 1) -> WeightsOffer:
        """Return the offer to the node; each offer has the name of another copy."""
        self._num_offers += 1
        return WeightsOffer(
            version=weights.version,
            group_epoch=epoch,
            rank=1,
            world_size=2,
            **self.meeting.of_offer(),
            transport="gloo",
            timeout_s=TIMEOUT_S,
            tensors=weights.tensors,
            total_bytes=weights.source.total_bytes,
            bucket_bytes=BUCKET_BYTES,
            canary_token_ids=[],
            base=weights.base,
            digest=weights.digest,
            copy_key=f"copy {self._num_offers}",
        )

    def send(
        self, weights: PublishedWeights | None, *, epoch: int = 1, to: list[Staging] | None = None
    ) -> list[Staged]:
        """Send a version once; return the states of the workers, of which the first receives."""
        assert weights is not None
        workers = to or self.workers
        offer = self.offer(weights, epoch=epoch)
        for index, worker in enumerate(workers):
            worker.begin(offer.of_worker(index))
        slots = [torch.zeros(BUCKET_BYTES, dtype=torch.uint8) for _ in range(2)]
        learner = replace(offer, rank=0)
        self.sender.send(slots, weights.source.fill, learner, is_cancelled=lambda: False)
        return [wait_for(worker) for worker in workers]

    def has(self, version: int, wanted: Tensor) -> bool:
        """Return whether every worker would load these numbers."""
        return all(torch.equal(staged(worker, version), wanted) for worker in self.workers)

    def release(self) -> None:
        """Let every worker have loaded its part."""
        for worker in self.workers:
            worker.memory.release()

    def close(self) -> None:
        for worker in self.workers:
            worker.leave()
        self.sender.leave()
        self.meeting.close()


def wait_for(worker: Staging) -> Staged:
    deadline = time.monotonic() + TIMEOUT_S
    while not worker.state().is_done:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return worker.state()


def staged(worker: Staging, version: int) -> Tensor:
    return next(worker.tensors(version))[1]


@pytest.fixture
def prepared() -> list[Tensor]:
    """Copies of the tensors that the workers prepared."""
    return []


@pytest.fixture(params=[False, True], ids=["loads", "prepares"])
def node(request: pytest.FixtureRequest, prepared: list[Tensor]) -> Iterator[Node]:
    def prepare(tensors: Iterable[tuple[str, Tensor]]) -> None:
        prepared.extend(tensor.clone() for _, tensor in tensors)

    node = Node(prepare if request.param else None)
    yield node
    node.close()


def errors(states: list[Staged]) -> list[str]:
    return [state.error for state in states]


def test_workers_load_whole_versions_from_one_memory(node: Node, prepared: list[Tensor]) -> None:
    for number in (0, 1):
        whole = replace(node.version(number).whole, digest="")
        assert errors(node.send(whole)) == [""] * NUM_WORKERS
        memory = node.workers[0].memory.for_node
        assert memory is not None
        loaded = prepared or [staged(worker, number) for worker in node.workers]
        assert all(torch.equal(each, node.weight) for each in loaded[-NUM_WORKERS:])
        assert not memory.claim() or prepared, "workers that have not loaded it read it"
        node.release()
        assert memory.claim()
    assert [worker.memory.own for worker in node.workers] == [None] * NUM_WORKERS


def test_one_worker_applies_the_changes_for_all(node: Node, prepared: list[Tensor]) -> None:
    node.send(node.version(0).whole)
    memory = node.workers[0].memory.for_node
    for number in (1, 2):
        node.release()
        assert errors(node.send(node.version(number).delta)) == [""] * NUM_WORKERS
        assert node.has(number, node.weight)
        assert not prepared or torch.equal(prepared[-1], node.weight)
    assert node.workers[0].memory.for_node is memory, "the memory is used again"
    assert [worker.memory.for_node for worker in node.workers[1:]] == [None, None]


@pytest.mark.parametrize("form", ["whole", "delta"])
def test_slow_worker_keeps_its_version_while_others_get_the_next(form: str) -> None:
    node = Node(None)
    node.send(node.version(0).whole)
    before = node.weight.clone()
    *others, slow = node.workers
    first = others[0].memory.for_node
    kept = node.version(1)
    assert errors(node.send(getattr(kept, form), epoch=2, to=others)) == ["", ""]
    assert torch.equal(staged(slow, 0), before)
    assert all(torch.equal(staged(other, 1), node.weight) for other in others)
    assert others[0].memory.for_node is not first
    node.close()


def test_base_survives_the_worker_that_received_it(node: Node, prepared: list[Tensor]) -> None:
    node.send(node.version(0).whole)
    node.release()
    node.workers.pop(0).free()
    assert errors(node.send(node.version(1).delta, epoch=2)) == ["", ""]
    assert node.has(1, node.weight)
    assert not prepared or torch.equal(prepared[-1], node.weight)
    node.release()
    assert errors(node.send(node.version(2).delta, epoch=2)) == ["", ""]
    assert node.has(2, node.weight)


@pytest.mark.parametrize("shares_next", [True, False])
def test_version_is_a_base_when_sharing_begins_or_ends(shares_next: bool) -> None:
    node = Node(None)
    del node.workers[1:]
    (worker,) = node.workers
    for number, shares in enumerate((not shares_next, shares_next)):
        kept = node.version(number)
        weights = kept.delta or kept.whole
        offer = node.offer(weights)
        if not shares:
            offer = replace(offer, copy_key="")
        worker.begin(offer)
        slots = [torch.zeros(BUCKET_BYTES, dtype=torch.uint8) for _ in range(2)]
        learner = replace(offer, rank=0)
        node.sender.send(slots, weights.source.fill, learner, is_cancelled=lambda: False)
        assert wait_for(worker).error == ""
        assert node.has(number, node.weight)
        node.release()
    assert (worker.memory.own is None, worker.memory.for_node is None) == (
        shares_next,
        not shares_next,
    )
    node.close()


def test_failure_of_the_receiver_cancels_the_other_workers(node: Node) -> None:
    node.send(node.version(0).whole)
    changes = node.version(1).delta
    assert changes is not None
    node.release()
    first, *others = node.send(replace(changes, digest="0" * 32))
    assert first.error.endswith("the digest of the whole differs; it must be sent whole")
    assert not first.is_cancelled
    for other in others:
        assert other.is_cancelled
        assert other.error == f"the worker that receives for this node: {first.error}"
    assert type(failure_of([first, *others])) is WeightSyncError
    assert type(failure_of(others)) is TransferCancelled
    whole = node.version(2).whole
    assert errors(node.send(whole, epoch=2)) == [""] * NUM_WORKERS
    assert node.has(2, node.weight)


def test_cancelled_offer_ends_at_every_worker(node: Node) -> None:
    node.send(node.version(0).whole)
    node.release()
    kept = node.version(1)
    offer = node.offer(kept.whole, epoch=2)
    for index, worker in enumerate(node.workers):
        worker.begin(offer.of_worker(index))
    for worker in node.workers:
        worker.give_up()
    assert all(wait_for(worker).is_cancelled for worker in node.workers)
    assert errors(node.send(kept.whole, epoch=3)) == [""] * NUM_WORKERS
    assert node.has(1, node.weight)


def test_engine_with_an_unreachable_copy_is_named() -> None:
    good = Staged(is_done=True)
    bad = replace(good, error="the memory cannot be opened", is_unreachable=True)
    assert type(failure_of([bad])) is CopyUnreachable
    late = replace(good, error="late")
    assert str(failure_of([bad, late])) == "the memory cannot be opened; late"
