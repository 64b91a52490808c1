"""Laws of a worker's staging that receives changes: its copy is always one exact version."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from actor.weights.stage import Staged, Staging
from common.weights.buckets import CPU
from common.weights.messages import WeightsOffer
from common.weights.transport import WeightGroup
from learner.weights.source import KeptVersion, LiveWeights, PublishedWeights, VersionKeeper
from tests.common.weights.meeting import Meeting

TIMEOUT_S = 20.0
BUCKET_BYTES = 4_096
NUM = 50_000


class Bench:
    """A learner's weights, and one worker that receives them."""

    def __init__(self, prepare: Callable[[Iterable[tuple[str, Tensor]]], None] | None) -> None:
        torch.manual_seed(0)
        self.weight = torch.randn(NUM).to(torch.bfloat16)
        self.keeper = VersionKeeper()
        self.meeting = Meeting()
        self.sender = WeightGroup()
        self.staging = Staging(CPU, prepare)

    def version(self, number: int) -> KeptVersion:
        """Move some numbers to the next bit pattern, and return the result as a version."""
        self.weight.view(torch.int16)[number::100] += 1
        source = LiveWeights([("w", self.weight)], None)
        return self.keeper.keep(PublishedWeights(version=number, source=source))

    def offer(self, weights: PublishedWeights, *, epoch: int, rank: int) -> WeightsOffer:
        return WeightsOffer(
            version=weights.version,
            group_epoch=epoch,
            rank=rank,
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
        )

    def send(self, weights: PublishedWeights | None, *, epoch: int = 1) -> Staged:
        """Offer and send a version; return the worker's state at the end."""
        assert weights is not None
        self.staging.begin(self.offer(weights, epoch=epoch, rank=1))
        slots = [torch.zeros(BUCKET_BYTES, dtype=torch.uint8) for _ in range(2)]
        ours = self.offer(weights, epoch=epoch, rank=0)
        self.sender.send(slots, weights.source.fill, ours, is_cancelled=lambda: False)
        return self.wait()

    def wait(self) -> Staged:
        deadline = time.monotonic() + TIMEOUT_S
        while not self.staging.state().is_done:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return self.staging.state()

    def staged(self, version: int) -> Tensor:
        return next(self.staging.tensors(version))[1]

    def close(self) -> None:
        self.staging.leave()
        self.sender.leave()
        self.meeting.close()


@pytest.fixture
def prepared() -> list[Tensor]:
    """Copies of the tensors that the worker prepared."""
    return []


@pytest.fixture(params=[False, True], ids=["loads", "prepares"])
def bench(request: pytest.FixtureRequest, prepared: list[Tensor]) -> Iterator[Bench]:
    def prepare(tensors: Iterable[tuple[str, Tensor]]) -> None:
        prepared.extend(tensor.clone() for _, tensor in tensors)

    bench = Bench(prepare if request.param else None)
    yield bench
    bench.close()


def test_repeated_changes_are_applied_once(bench: Bench, prepared: list[Tensor]) -> None:
    assert bench.send(bench.version(0).whole).error == ""
    first = bench.version(1).delta
    assert bench.send(first).error == ""
    assert torch.equal(bench.staged(1), bench.weight)
    # The learner has lost another engine of the group, and offers the version again.
    assert bench.send(first, epoch=2).error == ""
    assert torch.equal(bench.staged(1), bench.weight)
    assert bench.send(bench.version(2).delta, epoch=2).error == ""
    assert torch.equal(bench.staged(2), bench.weight)
    assert not prepared or torch.equal(prepared[-1], bench.weight)


def test_cancelled_changes_leave_the_copy_as_it_was(bench: Bench) -> None:
    assert bench.send(bench.version(0).whole).error == ""
    first = bench.version(1).delta
    assert first is not None
    bench.staging.begin(bench.offer(first, epoch=2, rank=1))
    bench.staging.give_up()
    assert bench.wait().is_cancelled
    assert bench.send(first, epoch=3).error == ""
    assert torch.equal(bench.staged(1), bench.weight)


def test_changes_since_a_version_not_held_are_refused(bench: Bench) -> None:
    assert bench.send(bench.version(0).whole).error == ""
    bench.version(1)
    second = bench.version(2)
    assert second.delta is not None
    bench.staging.begin(bench.offer(second.delta, epoch=1, rank=1))
    assert bench.wait().error == (
        "version 2 arrives as a delta to 1, but the copy of this worker has version 0; it needs"
        " the whole version"
    )
    assert bench.send(second.whole).error == ""
    assert bench.send(bench.version(3).delta).error == ""
    assert torch.equal(bench.staged(3), bench.weight)


def test_copy_without_the_sent_digest_is_dropped(bench: Bench) -> None:
    assert bench.send(bench.version(0).whole).error == ""
    copy = bench.staging.memory.own
    assert copy is not None
    copy.buffer[-1] ^= 4
    state = bench.send(bench.version(1).delta)
    assert state.error.endswith("the digest of the whole differs; it must be sent whole")
    assert copy.version == -1
    assert bench.send(bench.version(2).whole).error == ""
    assert torch.equal(bench.staged(2), bench.weight)


def test_version_without_a_digest_is_no_base(bench: Bench) -> None:
    """Full versions leave a worker's memory as before: it is freed or overwritten."""
    assert bench.send(replace(bench.version(0).whole, digest="")).error == ""
    copy = bench.staging.memory.own
    assert copy is not None
    assert copy.version == -1
