"""The learner's arithmetic: bf16 over fp32 master weights, or fp32 throughout.

CPUs without bf16 units emulate it, which is slower than fp32. Some tensors stay in fp32 in both:
vectors, the rows of routers, and the decay rates and convolutions of recurrent layers. A rounded
number there changes the choice of experts, or grows from token to token. These tensors are a
thousandth of a network.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import prod

import torch
from torch import nn
from transformers import PreTrainedModel

from common.checks.machine import has_bf16_units
from common.config.compute import Precision
from common.config.learning import LearnerSection

MAX_WIDTH = 16  # Product of the shorter axes: states of Mamba have 16 numbers, convolutions 4.


def uses_bf16(learner: LearnerSection, device: torch.device) -> bool:
    """Return whether to compute in bf16; auto follows the rule."""
    if learner.precision is Precision.AUTO:
        return precision_by_rule(device.type) is Precision.BF16
    return learner.precision is Precision.BF16


def frozen_dtype(learner: LearnerSection, device: torch.device) -> torch.dtype:
    """Return the dtype of frozen weights: on GPUs the dtype of the computation."""
    is_bf16 = device.type == "cuda" and uses_bf16(learner, device)
    return torch.bfloat16 if is_bf16 else torch.float32


@cache
def precision_by_rule(device_type: str) -> Precision:
    """Return bf16 if the device has units for it; the result is the same on every start."""
    if device_type == "cuda":
        has_units = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_units = has_bf16_units()
    return Precision.BF16 if has_units else Precision.FP32


def exact_names(network: nn.Module, shapes: Mapping[str, Sequence[int]]) -> set[str]:
    """Return the names of a network's tensors that stay in fp32.

    Args:
        shapes: shapes of the tensors by name.
    """
    num_experts = {count for module in network.modules() for count in _counts_in(module)}
    listed = _listed(network)
    return {
        name
        for name, shape in shapes.items()
        if stays_exact(shape, num_experts) or listed.search(name)
    }


def stays_exact(shape: Sequence[int], num_experts: Iterable[int]) -> bool:
    """Return whether a tensor keeps its own dtype: a vector, or one row for each expert.

    Example with 64 experts: [64] and [64, 2048] stay exact; [8192, 16] is a set of decay rates and
    [8192, 1, 4] a convolution, which are nearly vectors. [2048, 8192] is cast.

    Args:
        num_experts: the numbers of experts in the layers of the network.
    """
    width = prod(sorted(shape)[:-1])
    return width <= MAX_WIDTH or (len(shape) == 2 and shape[0] in set(num_experts))


def _listed(network: nn.Module) -> re.Pattern[str]:
    """Return a pattern of the names that transformers keeps in fp32 in every network."""
    models = [each for each in network.modules() if isinstance(each, PreTrainedModel)]
    names = {name for each in models for name in each._keep_in_fp32_modules_strict or ()}
    patterns = [rf"(^|\.){re.escape(name)}(\.|$)" for name in sorted(names)]
    return re.compile("|".join(patterns) or "(?!)")


def _counts_in(module: nn.Module) -> Iterator[int]:
    """Yield the numbers of experts that a router or its block has as attributes."""
    for name, value in vars(module).items():
        if "experts" in name and type(value) is int:
            yield value
