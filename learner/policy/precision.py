"""The learner's arithmetic: bf16 over fp32 master weights, or fp32 throughout.

CPUs without bf16 units emulate it, which is slower than fp32.
"""

from functools import cache

import torch

from common.checks.machine import has_bf16_units
from common.config.compute import Precision
from common.config.learning import LearnerSection


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
