"""The tensors of a version that stay in fp32, although the engines' dtype is bf16 or fp16.

vLLM (0.32) keeps some tensors in fp32 in every engine: the weights of many routers, the correction
of their choice, and the decay rates and convolutions of recurrent layers. A rounded number there
changes the choice of experts, or grows from token to token. These tensors are a thousandth of a
network. An engine casts those that it keeps in its own dtype, as from a checkpoint in fp32.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch
from torch import nn
from transformers import PreTrainedModel

from learner.policy.lora import adapts_experts, has_adapters
from learner.policy.model import published_tensors
from learner.weights.source import Gathering, LiveWeights

MAX_WIDTH = 16  # Product of the shorter axes: states of Mamba have 16 numbers, convolutions 4.


def policy_weights(
    model: PreTrainedModel, dtype: torch.dtype, *, gathering: Gathering | None = None
) -> LiveWeights:
    """Return a policy's tensors as engines of this dtype receive them.

    Raises: ConfigError: as `published_tensors`.
    """
    named = list(published_tensors(model))
    exact: set[str] = set()
    if not has_adapters(model) or adapts_experts(model):  # Adapters have the engine's dtype.
        num_experts = {count for module in model.modules() for count in _counts_in(module)}
        listed = _listed(model)
        exact = {
            name
            for name, each in named
            if stays_exact(each.shape, num_experts) or listed.search(name)
        }
    return LiveWeights(named, dtype, exact=exact, gathering=gathering)


def stays_exact(shape: Sequence[int], num_experts: Iterable[int]) -> bool:
    """Return whether a tensor is sent in its own dtype: a vector, or one row for each expert.

    Example with 64 experts: [64] and [64, 2048] stay exact; [8192, 16] is a set of decay rates and
    [8192, 1, 4] a convolution, which are nearly vectors. [2048, 8192] is cast.

    Args:
        num_experts: the numbers of experts in the layers of the network.
    """
    width = prod(sorted(shape)[:-1])
    return width <= MAX_WIDTH or (len(shape) == 2 and shape[0] in set(num_experts))


def _listed(model: PreTrainedModel) -> re.Pattern[str]:
    """Return a pattern of the names that transformers keeps in fp32 in every network."""
    names = sorted(model._keep_in_fp32_modules_strict or ())
    return re.compile("|".join(rf"(^|\.){re.escape(name)}(\.|$)" for name in names) or "(?!)")


def _counts_in(module: nn.Module) -> Iterator[int]:
    """Yield the numbers of experts that a router or its block has as attributes."""
    for name, value in vars(module).items():
        if "experts" in name and type(value) is int:
            yield value
