"""Common parts of the offline methods: loading the initial policy, and the loop over epochs."""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from common.config.learner import Layout, LearnerSection
from learner.policy.determinism import make_deterministic
from learner.policy.finite import TrainingDiverged
from learner.policy.kernels.attention import use_attention
from learner.policy.kernels.compiling import compile_parts, naming_compiler
from learner.policy.model import Scoring, load_policy, pick_device, token_logprobs
from learner.policy.precision import VanishedUpdates, frozen_dtype, settled_precision, uses_bf16
from learner.policy.selfcheck import check_policy
from learner.training.optimizer import make_optimizer
from tools.offline.config import DpoSection, SftSection, describe_rates
from tools.offline.rows import Row, token_batch

logger = logging.getLogger(__name__)

Example = TypeVar("Example")  # Unit of training data: a row, or a pair of rows.
Sums = dict[str, float]  # Sums over an epoch, including WEIGHT.
Log = Callable[[dict[str, float]], object]  # Receives the metrics of an optimizer step.
WEIGHT = "weight"  # Key of the denominator of the other sums.


def ignore(_: dict[str, float]) -> None:
    """Discard the metrics."""


def prepare_device(learner: LearnerSection) -> torch.device:
    """Return the device to train on, and set the configured number of threads."""
    device = pick_device(learner.device)
    if device.type == "cpu":
        torch.set_num_threads(max(1, learner.num_threads))
    return device


def load_start(
    path: str, learner: LearnerSection, *, max_tokens: int | None = None
) -> tuple[PreTrainedModel, Any]:
    """Return the policy at `path` and its tokenizer.

    The policy is on its device and has new adapters if these are configured.

    Args:
        max_tokens: of the longest sequence that an engine may make; None: the model's own limit.
    """
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    device = prepare_device(learner)
    model = load_policy(
        path,
        device=device,
        gradient_checkpointing=learner.gradient_checkpointing,
        lora=learner.lora,
        base_dtype=frozen_dtype(learner, device),
        max_tokens=max_tokens,
    )
    return model, tokenizer


def choose_offline_compute(
    model: PreTrainedModel, learner: LearnerSection, cfg: SftSection | DpoSection | None = None
) -> LearnerSection:
    """Configure the computation of the model; return the section with its values resolved.

    From now on the model's passes draw no random numbers. Its scores are compared with those of its
    own forward pass.

    Args:
        cfg: the section with the rates of the training; None: those of the learner.

    Raises: ConfigError: packing is configured and not possible; scores differ by more than
        rounding; compilation is configured and not available.
    """
    rates = learner if cfg is None else cfg.rated(learner)
    precision, reason = settled_precision(rates, model.device, path=model.name_or_path or "")
    logger.info("learner.precision: %s (%s)", precision.value, reason)
    learner = replace(learner, precision=precision)
    make_deterministic(model)
    is_packed = use_attention([model], model.device.type, learner.layout, learner.attention)
    check_policy(model, _scoring_settings(model, learner), is_packed=is_packed)
    if learner.compile:
        compile_parts([model], fit="offline")
    return replace(learner, layout=Layout.PACKED if is_packed else Layout.PADDED)


def row_logprobs(model: PreTrainedModel, rows: list[Row], learner: LearnerSection) -> Tensor:
    """Return the log-probabilities of the trained tokens, row after row: [token], in nats.

    Args:
        learner: as `choose_offline_compute` has returned it.
    """
    tokens = token_batch(rows, model.device, is_packed=learner.layout is Layout.PACKED)
    return token_logprobs(model, tokens, _scoring_settings(model, learner))


def _scoring_settings(model: PreTrainedModel, learner: LearnerSection) -> Scoring:
    """Return the settings for scoring tokens with this learner's precision."""
    is_bf16 = uses_bf16(learner, model.device)
    return Scoring(chunk_tokens=learner.logprob_chunk_tokens, autocast=is_bf16)


