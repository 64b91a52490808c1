"""The delta between two versions. Most changes of an update are one step of a number.

A word has 8 bytes and is a block of four entries of 16 bits. The packed bytes are, in order:
    header  two int64: the number of changed words, and of entries with a value of their own
    mask    one bit for each word of the version: the word has changed
    codes   one byte for each changed word, with two bits for each entry: 0 the same, 1 the next
            bit pattern, 3 the one before, 2 another one
    values  int16: the bits of the entries with code 2
The codes and the whole are padded to multiples of 16 bytes.
"""

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.errors import WeightSyncError
from common.weights.buckets import ROW_WORDS, hexadecimal, word_sums

HEADER_BYTES = 16
ALIGN_BYTES = 16
WORD_BYTES = 8
ENTRIES = 4  # Entries of a word.
# Words that are compared or patched at a time. Half as many cost 10 to 30 % more CPU time for the
# calls of numpy. Twice as many save little.
CHUNK_WORDS = 1 << 17
PATCHED_WORDS = 1 << 22
FAR = 2  # Code of an entry with a value of its own.

Words = NDArray[np.int64]
# Scalars with the type of their array, since numpy converts a Python number in each call.
_FAR = np.int16(FAR)
_LOW_BITS = np.uint8(3)
# The product with a word's four codes in bytes has them side by side in its top byte.
_GATHER = np.uint32((1 << 24) + (1 << 18) + (1 << 12) + (1 << 6))
_TOP_BYTE = np.uint32(24)  # Shift of the top byte.


