"""A version of the policy as the weight plane carries it: one flat buffer, and how to check it."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from common.wire.collective import checksum, flatten_into, lay_out
from common.wire.weight_messages import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedWeights:
    """One version, flat, and what both sides need to check it."""

    version: int
    buffer: Tensor  # [num_bytes] uint8
    tensors: list[TensorSpec]
    checksum: str
    canary_token_ids: list[list[int]]
    canary_logprobs: list[list[float]]  # [canary, seq-1] nats by the trainer, same weights
    canary_masks: list[list[bool]]  # [canary, seq-1] True on the tokens to compare


def snapshot(
    version: int,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    canary_token_ids: list[list[int]],
    canary_logprobs: list[list[float]],
    canary_masks: list[list[bool]] | None = None,
) -> PublishedWeights:
    """Return a copy of the policy's tensors, ready to be sent while training goes on.

    Canaries as in `PublishedWeights`; without masks all tokens are compared. They should leave out
    what no policy sampled: its logprobs are huge, and rounding of huge numbers says little.
    """
    named = list(tensors)
    specs, num_bytes = lay_out(named)
    buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=named[0][1].device)
    flatten_into(buffer, specs, (tensor for _, tensor in named))
    return PublishedWeights(
        version=version,
        buffer=buffer,
        tensors=specs,
        checksum=checksum(buffer),
        canary_token_ids=canary_token_ids,
        canary_logprobs=canary_logprobs,
        canary_masks=canary_masks or [[True] * len(row) for row in canary_logprobs],
    )
