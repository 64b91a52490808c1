"""Laws of packed changes: they lead to the exact version, and few changes take few bytes."""

import pytest
import torch
from torch import Tensor

from common.errors import WeightSyncError
from common.weights.buckets import word_sums
from common.weights.delta import CHUNK_WORDS, DeltaPacker, apply_delta, digest_of_whole, sums_text

HEADER = 16


def flat(numbers: list[int]) -> Tensor:
    """Return 16-bit entries as bytes."""
    return torch.tensor(numbers, dtype=torch.int16).view(torch.uint8)


def changes_of(old: Tensor, new: Tensor, *, step: int = 1 << 30) -> tuple[DeltaPacker, Tensor]:
    """Return the packer of all changes, added in parts, and the updated copy."""
    packer = DeltaPacker(new.numel(), max_bytes=2 * new.numel() + 1_000)
    copy = old.clone()
    for start in range(0, new.numel(), step):
        packer.add(new[start : start + step], copy[start : start + step])
    return packer, copy


def random_entries(num: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 15), 1 << 15, (num,), dtype=torch.int16, generator=generator)


def test_packed_bytes_are_those_computed_by_hand() -> None:
    old = flat([5, 5, 5, 5, 7, 7, 7, 7])
    new = flat([5, 5, 5, 5, 8, 6, 7, 300])
    packer, copy = changes_of(old, new)
    # One changed word, one entry with a value: word 1 of the mask; codes 1, 3, 0, 2 of two bits.
    numbers = torch.tensor([1, 1]).view(torch.uint8).tolist()
    mask = [0b10]
    codes = [1 + 3 * 4 + 0 * 16 + 2 * 64]
    values = [300 % 256, 300 // 256]
    padding = [0] * 14
    assert packer.packed().tolist() == [*numbers, *mask, *codes, *padding, *values, *padding]
    assert packer.changed_frac == 3 / 8
    assert torch.equal(copy, new)


@pytest.mark.parametrize("num_words", [2, 8, 1_000, CHUNK_WORDS + 6])
@pytest.mark.parametrize("step", [64, 1 << 30])
def test_applied_changes_give_exactly_the_new_version(num_words: int, step: int) -> None:
    if num_words > 1_000 and step == 64:
        step = 8 * CHUNK_WORDS // 2
    old = random_entries(4 * num_words, seed=1)
    steps = random_entries(4 * num_words, seed=2) % 3 - 1  # Bit patterns wrap at their ends.
    new = old + steps
    far = random_entries(4 * num_words, seed=3)
    new = torch.where(far % 7 == 0, far, new)
    old[0], new[0] = -(1 << 15), (1 << 15) - 1
    packer, copy = changes_of(old.view(torch.uint8), new.view(torch.uint8), step=step)
    assert torch.equal(copy, new.view(torch.uint8))
    patched = old.view(torch.uint8).clone()
    apply_delta(patched, packer.packed(), words_at_a_time=512)
    assert torch.equal(patched.view(torch.int16), new)
    assert packer.changed_frac == (old != new).double().mean().item()


def test_sums_follow_from_the_changes_alone() -> None:
    old = random_entries(4 * CHUNK_WORDS + 64, seed=1).view(torch.uint8)
    new = random_entries(4 * CHUNK_WORDS + 64, seed=2).view(torch.uint8)
    packer, _ = changes_of(old, new, step=4 * CHUNK_WORDS)
    assert sums_text(packer.sums_after(word_sums(old))) == digest_of_whole(new)


def test_equal_versions_take_a_bit_for_each_word() -> None:
    same = random_entries(4 * 1_024, seed=1).view(torch.uint8)
    packer, _ = changes_of(same, same.clone())
    assert packer.packed().numel() == HEADER + 1_024 // 8
    assert packer.changed_frac == 0.0
    patched = same.clone()
    apply_delta(patched, packer.packed())
    assert torch.equal(patched, same)


def test_dense_changes_are_not_packed_and_the_copy_follows() -> None:
    num = 16 * CHUNK_WORDS
    old = random_entries(num, seed=1).view(torch.uint8)
    new = random_entries(num, seed=2).view(torch.uint8)
    packer = DeltaPacker(new.numel(), max_bytes=new.numel() // 2)
    packer.add(new, old)
    assert packer.is_dense
    assert torch.equal(old, new)


def test_changes_of_another_size_are_refused() -> None:
    packer, _ = changes_of(flat([0] * 16), flat([1] * 16))
    larger = torch.zeros(8 * 1_000, dtype=torch.uint8)
    with pytest.raises(WeightSyncError, match="do not belong to a version of 8000"):
        apply_delta(larger, packer.packed())
    assert not larger.any()


@pytest.mark.parametrize("num_words", [2, 8, 64])
def test_damaged_changes_are_refused(num_words: int) -> None:
    """Each damaged byte gives the error of the transfer, or a version with another digest."""
    old = random_entries(4 * num_words, seed=1).view(torch.uint8)
    new = random_entries(4 * num_words, seed=2).view(torch.uint8)
    packer, _ = changes_of(old, new)
    packed = packer.packed()
    num_refused = 0
    damaged = [packed[:length].clone() for length in range(len(packed))]
    for at in range(len(packed)):
        for value in (0, 1, 127, 128, 255):
            damaged.append(packed.clone())
            damaged[-1][at] = value
    for each in damaged:
        buffer = old.clone()
        try:
            apply_delta(buffer, each)
        except WeightSyncError:
            num_refused += 1
    assert num_refused > len(packed)


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ([-1, 0], "0 values for -1 words"),
        ([1, -4], "-4 values for 1 words"),
        ([1, 5], "5 values for 1 words"),
        ([1 << 62, 0], "do not belong to a version"),
    ],
)
def test_impossible_header_of_changes_is_refused(numbers: list[int], reason: str) -> None:
    packed = torch.zeros(64, dtype=torch.uint8)
    packed[:HEADER] = torch.tensor(numbers).view(torch.uint8)
    with pytest.raises(WeightSyncError, match=reason):
        apply_delta(flat([1, 2, 3, 4, 5, 6, 7, 8]), packed)
