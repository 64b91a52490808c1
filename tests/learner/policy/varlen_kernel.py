"""Stands in for torch's kernel of packed attention, which exists on CUDA only."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from learner.policy.kernels import flash


class VarlenKernel:
    """Computes causal attention of packed sequences on a CPU, and records its calls."""

    def __init__(self) -> None:
        self.dtypes: list[set[torch.dtype]] = []  # Dtypes of query, key and value by call.
        self.heads: list[tuple[int, int]] = []  # Heads of queries and of keys by call.
        self.sizes: list[tuple[int, int, int, int]] = []  # Rows, bounds, and both upper bounds.
        self.windows: list[int] = []  # Keys before a query's own by call; -1: all.

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return [query, head, size]; as torch, refuse what the CUDA kernel refuses."""
        self.dtypes.append({query.dtype, key.dtype, value.dtype})
        self.heads.append((query.shape[1], key.shape[1]))
        self.sizes.append((len(query), len(cu_seq_q), max_q, max_k))
        self.windows.append(window_size[0])
        assert window_size[1] == 0
        assert query.shape[1] == key.shape[1] or enable_gqa
        assert query.shape[2] == key.shape[2] == value.shape[2]
        assert query.shape[2] % 8 == 0
        own = list(pairwise(cu_seq_q.tolist()))
        of_keys = list(pairwise(cu_seq_k.tolist()))
        assert max_q >= max(end - first for first, end in own)
        assert max_k >= max(end - first for first, end in of_keys)
        parts = [
            _causal(query[slice(*rows)], key[slice(*seen)], value[slice(*seen)], scale, window_size)
            for rows, seen in zip(own, of_keys, strict=True)
            if rows[0] < rows[1]
        ]
        return torch.cat(parts)


def _causal(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window_size: tuple[int, int]
) -> Tensor:
    q, k, v = (each.transpose(0, 1)[None] for each in (query, key, value))
    own = len(key) - len(query)
    mask = torch.ones(len(query), len(key), dtype=torch.bool).tril(own)
    if window_size[0] >= 0:
        mask = mask.triu(own - window_size[0])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def use_kernel(monkeypatch: pytest.MonkeyPatch, kernel: object) -> None:
    """Let the learner use a kernel where it would call torch's on CUDA."""
    monkeypatch.setattr(flash, "_device_problem", lambda device: "")
    monkeypatch.setattr(flash, "varlen_attn", kernel)
