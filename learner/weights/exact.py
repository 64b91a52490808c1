"""The tensors of a version that stay in fp32, although the engines' dtype is bf16 or fp16.

vLLM (0.32) keeps some tensors in fp32 in every engine: the weights of many routers, the correction
of their choice, and the decay rates and convolutions of recurrent layers. An engine casts those
that it keeps in its own dtype, as from a checkpoint in fp32.
"""

import torch
from transformers import PreTrainedModel

from learner.policy.lora import adapts_experts, has_adapters
from learner.policy.model import published_tensors
from learner.policy.precision import exact_names
from learner.weights.source import Gathering, LiveWeights


def policy_weights(
    model: PreTrainedModel, dtype: torch.dtype, *, gathering: Gathering | None = None
) -> LiveWeights:
    """Return a policy's tensors as engines of this dtype receive them.

    Raises: ConfigError: as `published_tensors`.
    """
    named = list(published_tensors(model))
    exact: set[str] = set()
    if not has_adapters(model) or adapts_experts(model):  # Adapters have the engine's dtype.
        exact = exact_names(model, {name: each.shape for name, each in named})
    return LiveWeights(named, dtype, exact=exact, gathering=gathering)
