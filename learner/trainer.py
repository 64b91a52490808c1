"""One training step: samples in, updated weights and metrics out."""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from common.config import AlgorithmSection, LearnerSection
from common.errors import LongstrideError
from learner.batching import (
    MicroBatch,
    Sample,
    TokenBatch,
    collate_tokens,
    make_microbatches,
    make_minibatches,
    plan_microbatches,
    sampled,
)
from learner.correction import ratio_statistics, surplus_weights, truncated_weights
from learner.loss import clipped_policy_loss, is_anchored_at_sampler
from learner.model import token_logprobs
from learner.optimizer import lr_scale, make_optimizer

logger = logging.getLogger(__name__)

MAX_LAG_SHOWN = 8  # the histogram's last bin holds everything from here on


class TrainingDiverged(LongstrideError):
    """Losses or gradients were not finite in too many steps in a row."""


class _Update(NamedTuple):
    """What one optimizer update did."""

    is_good: bool  # False: something was not finite and the weights are as before
    grad_norm: float  # before clipping
    metrics: dict[str, float]  # means over the minibatch's trained tokens


class Trainer:
    """Owns the optimizer and changes the model's weights. Not thread-safe.

    Example (ppo_epochs 2, num_minibatches 3): `train_on` scores the batch once (pi_prox), then
    makes six updates, each on the summed gradient of its microbatches. Still one step: version
    v becomes v + 1.
    """

    def __init__(
        self,
        cfg: LearnerSection,
        cfg_algorithm: AlgorithmSection,
        model: PreTrainedModel,
        *,
        num_steps: int,
        seed: int,
        temperature: float,
        engine_dtype: str = "bfloat16",
    ) -> None:
        """Make the optimizer.

        Args:
            num_steps: of the run; the learning rate's schedule ends there.
            seed: of the order of minibatches.
            temperature: of the sampler whose logprobs the samples carry.
            engine_dtype: `model.dtype`; a bf16 engine's logits are rounded, so ours are then too.
        """
        self._cfg = cfg
        self._algorithm = cfg_algorithm
        self._model = model
        self._num_steps = num_steps
        self._temperature = temperature
        self._head_dtype = torch.bfloat16 if engine_dtype == "bfloat16" else torch.float32
        self._device = next(model.parameters()).device
        self._optimizer = make_optimizer(model, cfg)
        self._generator = torch.Generator().manual_seed(seed)
        self._num_bad_steps_in_a_row = 0
        self._num_updates = 0

    @property
    def num_updates(self) -> int:
        """Optimizer updates made so far; skipped ones do not count."""
        return self._num_updates

    def train_on(self, samples: Sequence[Sample], *, version: int) -> dict[str, float]:
        """Make ppo_epochs x num_minibatches updates; return the step's metrics.

        A sample without sampled tokens adds nothing. An update whose loss or gradient is not
        finite is skipped and counted, and metrics that are not finite are left out.

        Args:
            version: of the current weights; decides the learning rate and what counts as lag.

        Raises:
            ValueError: there is no sampled token to train on.
            TrainingDiverged: this was the `max_bad_steps`-th step in a row with a skipped update.
        """
        started_s = time.perf_counter()
        samples = [sample for sample in samples if sample.num_sampled_tokens > 0]
        if not samples:
            raise ValueError("there is no sampled token to train on")
        self._optimizer.set_lr_scale(lr_scale(version, self._num_steps, self._cfg))
        # [sample][tokens] logprobs before the step; the single update of a step fills them in.
        before: list[Tensor] = [torch.empty(0)] * len(samples)
        is_single = is_anchored_at_sampler(self._cfg)
        if not is_single:
            self._score_before(samples, before)
        updates: list[_Update] = []
        for _ in range(self._cfg.ppo_epochs):
            parts = make_minibatches(samples, self._cfg.num_minibatches, generator=self._generator)
            updates += [self._update(samples, part, before, is_single) for part in parts]

        self._count_bad(updates, version)
        metrics = _mean_metrics(updates)
        metrics |= _offpolicy_metrics(samples, torch.cat(before).cpu(), version)
        metrics |= _volume_metrics(samples, time.perf_counter() - started_s)
        metrics["train/lr"] = self._optimizer.lr
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def _score_before(self, samples: Sequence[Sample], before: list[Tensor]) -> None:
        for micro in self._microbatches(samples, range(len(samples))):
            with torch.no_grad():
                logprobs, _ = self._logprobs(micro.tokens, self._temperature)
            _store(before, samples, micro, logprobs)

    def _update(
        self, samples: Sequence[Sample], part: list[int], before: list[Tensor], is_single: bool
    ) -> _Update:
        microbatches = self._microbatches(samples, part)
        num_global_tokens = sum(micro.advantages.numel() for micro in microbatches)
        sums: dict[str, float] = defaultdict(float)
        self._optimizer.zero_grad()
        for micro in microbatches:
            new, entropy = self._logprobs(
                micro.tokens, self._temperature, self._algorithm.entropy_coef != 0
            )
            if is_single:
                _store(before, samples, micro, new.detach())
            anchor, weights = self._anchor_and_weights(micro, new, before, is_single)
            loss, metrics = clipped_policy_loss(
                new,
                anchor,
                micro.advantages,
                is_weights=weights,
                entropy=entropy,
                num_global_tokens=num_global_tokens,
                cfg=self._algorithm,
            )
            loss.backward()
            sums["loss"] += loss.item()
            for name, value in metrics.items():
                sums[name] += value.item()
        max_norm = self._cfg.max_grad_norm
        grad_norm = nn.utils.clip_grad_norm_(self._model.parameters(), max_norm).item()
        is_good = math.isfinite(sums.pop("loss")) and math.isfinite(grad_norm)
        if is_good:
            self._optimizer.step()
            self._num_updates += 1
        self._optimizer.zero_grad()  # gradients need not outlive the step
        return _Update(is_good, grad_norm, dict(sums))

    def _anchor_and_weights(
        self, micro: MicroBatch, new: Tensor, before: list[Tensor], is_single: bool
    ) -> tuple[Tensor, Tensor]:
        """Return what the ratio is taken to and the importance weights, see `learner/loss.py`."""
        mu, cap = micro.sampler_logprobs, self._algorithm.tis_cap
        if is_single:
            return mu, surplus_weights(new, mu, cap=cap)
        prox = torch.cat([before[index] for index in micro.sample_indices])
        return prox, truncated_weights(prox, mu, cap=cap)

    def _microbatches(self, samples: Sequence[Sample], indices: Sequence[int]) -> list[MicroBatch]:
        budget = self._cfg.max_tokens_per_microbatch
        return make_microbatches(samples, indices, max_tokens=budget, device=self._device)

    def _logprobs(
        self, tokens: TokenBatch, temperature: float, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        return token_logprobs(
            self._model,
            tokens,
            chunk_tokens=self._cfg.logprob_chunk_tokens,
            autocast=self._cfg.autocast,
            temperature=temperature,
            with_entropy=with_entropy,
            head_dtype=self._head_dtype,
        )

    def _count_bad(self, updates: list[_Update], version: int) -> None:
        num_bad = sum(not update.is_good for update in updates)
        if num_bad == 0:
            self._num_bad_steps_in_a_row = 0
            return
        self._num_bad_steps_in_a_row += 1
        in_a_row = self._num_bad_steps_in_a_row
        logger.warning(
            "skipped updates, not finite version=%d num_bad=%d in_a_row=%d",
            *(version, num_bad, in_a_row),
        )
        if in_a_row >= self._cfg.max_bad_steps:
            raise TrainingDiverged(
                f"losses or gradients were not finite in {in_a_row} steps in a row, the last one "
                f"at version {version} (learner.max_bad_steps={self._cfg.max_bad_steps})"
            )

    @torch.no_grad()
    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the logprob of each token after the first, at temperature 1, per sequence."""
        scores: list[list[float]] = [[] for _ in token_ids]
        budget = self._cfg.max_tokens_per_microbatch
        for block in plan_microbatches([len(ids) for ids in token_ids], max_tokens=budget):
            sequences = [np.asarray(token_ids[index]) for index in block]
            masks = [np.arange(len(sequence)) > 0 for sequence in sequences]
            tokens = collate_tokens(sequences, masks, device=self._device)
            logprobs, _ = self._logprobs(tokens, 1.0)
            parts = logprobs.cpu().split([len(sequence) - 1 for sequence in sequences])
            for index, part in zip(block, parts, strict=True):
                scores[index] = part.tolist()
        return scores

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on exactly as this one would (live tensors)."""
        return {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "generator": self._generator.get_state(),
            "num_bad_steps_in_a_row": self._num_bad_steps_in_a_row,
            "num_updates": self._num_updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._generator.set_state(state["generator"])
        self._num_bad_steps_in_a_row = state["num_bad_steps_in_a_row"]
        self._num_updates = state["num_updates"]


def _store(
    before: list[Tensor], samples: Sequence[Sample], micro: MicroBatch, logprobs: Tensor
) -> None:
    counts = [samples[index].num_sampled_tokens for index in micro.sample_indices]
    for index, part in zip(micro.sample_indices, logprobs.split(counts), strict=True):
        before[index] = part


def _mean_metrics(updates: list[_Update]) -> dict[str, float]:
    """Average over the updates that happened; says how many did not."""
    good = [update for update in updates if update.is_good]
    metrics = {
        "train/num_updates": float(len(good)),
        "train/num_bad_updates": float(len(updates) - len(good)),
    }
    if good:
        for name in good[0].metrics:
            metrics[name] = sum(update.metrics[name] for update in good) / len(good)
        metrics["train/grad_norm"] = sum(update.grad_norm for update in good) / len(good)
    return metrics


def _offpolicy_metrics(samples: Sequence[Sample], before: Tensor, version: int) -> dict[str, float]:
    """Compare the policy before the step with the sampler; split noise from version lag."""
    trajectories = [sample.trajectory for sample in samples]
    mu = torch.from_numpy(sampled(trajectories, [t.logprobs for t in trajectories]))  # [tokens]
    lag = version - torch.from_numpy(sampled(trajectories, [t.versions for t in trajectories]))
    is_same = lag == 0  # [tokens] any difference here is arithmetic, not learning
    metrics = ratio_statistics(before, mu.float())
    metrics["offpolicy/lag_mean"] = lag.double().mean().item()
    metrics["offpolicy/lag_max"] = float(lag.max())
    for number in range(MAX_LAG_SHOWN + 1):
        in_bin = lag == number if number < MAX_LAG_SHOWN else lag >= number
        metrics[f"offpolicy/lag_{number}_tokens"] = float(in_bin.sum())
    metrics["offpolicy/num_same_version_tokens"] = float(is_same.sum())
    if is_same.any():
        noise = (before - mu)[is_same].abs().mean()
        metrics["offpolicy/noise_abs_logprob"] = noise.item()
    return metrics


def _volume_metrics(samples: Sequence[Sample], step_s: float) -> dict[str, float]:
    num_tokens = sum(len(sample.trajectory.token_ids) for sample in samples)
    return {
        "train/num_tokens": float(num_tokens),
        "train/num_sampled_tokens": float(sum(sample.num_sampled_tokens for sample in samples)),
        "train/tokens_per_s": num_tokens / step_s,
        "train/step_s": step_s,
    }
