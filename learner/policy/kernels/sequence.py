"""Exchanges between the ranks that compute one packed row together.

Outside attention each rank has the tokens of its part of the row. Within attention it has all
tokens of the row for its share of the heads. The log-probabilities of all parts are then gathered,
and each rank computes the loss of the whole row from them.

No gradient is scaled here. Every rank has the same loss, whose gradient at an entry is used once,
by the rank that computed the entry. The sum over the ranks is therefore the gradient of the row.

Source: DeepSpeed-Ulysses, arXiv:2309.14509.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from common.errors import ConfigError
from learner.batch.batching import Places


def gather_entries(
    entries: Tensor | None, places: Places, group: dist.ProcessGroup
) -> Tensor | None:
    """Return the entries [entry, ...] of all ranks, from this rank's own ones; None for None."""
    return (
        None
        if entries is None
        else _gathered(entries, places.most, group).index_select(0, places.at)
    )


def gather_positions(rows: Tensor, num_tokens: int, group: dist.ProcessGroup) -> Tensor:
    """Return the rows [num_tokens, ...] of all positions, from those of this rank's part."""
    return _gathered(rows, len(rows), group)[:num_tokens]


def gather_row(rows: Tensor, group: dist.ProcessGroup, num_tokens: int) -> Tensor:
    """Return a row [1, num_tokens, ...] for a layer that reads all of it, from this rank's part.

    Each rank computes other outputs of the layer, so the gradients of all ranks are added.
    """
    row = _Spread.apply(rows, group)
    assert isinstance(row, Tensor)
    return row[:, :num_tokens]


def _gathered(rows: Tensor, most: int, group: dist.ProcessGroup) -> Tensor:
    gathered = _Gathered.apply(rows, most, group)
    assert isinstance(gathered, Tensor)
    return gathered


def heads_of_row(rows: Tensor, group: dist.ProcessGroup, num_tokens: int) -> Tensor:
    """Return this rank's share of the heads for all tokens, [1, head / rank, num_tokens, size].

    Args:
        rows: [1, head, seq, size], all heads for the tokens of this rank.

    Raises: ConfigError: the heads cannot be divided.
    """
    num_ranks = group.size()
    _, heads, width, size = rows.shape
    if heads % num_ranks:
        raise ConfigError(heads_problem(heads, num_ranks))
    parts = rows[0].reshape(num_ranks, heads // num_ranks, width, size).transpose(1, 2)
    exchanged = _exchange(parts, group).reshape(num_ranks * width, heads // num_ranks, size)
    return exchanged[:num_tokens].transpose(0, 1)[None]


def rows_of_heads(heads: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return all heads for the tokens of this rank, [1, seq, head, size].

    Args:
        heads: [1, num_tokens, head / rank, size], this rank's share of the heads for all tokens.
    """
    num_ranks = group.size()
    _, num_tokens, share, size = heads.shape
    width = -(-num_tokens // num_ranks)
    filled = F.pad(heads[0], (0, 0, 0, 0, 0, num_ranks * width - num_tokens))
    exchanged = _exchange(filled.view(num_ranks, width, share, size), group)
    return exchanged.transpose(0, 1).reshape(1, width, num_ranks * share, size)


def repeated_heads(rows: Tensor, num_ranks: int) -> Tensor:
    """Return the heads [1, kv_head, seq, size], each as often as `num_ranks` ranks need it."""
    times = num_ranks // math.gcd(rows.shape[1], num_ranks)
    return rows.repeat_interleave(times, 1) if times > 1 else rows


def heads_problem(num_heads: int, num_ranks: int) -> str:
    """Return the message for a number of attention heads that ranks cannot divide."""
    return (
        f"learner.sequence_ranks={num_ranks}: the model has {num_heads} attention heads, which is"
        f" no multiple of it. Use a divisor of {num_heads}"
    )


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send one part [rank, ...] to each rank; return the parts from all ranks."""
    exchanged = _Exchanged.apply(parts, group)
    assert isinstance(exchanged, Tensor)
    return exchanged


class _Exchanged(torch.autograd.Function):
    """All-to-all of equal parts. The gradient of a part returns to its sender."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _all_to_all(gradient, ctx.group), None


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


class _Gathered(torch.autograd.Function):
    """All-gather of entries. Each rank keeps the gradient of its own entries only."""

    @staticmethod
    def forward(ctx: Any, entries: Tensor, most: int, group: dist.ProcessGroup) -> Tensor:
        """Return [rank * most, ...]; each rank's entries are filled to `most`."""
        ctx.kept = slice(group.rank() * most, group.rank() * most + len(entries))
        sent = entries.new_zeros(most, *entries.shape[1:])
        sent[: len(entries)] = entries
        gathered = [torch.empty_like(sent) for _ in range(group.size())]
        dist.all_gather(gathered, sent, group=group)
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient[ctx.kept], None, None


class _Spread(torch.autograd.Function):
    """All-gather of adjacent parts. The gradient of a part is the sum over all ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return [1, rank * seq, ...]."""
        ctx.group = group
        ctx.width = rows.shape[1]
        sent = rows.contiguous()
        gathered = [torch.empty_like(sent) for _ in range(group.size())]
        dist.all_gather(gathered, sent, group=group)
        return torch.cat(gathered, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        first = ctx.group.rank() * ctx.width
        return total[:, first : first + ctx.width], None
