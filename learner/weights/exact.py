"""The numbers of a version: those that the learner's forward pass uses, in the engines' dtype.

A pass in bf16 rounds its weights, so an engine in fp32 receives rounded numbers, too. Otherwise it
would follow updates that the pass does not see. An engine in a coarser dtype than the pass rounds
once more. Some tensors stay in fp32, although the engines' dtype is bf16 or fp16.

vLLM (0.32) keeps some tensors in fp32 in every engine: the weights of many routers, the correction
of their choice, and the decay rates and convolutions of recurrent layers. An engine casts those
that it keeps in its own dtype, as from a checkpoint in fp32.
"""

import torch
from transformers import PreTrainedModel

from learner.policy.lora import adapts_experts, has_adapters
from learner.policy.merging import Merged
from learner.policy.model import published_tensors
from learner.policy.precision import exact_names, rounded_names
from learner.weights.source import Gathering, LiveWeights


def policy_weights(
    model: PreTrainedModel,
    dtype: torch.dtype,
    *,
    is_bf16: bool = False,
    gathering: Gathering | None = None,
) -> LiveWeights:
    """Return a policy's tensors as engines of this dtype receive them.

    Args:
        is_bf16: the learner's forward pass computes in bf16.

    Raises: ConfigError: as `published_tensors`.
    """
    named = list(published_tensors(model, is_bf16=is_bf16))
    shapes = {name: each.shape for name, each in named}
    is_whole = not has_adapters(model) or adapts_experts(model)
    exact = exact_names(model, shapes) if is_whole else set[str]()  # Adapters have one dtype.
    rounded: set[str] = set()
    if is_bf16:
        sums = {name for name, each in named if isinstance(each, Merged) and each.is_sum}
        rounded = (rounded_names(model, shapes) if is_whole else set(shapes)) - sums
    return LiveWeights(named, dtype, exact=exact, rounded=rounded, gathering=gathering)
