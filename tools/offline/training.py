"""Common parts of the offline methods: loading the initial policy, and the loop over epochs.

A step is that of the learner (`learner/training/step.py`) with another loss.
"""

import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from transformers import AutoTokenizer, PreTrainedModel

from common.config.learner import Layout, LearnerSection, Precision
from common.config.run_config import RunConfig
from common.host.lock import hold_run
from common.store.run_dir import RunDir
from common.store.run_start import mark_finished, save_config
from learner.journal.metrics import MetricsWriter
from learner.policy.determinism import make_deterministic
from learner.policy.finite import TrainingDiverged
from learner.policy.forward import Networks, Passes
from learner.policy.model import load_policy, pick_device
from learner.policy.precision import check_range, frozen_dtype, settled_precision
from learner.trackers import open_trackers
from learner.training.optimizer import Updates
from learner.training.ranks import Ranks
from learner.training.step import Loss, add_gradients
from tools.offline.config import describe_rates

logger = logging.getLogger(__name__)

Example = TypeVar("Example")  # Unit of training data: a row, or a pair of rows.
Log = Callable[[dict[str, float]], object]  # Receives the metrics of an optimizer step.
WEIGHT = "weight"  # Key of the denominator of the other sums.
_TOTAL = "total"  # Key of the sum of the losses themselves.


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
        lora=learner.lora,
        base_dtype=frozen_dtype(learner, device),
        max_tokens=max_tokens,
    )
    return model, tokenizer


def make_passes(model: PreTrainedModel, learner: LearnerSection) -> Passes:
    """Return the forward passes of a model, which draw no random numbers from now on.

    Args:
        learner: with the rates of the training, on which the precision depends.

    Raises: ConfigError: packing is configured and not possible; scores differ by more than
        rounding from those of the model's own pass; compilation is configured and not available.
    """
    path = model.name_or_path or ""
    precision, reason, _ = settled_precision(learner, model.device, path=path)
    logger.info("learner.precision: %s (%s)", precision.value, reason)
    make_deterministic(model)
    passes = Passes(
        replace(learner, precision=precision),
        Networks(policy=model),
        temperature=1.0,
        engine_dtype="float16" if precision is Precision.FP16 else "bfloat16",
    )
    if passes.scoring.dtype is torch.float16:
        check_range([model], Ranks())
    passes.check_start(may_pad=learner.layout is Layout.AUTO)
    passes.warm_up()
    return passes


def train_epochs(
    model: PreTrainedModel,
    passes: Passes,
    learner: LearnerSection,
    *,
    num_epochs: int,
    batches: Callable[[], Iterable[Sequence[Sequence[Example]]]],
    loss_of: Callable[[Sequence[Example], int], Loss],
    metrics: Sequence[str],
    lr_scale: Callable[[int], float] = lambda step: 1.0,
    log: Log = ignore,
) -> list[dict[str, float]]:
    """Train in place; return the metrics of every epoch, each a sum divided by `WEIGHT`.

    Args:
        passes: the passes of the model that `loss_of` makes.
        learner: with the rates of the training.
        batches: makes one epoch; each optimizer step has parts that each fit into memory.
        loss_of: maps a part and the number of examples in its whole batch to a loss and the part's
            sums for the metrics. The gradients of the losses add up to the batch's gradient.
        metrics: names of the sums, without `WEIGHT`.
        lr_scale: maps an optimizer step to its fraction of the peak learning rate.
        log: called with the metrics of each completed optimizer step.

    Raises:
        TrainingDiverged: losses or gradients were not finite in `learner.max_bad_steps` steps in a
            row, or in all of an epoch. A single such step is skipped and changes nothing.
    """
    logger.info("%s", describe_rates(learner))
    rounding = settled_precision(learner, model.device, path=model.name_or_path or "").rounding
    settled = replace(learner, rounding=rounding)
    updates = Updates(model, settled, dtype=passes.scoring.dtype)
    ranks = Ranks()  # This process alone.
    epochs: list[dict[str, float]] = []
    step = 0
    started = time.monotonic()
    for epoch in range(num_epochs):
        sums: dict[str, float] = defaultdict(float)
        first_step = step
        num_updates_before = updates.num_updates
        num_overflows = 0
        for parts in batches():
            num_examples = sum(map(len, parts))
            losses = (loss_of(part, num_examples) for part in parts)
            totals = ((loss, {**part_sums, _TOTAL: loss.detach()}) for loss, part_sums in losses)
            names = [_TOTAL, WEIGHT, *metrics]
            batch_sums = add_gradients(totals, names, ranks, scale=updates.loss_scale.value)
            updates.vanished.begin()
            update = updates.make(batch_sums.pop(_TOTAL), batch_sums, scale=lr_scale(step))
            updates.zero_grad()
            if update.is_good:
                for name, value in update.metrics.items():
                    sums[name] += value
                means = _means(update.metrics)
                means["train/vanished_update_frac"] = updates.vanished.share(
                    lr=updates.optimizer.lr
                )
                if updates.loss_scale.is_on:
                    means["train/loss_scale"] = updates.loss_scale.value
                log({**means, "epoch": float(epoch + 1), "lr_scale": lr_scale(step)})
            step += 1
            num_overflows += update.is_overflow
            remedy = "No policy is written."
            updates.count_bad([update], unit="step", number=step, remedy=remedy)
        if step > first_step + num_overflows and updates.num_updates == num_updates_before:
            raise TrainingDiverged(f"No step of epoch {epoch + 1} had a finite loss and gradient.")
        epochs.append(_means(sums))
        shown = " ".join(f"{name}={value:.4f}" for name, value in epochs[-1].items())
        elapsed_s = time.monotonic() - started
        left_s = elapsed_s * (num_epochs - epoch - 1) / (epoch + 1)
        counts = (epoch + 1, num_epochs, shown, step, elapsed_s, left_s)
        logger.info("trained epoch=%d of=%d %s steps=%d elapsed_s=%.0f left_s=%.0f", *counts)
    updates.put_masters()
    return epochs


def _means(sums: Mapping[str, float]) -> dict[str, float]:
    """Return sums divided by their weight."""
    weight = max(sums.get(WEIGHT, 0.0), 1.0)
    return {name: value / weight for name, value in sums.items() if name != WEIGHT}


@contextmanager
def logged_steps(cfg: RunConfig, run_dir: RunDir, job: str) -> Generator[Log]:
    """Yield a function that logs the metrics of an optimizer step.

    They appear in metrics.jsonl of the command's folder, and in a wandb run of the job. The folder
    is held, and marked as finished at the end.
    """
    with hold_run(run_dir.root, name=f"{run_dir.root.parent.name}/{job}"):
        run_dir.root.mkdir(parents=True, exist_ok=True)
        save_config(cfg, run_dir.config)
        run_dir.finished.unlink(missing_ok=True)
        metrics = MetricsWriter(run_dir, open_trackers(run_dir, cfg, job=job))
        numbers = itertools.count(1)
        try:
            yield lambda values: metrics.log(
                next(numbers), {f"{job}/{k}": v for k, v in values.items()}
            )
        finally:
            metrics.close()
        mark_finished(run_dir, version=next(numbers) - 1, result="")
