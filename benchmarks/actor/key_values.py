"""Attention with a cache of keys and values, for rows of different lengths without padding."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "stored"
FIRST_POSITIONS = 256  # Initial capacity in positions. It is doubled when a row needs more.


@dataclass(frozen=True, slots=True)
class TokenBlock:
    """The new tokens to compute, by row."""

    rows: Tensor  # [token] index of the row
    columns: Tensor  # [token] index among the new tokens of its row
    positions: Tensor  # [token] position in its row
    mask: Tensor  # [row, 1, column, key] 0 or -inf

    @classmethod
    def of(cls, counts: Sequence[int], lengths: np.ndarray) -> "TokenBlock":
        """Return the block of `counts[row]` new tokens after the `lengths[row]` stored ones."""
        rows = np.repeat(np.arange(len(counts)), counts)
        columns = np.concatenate([np.arange(num) for num in counts])
        last = lengths[:, None] + np.arange(max(counts))  # [row, column]
        hidden = np.arange((lengths + counts).max()) > last[:, None, :, None]
        mask = np.where(hidden, np.float32(-np.inf), np.float32(0))
        return cls(*map(torch.from_numpy, (rows, columns, lengths[rows] + columns, mask)))


@dataclass(slots=True)
class KeyValues:
    """Keys and values of the tokens of each row, by layer: [row, head, position, size].

    A row's tokens are at its own positions 0, 1, ... Entries beyond `lengths` are never read.
    """

    num_rows: int
    lengths: np.ndarray = field(init=False)  # [row] tokens
    layers: dict[int, list[Tensor]] = field(default_factory=dict[int, list[Tensor]])

    def __post_init__(self) -> None:
        self.lengths = np.zeros(self.num_rows, dtype=np.int64)

    def drop(self, row: int) -> None:
        """Remove a row and move the last one to its place."""
        self.num_rows -= 1
        for pair in self.layers.values():
            for each in pair:
                each[row, :, : self.lengths[-1]] = each[self.num_rows, :, : self.lengths[-1]]
        self.lengths[row] = self.lengths[-1]
        self.lengths = self.lengths[:-1]

    def put(self, layer: int, block: TokenBlock, new: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Store the block's keys and values [token, head, size]; return all that its mask spans."""
        span = block.mask.shape[-1]
        pair = self.layers.setdefault(layer, [])
        for each in new if not pair else ():
            num_heads, size = each.shape[1:]
            pair.append(torch.zeros(self.num_rows, num_heads, max(span, FIRST_POSITIONS), size))
        for number, each in enumerate(pair):
            if (room := each.shape[2]) < span:
                pair[number] = F.pad(each, (0, 0, 0, max(span, 2 * room) - room))
            pair[number][block.rows, :, block.positions] = new[number]
        return [each[: self.num_rows, :, :span] for each in pair]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    stored: KeyValues,
    block: TokenBlock,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return attention [1, token, head, size] of the block's tokens to all earlier ones.

    Args:
        query: [1, head, token, size]; key and value have fewer heads, each shared by several of
            these.
    """
    _, num_heads, _, size = query.shape
    num_kept = key.shape[1]
    layer = module.layer_idx
    assert isinstance(layer, int)
    pairs = key[0].transpose(0, 1), value[0].transpose(0, 1)
    keys, values = stored.put(layer, block, pairs)
    num_rows, _, width, span = block.mask.shape
    asked = query.new_zeros(num_rows, width, num_heads, size)
    asked[block.rows, block.columns] = query[0].transpose(0, 1)
    # Query heads that share a key head are appended to its query dimension.
    share = num_heads // num_kept
    folded = asked.view(num_rows, width, num_kept, share, size).permute(0, 2, 3, 1, 4)
    mask = block.mask[:, :, None].expand(-1, -1, share, -1, -1)
    out = F.scaled_dot_product_attention(
        folded.reshape(num_rows, num_kept, share * width, size),
        keys,
        values,
        attn_mask=mask.reshape(num_rows, 1, share * width, span),
        scale=scaling,
    )
    found = out.view(num_rows, num_kept, share, width, size).permute(0, 3, 1, 2, 4)
    return found.reshape(num_rows, width, num_heads, size)[block.rows, block.columns][None], None


AttentionInterface.register(NAME, _attention)
