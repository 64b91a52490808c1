"""Digests of byte buffers, with which a receiver checks a transfer."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import torch
import xxhash
from torch import Tensor

from common.host.cgroups import num_cores

DIGEST_BYTES = 16
PIECE_BYTES = 16 << 20  # A thread checks this many bytes of a version at a time.
MAX_THREADS = 4  # Threads that check a version, at most one for each core.
ROW_WORDS = 4096  # Row length of the int64 matrix whose rows and columns a GPU sums.


def digest(buffer: Tensor) -> Tensor:
    """Return the digest [16] uint8 of `buffer` [num_bytes] uint8, on its device.

    On a CPU it is XXH3. On a GPU it is two wrapping 64-bit sums over the 64-bit words, one plain
    and one weighted by position, without synchronization. Neither is cryptographic.
    """
    if buffer.device.type != "cpu":
        return word_sums(buffer).view(torch.uint8)
    return torch.frombuffer(bytearray(xxhash.xxh3_128_digest(bytes_of(buffer))), dtype=torch.uint8)


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


class Checksum:
    """The checksum of bytes that come in order: XXH3 of the XXH3 digests of pieces.

    Threads can hash the pieces of a complete buffer at the same time: see `checksum`.
    """

    def __init__(self) -> None:
        self._pieces: list[xxhash.xxh3_128] = []
        self._num_bytes = 0

    def update(self, view: memoryview) -> None:
        """Add the next bytes."""
        while view:
            num_begun = self._num_bytes % PIECE_BYTES
            if num_begun == 0:
                self._pieces.append(xxhash.xxh3_128())
            part = view[: PIECE_BYTES - num_begun]
            self._pieces[-1].update(part)
            self._num_bytes += len(part)
            view = view[len(part) :]

    def text(self) -> str:
        """Return the checksum of all bytes so far, as hexadecimal text."""
        return _joined(each.digest() for each in self._pieces)


def checksum(buffer: Tensor) -> str:
    """Return the `Checksum` of `buffer` [num_bytes] uint8 on a CPU. Several threads compute it."""
    view = bytes_of(buffer)
    pieces = [view[at : at + PIECE_BYTES] for at in range(0, len(view), PIECE_BYTES)]
    with ThreadPoolExecutor(min(MAX_THREADS, num_cores())) as threads:
        return _joined(threads.map(xxhash.xxh3_128_digest, pieces))


def bytes_of(buffer: Tensor) -> memoryview:
    """Return the bytes of `buffer` [num_bytes] uint8 on a CPU, without a copy."""
    return memoryview(cast(Any, buffer.numpy()))


def _joined(digests: Iterable[bytes]) -> str:
    return xxhash.xxh3_128_hexdigest(b"".join(digests))
