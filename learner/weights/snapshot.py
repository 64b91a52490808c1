"""A version of the policy as the weight plane carries it: one flat buffer, and how to check it."""

from collections.abc import Iterable, Iterator
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
    layout: Iterable[tuple[str, Tensor]] | None = None,
    canary_token_ids: list[list[int]],
    canary_logprobs: list[list[float]],
    canary_masks: list[list[bool]] | None = None,
) -> PublishedWeights:
    """Return a copy of the policy's tensors, ready to be sent while training goes on.

    Canaries as in `PublishedWeights`; without masks all tokens are compared. They should leave out
    what no policy sampled: its logprobs are huge, and rounding of huge numbers says little.

    Args:
        layout: names, shapes and types of the tensors in their order (meta tensors will do). With
            it the tensors may come one by one, and are never all there beside the copy.
    """
    if layout is None:
        layout = tensors = list(tensors)
    specs, num_bytes = lay_out(layout)
    stream = (tensor for _, tensor in tensors)
    first = next(stream)
    buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=first.device)
    all_of_them = _preceded(first, stream)
    del first  # the largest, as a rule
    flatten_into(buffer, specs, all_of_them)
    return PublishedWeights(
        version=version,
        buffer=buffer,
        tensors=specs,
        checksum=checksum(buffer),
        canary_token_ids=canary_token_ids,
        canary_logprobs=canary_logprobs,
        canary_masks=canary_masks or [[True] * len(row) for row in canary_logprobs],
    )


def _preceded(first: Tensor, rest: Iterator[Tensor]) -> Iterator[Tensor]:
    yield first
    del first  # which `itertools.chain` would keep to the end
    yield from rest
