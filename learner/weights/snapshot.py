"""A version of the policy for the weight plane: the source of its bytes, and its canaries."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from common.weights.messages import TensorSpec
from learner.weights.source import LiveWeights, WeightSource, copied


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedWeights:
    """One version, and the canaries that show whether an engine has loaded it.

    Canaries should leave out tokens that no policy sampled. Their logprobs have a huge absolute
    value, so rounding errors dominate the difference.
    """

    version: int
    source: WeightSource
    # The version whose holders turn the source's bytes, which are changes, into this one; -1: the
    # source has the whole version.
    base: int = -1
    digest: str = ""  # Digest of the whole version for engines that keep a copy; "": none does.
    canary_token_ids: list[list[int]] = field(default_factory=list)
    # [canary, seq-1] nats, of the trainer.
    canary_logprobs: list[list[float]] = field(default_factory=list)
    # [canary, seq-1]; empty: all True.
    canary_masks: list[list[bool]] = field(default_factory=list)

    @property
    def tensors(self) -> list[TensorSpec]:
        """Position of each tensor in the flat bytes."""
        return self.source.specs

    @property
    def masks(self) -> list[list[bool]]:
        """Return True on the canary tokens to compare, [canary, seq-1]."""
        return self.canary_masks or [[True] * len(row) for row in self.canary_logprobs]


def snapshot(
    version: int,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    canary_token_ids: list[list[int]],
    canary_logprobs: list[list[float]],
) -> PublishedWeights:
    """Return a version that is a copy of named tensors, in their own dtypes."""
    return PublishedWeights(
        version=version,
        source=copied(LiveWeights(tensors, None)),
        canary_token_ids=canary_token_ids,
        canary_logprobs=canary_logprobs,
    )