class DeltaPacker:
    """Packs the changes of a version against a copy of the one before, and updates the copy.

    It stops to pack when the changes are larger than `max_bytes`, and still updates the copy.
    """

    def __init__(self, total_bytes: int, *, max_bytes: int) -> None:
        """Start to compare a version of `total_bytes`, a multiple of 16."""
        self._num_words = total_bytes // WORD_BYTES
        self._max_bytes = max_bytes
        self._masks: list[NDArray[np.uint8]] = []
        self._codes: list[NDArray[np.uint8]] = []
        self._values: list[NDArray[np.int16]] = []
        self._num_bytes = HEADER_BYTES + -(-self._num_words // 8) + 2 * ALIGN_BYTES
        self._num_compared = 0
        self._num_changed = 0  # Entries.
        # Differences of the two sums of the whole version; see `word_sums`.
        self._sums = np.zeros(2, dtype=np.int64)

    @property
    def is_dense(self) -> bool:
        """True if the changes are larger than `max_bytes`."""
        return self._num_bytes > self._max_bytes

    @property
    def changed_frac(self) -> float:
        """The share of the compared entries that have changed."""
        return self._num_changed / max(ENTRIES * self._num_compared, 1)

    def add(self, new: Tensor, copy: Tensor) -> None:
        """Compare the next bytes of the version with those of the copy, both [num_bytes] uint8.

        The number of bytes is a multiple of 64, except for the last ones. Chunks are compared with
        numpy, whose search for set flags is four times faster than torch's on a CPU.
        """
        ours = _words(new)
        theirs = _words(copy)
        for first in range(0, len(ours), CHUNK_WORDS):
            part = slice(first, first + CHUNK_WORDS)
            if self.is_dense:
                theirs[part] = ours[part]
            else:
                self._add(ours[part], theirs[part])

    def _add(self, new: Words, copy: Words) -> None:
        """Record the changed words of a part, and copy them to the kept version."""
        is_changed = new != copy
        rows = np.flatnonzero(is_changed)
        values = new.take(rows)
        before = copy.take(rows)
        copy[rows] = values
        steps = values.view(np.int16) - before.view(np.int16)
        np.clip(steps, -_FAR, _FAR, out=steps)
        entries = steps.astype(np.uint8)
        entries &= _LOW_BITS  # Two's complement: -2 and 2 give 2, -1 gives 3.
        gathered = entries.view(np.uint32) * _GATHER
        gathered >>= _TOP_BYTE
        # Few words have such an entry. A search among words is shorter than one among entries.
        is_far = (entries == FAR).view(np.uint32)
        has_far = np.flatnonzero(is_far != 0)
        far_rows = np.flatnonzero(is_far.take(has_far).view(np.bool_))
        far = values.take(has_far).view(np.int16).take(far_rows)
        self._masks.append(np.packbits(is_changed, bitorder="little"))
        self._codes.append(gathered.astype(np.uint8))
        self._values.append(far)
        values -= before  # The changes.
        first = self._num_compared + ROW_WORDS + 1  # Position of the first word in `word_sums`.
        total = values.sum(keepdims=True)
        self._sums += np.concatenate([total, first * total + np.dot(values, rows)])
        self._num_compared += len(new)
        self._num_changed += int(np.count_nonzero(entries))
        self._num_bytes += len(rows) + 2 * len(far)

    def packed(self) -> Tensor:
        """Return the packed changes [num_bytes] uint8, after all bytes were added."""
        assert self._num_compared == self._num_words
        assert not self.is_dense
        numbers = [sum(map(len, self._codes)), sum(map(len, self._values))]
        parts = [np.array(numbers, dtype=np.int64).view(np.uint8), *self._masks, *self._codes]
        parts.append(_padding(sum(map(len, parts))))
        parts += [each.view(np.uint8) for each in self._values]
        parts.append(_padding(sum(map(len, parts))))
        return torch.from_numpy(np.concatenate(parts))  # pyright: ignore

    def sums_after(self, sums: Tensor) -> Tensor:
        """Return the sums [2] int64 of the version, given those of the version before."""
        return torch.from_numpy(sums.numpy() + self._sums)  # pyright: ignore


def apply_delta(buffer: Tensor, packed: Tensor, *, words_at_a_time: int = PATCHED_WORDS) -> None:
    """Turn a version [total_bytes] uint8 into the next one, in place, on any device.

    Args:
        words_at_a_time: a multiple of 8, which bounds the temporary memory.

    Raises: WeightSyncError: the bytes are no changes, or those of a version with another size. The
        buffer may then have a part of them.
    """
    words = buffer.view(torch.int64)
    codes_at = HEADER_BYTES + -(-words.numel() // 8)
    num_changed, num_far = _header_of(packed)
    values_at = _aligned(codes_at + num_changed)
    if packed.numel() != _aligned(values_at + 2 * num_far):
        raise WeightSyncError(
            f"{packed.numel()} bytes of changes do not belong to a version of {buffer.numel()}"
        )
    mask = packed[HEADER_BYTES:codes_at]
    codes = packed[codes_at : codes_at + num_changed]
    values = packed[values_at : values_at + 2 * num_far].view(torch.int16)
    for first in range(0, words.numel(), words_at_a_time):
        part = words[first : first + words_at_a_time]
        bits = mask[first // 8 : -(-(first + part.numel()) // 8)]
        rows = _unpacked(bits, width=1).view(-1).nonzero().squeeze(1)
        if rows.numel() > codes.numel() or (rows.numel() and int(rows[-1]) >= part.numel()):
            raise WeightSyncError("damaged changes: their mask has more words than their header")
        entries = part[rows].view(torch.int16).view(-1, ENTRIES)
        steps = _unpacked(codes[: rows.numel()], width=2)
        entries += (steps == 1).to(torch.int16) - (steps == 3).to(torch.int16)
        is_far = steps == FAR
        num_values = int(is_far.sum())
        if num_values > values.numel():
            raise WeightSyncError("damaged changes: they lack values of their codes")
        entries[is_far] = values[:num_values]
        part[rows] = entries.view(torch.int64).squeeze(1)
        codes = codes[rows.numel() :]
        values = values[num_values:]
    if codes.numel() or values.numel():
        raise WeightSyncError("damaged changes: their mask has fewer words than their header")


def _header_of(packed: Tensor) -> tuple[int, int]:
    """Return the numbers of changed words and of values. Raises: WeightSyncError: impossible."""
    if packed.numel() < HEADER_BYTES:
        raise WeightSyncError(f"damaged changes: {packed.numel()} bytes have no header")
    header = cast(list[int], packed[:HEADER_BYTES].view(torch.int64).tolist())  # pyright: ignore
    num_changed, num_far = header
    if not 0 <= num_far <= ENTRIES * num_changed:
        raise WeightSyncError(f"damaged changes: {num_far} values for {num_changed} words")
    return num_changed, num_far


def digest_of_whole(buffer: Tensor) -> str:
    """Return the digest of a whole version [total_bytes] uint8, the same on every device."""
    return sums_text(word_sums(buffer))


def sums_text(sums: Tensor) -> str:
    """Return two sums [2] int64 as the text of a digest."""
    return hexadecimal(sums.cpu().view(torch.uint8))


def _words(buffer: Tensor) -> Words:
    """Return a buffer as 64-bit words."""
    return cast(Any, buffer.view(torch.int64)).numpy()


def _unpacked(packed: Tensor, *, width: int) -> Tensor:
    """Return the numbers of `width` bits [num_bytes, 8 / width] of bytes, lowest bits first."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(1) >> shifts) & ((1 << width) - 1)


def _aligned(num_bytes: int) -> int:
    """Return a size rounded up to whole alignment units."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _padding(num_bytes: int) -> NDArray[np.uint8]:
    """Return the zeros that fill a buffer up to the alignment."""
    return np.zeros(_aligned(num_bytes) - num_bytes, dtype=np.uint8)
