"""A version of the policy as the weight plane carries it: where its bytes are, how to check it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from common.wire.weight_messages import TensorSpec
from learner.weights.source import LiveWeights, WeightSource, copied


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedWeights:
    """One version, and the canaries by which an engine shows that it has it.

    Canaries should leave out what no policy sampled: its logprobs are huge, and rounding of huge
    numbers says little.
    """

    version: int
    source: WeightSource
    canary_token_ids: list[list[int]] = field(default_factory=list)
    canary_logprobs: list[list[float]] = field(default_factory=list)  # [canary, seq-1] nats, ours
    canary_masks: list[list[bool]] = field(default_factory=list)  # [canary, seq-1]; none: all True

    @property
    def tensors(self) -> list[TensorSpec]:
        """Where each tensor lies in the flat bytes."""
        return self.source.specs

    @property
    def masks(self) -> list[list[bool]]:
        """Return True on the canaries' tokens to compare, [canary, seq-1]."""
        return self.canary_masks or [[True] * len(row) for row in self.canary_logprobs]


def snapshot(
    version: int,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    canary_token_ids: list[list[int]],
    canary_logprobs: list[list[float]],
) -> PublishedWeights:
    """Return a version that is a copy of named tensors, as they are."""
    return PublishedWeights(
        version=version,
        source=copied(LiveWeights(tensors, None)),
        canary_token_ids=canary_token_ids,
        canary_logprobs=canary_logprobs,
    )
