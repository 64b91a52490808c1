"""What the offline methods share: the policy they start from, and the loop over epochs of rows."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from common.config.learning import LearnerSection
from common.config.offline import DpoSection, SftSection
from learner.offline.rows import Row, token_batch
from learner.policy.model import Scoring, load_policy, pick_device, token_logprobs
from learner.policy.precision import frozen_dtype, uses_bf16
from learner.training.optimizer import make_optimizer

logger = logging.getLogger(__name__)

Example = TypeVar("Example")  # what a method learns from: a row, or a pair of them
Sums = dict[str, float]  # of an epoch; WEIGHT among them
WEIGHT = "weight"  # what the other sums are divided by


def prepare_device(learner: LearnerSection) -> torch.device:
    """Return the device to train on, with the threads that the configuration gives it."""
    device = pick_device(learner.device)
    if device.type == "cpu":
        torch.set_num_threads(max(1, learner.num_threads))
    return device


def load_start(path: str, learner: LearnerSection) -> tuple[PreTrainedModel, Any]:
    """Return the policy at `path` on its device, perhaps with new adapters, and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    device = prepare_device(learner)
    model = load_policy(
        path,
        device=device,
        gradient_checkpointing=learner.gradient_checkpointing,
        lora=learner.lora,
        base_dtype=frozen_dtype(learner, device),
    )
    return model, tokenizer


def row_logprobs(model: PreTrainedModel, rows: list[Row], learner: LearnerSection) -> Tensor:
    """Return the log-probabilities of the tokens to learn, row after row: [token], in nats."""
    is_bf16 = uses_bf16(learner, model.device)
    how = Scoring(chunk_tokens=learner.logprob_chunk_tokens, autocast=is_bf16)
    return token_logprobs(model, token_batch(rows, model.device), how)


def train_epochs(
    model: PreTrainedModel,
    cfg: SftSection | DpoSection,
    learner: LearnerSection,
    *,
    batches: Callable[[], Iterable[Sequence[Sequence[Example]]]],
    loss_of: Callable[[Sequence[Example], int], tuple[Tensor, Sums]],
    lr_scale: Callable[[int], float] = lambda step: 1.0,
    max_grad_norm: float,
) -> list[dict[str, float]]:
    """Train in place; return the metrics of every epoch, each a sum over `WEIGHT`.

    Args:
        batches: makes one epoch: for each optimizer step its parts, each small enough for memory.
        loss_of: of a part and the number of examples in its whole batch: the loss, whose gradients
            add up to the batch's, and the part's sums for the metrics.
        lr_scale: of an optimizer step, the share of the peak learning rate.
    """
    optimizer = make_optimizer(model, replace(learner, lr=cfg.lr, muon_lr=cfg.muon_lr))
    epochs: list[dict[str, float]] = []
    step, started = 0, time.monotonic()
    model.train()
    for epoch in range(cfg.num_epochs):
        sums: dict[str, float] = defaultdict(float)
        for parts in batches():
            optimizer.set_lr_scale(lr_scale(step))
            for part in parts:
                loss, found = loss_of(part, sum(map(len, parts)))
                loss.backward()
                for name, value in found.items():
                    sums[name] += value
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        weight = max(sums.pop(WEIGHT, 0.0), 1.0)
        epochs.append({name: value / weight for name, value in sums.items()})
        shown = " ".join(f"{name}={value:.4f}" for name, value in epochs[-1].items())
        elapsed_s = time.monotonic() - started
        logger.info("epoch=%d %s steps=%d s=%.0f", epoch + 1, shown, step, elapsed_s)
    return epochs
