"""Laws of digests: whatever changes on the way is seen, by a CPU and by what a GPU computes."""

import pytest
import torch
import xxhash
from torch import Tensor

from common.weights.digest import (
    PIECE_BYTES,
    ROW_WORDS,
    Checksum,
    bytes_of,
    checksum,
    digest,
    hexadecimal,
    word_sums,
)

MATRIX_BYTES = 8 * ROW_WORDS  # of one row


def random_bytes(num: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (num,), dtype=torch.uint8, generator=generator)


def sums(buffer: Tensor) -> str:
    """What a GPU computes."""
    return hexadecimal(word_sums(buffer).view(torch.uint8))


on_both = pytest.mark.parametrize("of", [checksum, sums], ids=["cpu", "gpu"])


@on_both
@pytest.mark.parametrize("num_bytes", [1, 16, 1_000, MATRIX_BYTES, 3 * MATRIX_BYTES + 24])
def test_flipped_bit_changes_the_digest_anywhere(of, num_bytes: int) -> None:
    buffer = random_bytes(num_bytes)
    before = of(buffer)
    for place in {0, num_bytes // 2, num_bytes - 1}:
        for bit in (0, 7):
            damaged = buffer.clone()
            damaged[place] ^= 1 << bit
            assert of(damaged) != before
    assert of(buffer.clone()) == before
    assert len(before) == 32


@on_both
@pytest.mark.parametrize(
    "places", [(0, 1), (0, ROW_WORDS), (5, ROW_WORDS + 5), (7, 2 * ROW_WORDS + 2)]
)
def test_swapped_words_change_the_digest(of, places: tuple[int, int]) -> None:
    words = torch.zeros(2 * ROW_WORDS + 4, dtype=torch.int64)
    words[list(places)] = torch.tensor([3, -7])
    before = of(words.view(torch.uint8))
    words[list(places)] = torch.tensor([-7, 3])
    assert of(words.view(torch.uint8)) != before


def test_word_sums_include_plain_and_positional_parts() -> None:
    words = torch.arange(2 * ROW_WORDS + 3)
    row, column = words // ROW_WORDS + 1, words % ROW_WORDS + 1
    expected = [int(words.sum()), int((words * (row * ROW_WORDS + column)).sum())]
    assert word_sums(words.view(torch.uint8)).tolist() == expected


def test_large_buffer_digest_equals_the_whole_hash() -> None:
    buffer = random_bytes((4 << 20) + 5)
    assert bytes(digest(buffer).tolist()) == xxhash.xxh3_128(buffer.numpy().tobytes()).digest()


@pytest.mark.parametrize("num_bytes", [0, 5, PIECE_BYTES, 2 * PIECE_BYTES + 5])
@pytest.mark.parametrize("step", [PIECE_BYTES // 3, PIECE_BYTES, 2 * PIECE_BYTES])
def test_checksum_in_parts_equals_that_of_the_whole(num_bytes: int, step: int) -> None:
    buffer = random_bytes(num_bytes)
    hashed = Checksum()
    for start in range(0, num_bytes, step):
        hashed.update(bytes_of(buffer[start : start + step]))
    assert hashed.text() == checksum(buffer)


def test_checksum_depends_on_each_piece_and_their_order() -> None:
    buffer = random_bytes(2 * PIECE_BYTES + 5)
    swapped = torch.cat([buffer[PIECE_BYTES : 2 * PIECE_BYTES], buffer[:PIECE_BYTES], buffer[-5:]])
    found = {checksum(buffer), checksum(swapped)}
    for place in (0, PIECE_BYTES, 2 * PIECE_BYTES + 4):
        damaged = buffer.clone()
        damaged[place] ^= 1
        found.add(checksum(damaged))
    assert len(found) == 5
