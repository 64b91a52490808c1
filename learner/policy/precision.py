"""In which arithmetic the learner computes: bf16 over fp32 master weights, or fp32 throughout.

CPUs without units for bf16 emulate it, and are slower than in fp32.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from common.checks.machine import has_bf16_units
from common.config.learning import LearnerSection, Precision
from common.store.run_dir import write_json
from learner.batch.batching import TokenBatch, collate_tokens
from learner.policy.model import Scoring, token_logprobs, vocabulary_size

logger = logging.getLogger(__name__)

BUDGET_S = 0.1  # of measured time, after one pass of each kind to warm up
PATIENCE_S = 1.0  # a first round longer than this is that of a large model, and tells enough
MARGIN = 1.2  # what is not faster by more than this is noise
NUM_TOKENS = 128  # fewer cost about the same in both


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds that one forward and backward pass takes."""

    bf16_s: float
    fp32_s: float

    @property
    def total_s(self) -> float:
        """What both cost."""
        return self.bf16_s + self.fp32_s


def uses_bf16(learner: LearnerSection, device: torch.device) -> bool:
    """Return whether to compute in bf16; what was left at auto follows the rule."""
    if learner.precision is Precision.AUTO:
        return precision_by_rule(device.type) is Precision.BF16
    return learner.precision is Precision.BF16


def frozen_dtype(learner: LearnerSection, device: torch.device) -> torch.dtype:
    """Return in what weights that are not trained are kept: on GPUs in what is computed with."""
    is_bf16 = device.type == "cuda" and uses_bf16(learner, device)
    return torch.bfloat16 if is_bf16 else torch.float32


@cache
def precision_by_rule(device_type: str) -> Precision:
    """Return bf16 where the device has units for it, the same on every start."""
    if device_type == "cuda":
        has_units = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_units = has_bf16_units()
    return Precision.BF16 if has_units else Precision.FP32


def faster(timings: Timings, rule: Precision) -> Precision:
    """Return the faster arithmetic, or what the rule says if both are about as fast."""
    if timings.bf16_s * MARGIN < timings.fp32_s:
        return Precision.BF16
    if timings.fp32_s * MARGIN < timings.bf16_s:
        return Precision.FP32
    return rule


def time_passes(model: PreTrainedModel, *, budget_s: float = BUDGET_S) -> Timings:
    """Return what small passes of this model cost here, in CPU seconds of one thread.

    Not of the clock, and of one thread: the other roles start at the same time, and threads that
    wait for one another spin. The first pass of each kind makes the kernels, and counts only for
    a model so large that they do not matter.
    """
    length = min(NUM_TOKENS, model.config.max_position_embeddings)
    ids = np.arange(length) * 7919 % vocabulary_size(model)  # spread over the vocabulary
    tokens = collate_tokens([ids], [np.arange(length) > 0], device=model.device)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rounds = list(_rounds(model, tokens, budget_s))
    finally:
        torch.set_num_threads(num_threads)
    return Timings(
        bf16_s=min(each.bf16_s for each in rounds), fp32_s=min(each.fp32_s for each in rounds)
    )


def _rounds(model: PreTrainedModel, tokens: TokenBatch, budget_s: float) -> Iterator[Timings]:
    """Yield the first round of a large model; else at least one after it, within the budget."""
    warm = _time_both(model, tokens)
    if warm.total_s > PATIENCE_S:
        yield warm
        return
    left_s, next_s = budget_s, 0.0
    while next_s <= left_s:
        measured = _time_both(model, tokens)
        yield measured
        next_s = measured.total_s
        left_s -= next_s


def _time_both(model: PreTrainedModel, tokens: TokenBatch) -> Timings:
    seconds: list[float] = []
    for autocast in (True, False):
        started = time.thread_time()
        how = Scoring(chunk_tokens=NUM_TOKENS, autocast=autocast)
        logprobs = token_logprobs(model, tokens, how)
        (-logprobs.mean()).backward()
        seconds.append(time.thread_time() - started)
        model.zero_grad(set_to_none=True)
    return Timings(bf16_s=seconds[0], fp32_s=seconds[1])


def settle_precision(
    learner: LearnerSection,
    model: PreTrainedModel,
    file: Path,
    *,
    is_repeatable: bool,
    measure: Callable[[PreTrainedModel], Timings] = time_passes,
) -> LearnerSection:
    """Return the section with bf16 or fp32 in the place of auto, and write that to `file`.

    A run that goes on keeps what its first start has found: another arithmetic would change
    the numbers of steps that are repeated. One that must be repeatable goes by the rule alone.
    """
    if learner.precision is not Precision.AUTO:
        logger.info("precision=%s, as configured", learner.precision.value)
        return learner
    if file.exists():
        found = Precision(json.loads(file.read_text())["precision"])
        logger.info("precision=%s, as this run began", found.value)
        return replace(learner, precision=found)
    rule = precision_by_rule(model.device.type)
    is_timed = model.device.type == "cpu" and not is_repeatable
    timings = measure(model) if is_timed else None
    found = rule if timings is None else faster(timings, rule)
    write_json(
        file, {"precision": found.value, "timings": None if timings is None else asdict(timings)}
    )
    if timings is None:
        logger.info("precision=%s, by the units of the device", found.value)
    else:
        logger.info(
            "precision=%s: a small pass takes bf16_ms=%.1f fp32_ms=%.1f, by the units %s",
            *(found.value, 1e3 * timings.bf16_s, 1e3 * timings.fp32_s, rule.value),
        )
    return replace(learner, precision=found)
