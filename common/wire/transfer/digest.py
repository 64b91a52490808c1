"""Digests of byte buffers, with which a receiver checks a transfer."""

from typing import Any, cast

import torch
import xxhash
from torch import Tensor

DIGEST_BYTES = 16
HASHED_BYTES = 4 << 20  # Bytes per hashing call, since hashing holds the GIL.
ROW_WORDS = 4096  # Row length of the int64 matrix whose rows and columns a GPU sums.


def digest(buffer: Tensor) -> Tensor:
    """Return the digest [16] uint8 of `buffer` [num_bytes] uint8, on its device.

    On a CPU it is XXH3. On a GPU it is two wrapping 64-bit sums over the 64-bit words, one plain
    and one weighted by position, without synchronization. Neither is cryptographic.
    """
    if buffer.device.type != "cpu":
        return word_sums(buffer).view(torch.uint8)
    hashed = xxhash.xxh3_128()
    add_bytes(hashed, buffer)
    return torch.frombuffer(bytearray(hashed.digest()), dtype=torch.uint8)


def add_bytes(hashed: xxhash.xxh3_128, buffer: Tensor) -> None:
    """Add `buffer` [num_bytes] uint8 on a CPU to a digest, whose `hexdigest` is the `checksum`."""
    view = memoryview(cast(Any, buffer.numpy()))
    for start in range(0, len(view), HASHED_BYTES):
        hashed.update(view[start : start + HASHED_BYTES])


def word_sums(buffer: Tensor) -> Tensor:
    """Return the plain and the position-weighted sum [2] int64 of `buffer` [num_bytes] uint8.

    The words have 64 bits. A last word of fewer than 8 bytes is padded with zeros.
    """
    num_whole = buffer.numel() // 8 * 8
    words = buffer[:num_whole].view(torch.int64)
    if num_whole < buffer.numel():
        rest = buffer.new_zeros(8)
        rest[: buffer.numel() - num_whole] = buffer[num_whole:]
        words = torch.cat([words, rest.view(torch.int64)])
    num_rows = words.numel() // ROW_WORDS
    matrix = words[: num_rows * ROW_WORDS].view(num_rows, ROW_WORDS)
    tail = words[num_rows * ROW_WORDS :]
    position = torch.arange(max(ROW_WORDS, num_rows), device=buffer.device) + 1
    row_sums = matrix.sum(1)  # [rows]
    by_row = (row_sums * position[:num_rows]).sum() * ROW_WORDS
    by_column = (matrix.sum(0) * position[:ROW_WORDS]).sum()
    tail_place = position[: tail.numel()] + (num_rows + 1) * ROW_WORDS
    by_tail = (tail * tail_place).sum()
    return torch.stack([row_sums.sum() + tail.sum(), by_row + by_column + by_tail])


def hexadecimal(value: Tensor) -> str:
    """Return a digest [16] uint8 as hexadecimal text."""
    return bytes(cast(list[int], value.tolist())).hex()  # pyright: ignore[reportUnknownMemberType]


def checksum(buffer: Tensor) -> str:
    """Return the digest of `buffer` [num_bytes] uint8 as hexadecimal text."""
    return hexadecimal(digest(buffer))
