"""Laws of sources: flat bytes are read live, in any cut, without a second copy."""

import pytest
import torch
from torch import Tensor

from common.weights.buckets import views
from learner.policy.finite import WeightsNotFinite
from learner.weights.source import CopiedWeights, LiveWeights, copied
from tests.learner.builders import tensors_of

NAMED = [
    ("matrix", torch.randn(7, 5)),
    ("vector", torch.randn(3)),
    ("index", torch.arange(6)),
    ("transposed", torch.randn(4, 6).T),
    ("scalar", torch.tensor(2.5)),
]


def read(source: LiveWeights | CopiedWeights, bucket_bytes: int) -> Tensor:
    buffer = torch.zeros(source.total_bytes, dtype=torch.uint8)
    for start in range(0, source.total_bytes, bucket_bytes):
        source.fill(start, buffer[start : start + bucket_bytes])
    return buffer


@pytest.mark.parametrize("bucket_bytes", [16, 48, 1_000_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, None])
def test_every_cut_gives_the_same_tensors_cast_once(
    bucket_bytes: int, dtype: torch.dtype | None
) -> None:
    source = LiveWeights(NAMED, dtype)
    found = dict(views(read(source, bucket_bytes), source.specs))
    assert list(found) == [name for name, _ in NAMED]
    for name, tensor in NAMED:
        wanted = tensor if dtype is None or name == "index" else tensor.to(dtype)
        assert found[name].dtype == wanted.dtype
        assert torch.equal(found[name], wanted)


def test_live_source_follows_the_weights_and_a_copy_does_not() -> None:
    weight = torch.zeros(4)
    live = LiveWeights([("w", weight)], torch.float32)
    copy = copied(live)
    weight += 1
    assert tensors_of(live)["w"].tolist() == [1.0] * 4
    assert tensors_of(copy)["w"].tolist() == [0.0] * 4
    assert live.is_live
    assert not copy.is_live


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e6])
@pytest.mark.parametrize("bucket_bytes", [16, 48, 1_000_000])
def test_non_finite_weights_are_named(bad: float, bucket_bytes: int) -> None:
    weight = torch.randn(7, 5)
    weight[3, 2] = bad
    source = LiveWeights([("good", torch.randn(9)), ("bad", weight)], torch.float16)
    with pytest.raises(WeightsNotFinite, match=r"^bad has NaN or infinite values"):
        read(source, bucket_bytes)
    with pytest.raises(WeightsNotFinite, match=r"^bad"):
        copied(source)


def test_filling_a_part_allocates_no_memory() -> None:
    weight = torch.zeros(1 << 20)
    source = LiveWeights([("w", weight)], torch.bfloat16)
    part = torch.zeros(1 << 20, dtype=torch.uint8)
    with torch.profiler.profile(profile_memory=True) as profile:
        source.fill(1 << 20, part)
    allocated = sum(max(0, each.cpu_memory_usage) for each in profile.events() or [])
    assert allocated < 10_000
