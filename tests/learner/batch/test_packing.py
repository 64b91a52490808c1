"""Laws of blocks: their sizes are few, whatever the lengths of the sequences."""

import numpy as np
import pytest

from learner.batch.batching import TokenBatch, collate_tokens, plan_microbatches
from learner.batch.packing import Packing, padded_width, rounded, row_size

MAX_TOKENS = 16_384


def packing_of(tokens: TokenBatch) -> Packing:
    assert tokens.packing is not None
    return tokens.packing


def random_blocks(num_batches: int, *, is_packed: bool = True) -> list[TokenBatch]:
    """Return the blocks of batches of 1 to 100 sequences of 2 to 4,000 tokens."""
    rng = np.random.default_rng(0)
    blocks = []
    for _ in range(num_batches):
        drawn = np.exp(rng.uniform(np.log(2), np.log(4_000), size=rng.integers(1, 101)))
        lengths = [int(each) for each in drawn]
        for block in plan_microbatches(lengths, max_tokens=MAX_TOKENS, is_packed=is_packed):
            own = [np.zeros(lengths[index], dtype=np.int64) for index in block]
            masks = [np.arange(len(each)) > 0 for each in own]
            blocks.append(collate_tokens(own, masks, device="cpu", is_packed=is_packed))
    return blocks


def test_random_batches_have_few_kernel_sizes() -> None:
    blocks = random_blocks(200)
    packings = [packing_of(each) for each in blocks]
    assert len({each.lengths for each in packings}) == len(blocks)  # No two blocks are alike.
    assert len(blocks) > 300
    assert len({each.token_ids.shape for each in blocks}) <= 72
    assert len({each.bounds.shape for each in packings}) <= 14
    assert len({each.key_bounds.shape for each in packings}) <= 14
    assert len({each.max_length for each in packings}) <= 26
    assert len({each.max_key_length for each in packings}) <= 26


def test_random_padded_batches_have_few_widths() -> None:
    blocks = random_blocks(200, is_packed=False)
    assert len(blocks) > 300
    assert all(each.token_ids.numel() <= MAX_TOKENS for each in blocks)
    # 31 up to 31, and 16 in each of the seven octaves up to 4,096.
    assert len({each.token_ids.shape[1] for each in blocks}) <= 31 + 7 * 16 + 1


def test_padded_widths_are_few_and_waste_little() -> None:
    widths = [padded_width(length) for length in range(1, 4_097)]
    assert widths[:31] == list(range(1, 32))
    assert len(set(widths)) == 31 + 7 * 16 + 1
    assert [padded_width(length) for length in (33, 130, 1_025)] == [34, 136, 1_088]
    assert all(size <= num * 17 / 16 for num, size in enumerate(widths, start=1))


def test_row_sizes_are_few_and_waste_little() -> None:
    sizes = [row_size(num) for num in range(1, 65_537)]
    # 16 up to 512, 8 up to 1,024, and 16 in each of the six octaves above.
    assert len(set(sizes)) == 16 + 8 + 6 * 16
    assert sizes == sorted(sizes)
    assert all(num <= size for num, size in enumerate(sizes, start=1))
    assert all(size <= num * 17 / 16 for num, size in enumerate(sizes, start=1) if num > 1_024)


@pytest.mark.parametrize(
    ("size", "steps", "expected"),
    [
        (1, 8, 128),
        (128, 8, 128),
        (129, 8, 256),
        (1_025, 8, 1_152),
        (2_049, 8, 2_304),
        (2_304, 8, 2_304),
        (4_097, 16, 4_352),
    ],
)
def test_sizes_are_rounded_to_few_steps(size: int, steps: int, expected: int) -> None:
    assert rounded(size, multiple=128, steps=steps) == expected


def test_empty_sequences_follow_the_last_one() -> None:
    own = [np.zeros(length, dtype=np.int64) for length in (10, 20)]
    tokens = collate_tokens(own, [np.arange(len(x)) > 0 for x in own], device="cpu", is_packed=True)
    packing = packing_of(tokens)
    assert packing.lengths == (10, 20, 2)
    assert packing.bounds.tolist() == [0, 10, 30, 32, 32, 32, 32, 32, 32]
    assert packing.key_bounds.tolist() == packing.bounds.tolist()
    assert (packing.max_length, packing.max_key_length) == (128, 128)