@naming_compiler()
def train_epochs(
    model: PreTrainedModel,
    cfg: SftSection | DpoSection,
    learner: LearnerSection,
    *,
    batches: Callable[[], Iterable[Sequence[Sequence[Example]]]],
    loss_of: Callable[[Sequence[Example], int], tuple[Tensor, Sums]],
    lr_scale: Callable[[int], float] = lambda step: 1.0,
    max_grad_norm: float,
    log: Log = ignore,
) -> list[dict[str, float]]:
    """Train in place; return the metrics of every epoch, each a sum divided by `WEIGHT`.

    Args:
        log: called with the metrics of each completed optimizer step.
        batches: makes one epoch; each optimizer step has parts that each fit into memory.
        loss_of: maps a part and the number of examples in its whole batch to a loss and the part's
            sums for the metrics. The gradients of the losses add up to the batch's gradient.
        lr_scale: maps an optimizer step to its fraction of the peak learning rate.

    Raises:
        ConfigError: compilation is configured, and the compiler fails.
        TrainingDiverged: losses or gradients were not finite in `learner.max_bad_steps` steps in a
            row, or in all of an epoch. A single such step is skipped and changes nothing.
    """
    rated = cfg.rated(learner)
    logger.info("%s", describe_rates(rated))
    optimizer = make_optimizer(model, rated)
    vanished = VanishedUpdates(model, is_bf16=uses_bf16(learner, model.device))
    epochs: list[dict[str, float]] = []
    step, started, num_bad = 0, time.monotonic(), 0
    make_deterministic(model)
    for epoch in range(cfg.num_epochs):
        sums: dict[str, float] = defaultdict(float)
        num_good = 0
        for parts in batches():
            optimizer.set_lr_scale(lr_scale(step))
            batch_sums, is_good = _gradient(model, parts, loss_of, max_grad_norm)
            if is_good:
                vanished.begin()
                optimizer.step()
                hidden = vanished.share(lr=optimizer.lr)
                for name, value in batch_sums.items():
                    sums[name] += value
                here = max(batch_sums.get(WEIGHT, 0.0), 1.0)
                means = {name: value / here for name, value in batch_sums.items() if name != WEIGHT}
                means |= {"train/vanished_update_frac": hidden}
                log({**means, "epoch": float(epoch + 1), "lr_scale": lr_scale(step)})
            optimizer.zero_grad()
            step = step + 1
            num_good = num_good + is_good
            num_bad = 0 if is_good else num_bad + 1
            _check(step, num_bad, learner.max_bad_steps)
        if num_good == 0 and num_bad:
            raise TrainingDiverged(f"No step of epoch {epoch + 1} had a finite loss and gradient.")
        weight = max(sums.pop(WEIGHT, 0.0), 1.0)
        epochs.append({name: value / weight for name, value in sums.items()})
        shown = " ".join(f"{name}={value:.4f}" for name, value in epochs[-1].items())
        elapsed_s = time.monotonic() - started
        left_s = elapsed_s * (cfg.num_epochs - epoch - 1) / (epoch + 1)
        counts = (epoch + 1, cfg.num_epochs, shown, step, elapsed_s, left_s)
        logger.info("trained epoch=%d of=%d %s steps=%d elapsed_s=%.0f left_s=%.0f", *counts)
    return epochs


def _gradient(
    model: PreTrainedModel,
    parts: Sequence[Sequence[Example]],
    loss_of: Callable[[Sequence[Example], int], tuple[Tensor, Sums]],
    max_grad_norm: float,
) -> tuple[Sums, bool]:
    """Accumulate a batch's clipped gradient; return its sums and whether all of it is finite."""
    sums: Sums = defaultdict(float)
    total = 0.0
    for part in parts:
        loss, part_sums = loss_of(part, sum(map(len, parts)))
        loss.backward()
        total += loss.item()
        for name, value in part_sums.items():
            sums[name] += value
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm).item()
    return sums, math.isfinite(total) and math.isfinite(norm)


def _check(step: int, num_bad: int, max_bad: int) -> None:
    """Warn about a skipped step. Raises: TrainingDiverged: too many were skipped in a row."""
    if num_bad:
        logger.warning(
            "skipped an update with NaN or infinite values step=%d in_a_row=%d", step, num_bad
        )
    if num_bad >= max_bad:
        raise TrainingDiverged(
            f"Losses or gradients were NaN or infinite in {num_bad} consecutive steps up to step"
            f" {step} (learner.max_bad_steps={max_bad}). No policy is written."
        )
