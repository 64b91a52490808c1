"""One training step: samples in, updated weights and metrics out."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from common.config.learning import AlgorithmSection, LearnerSection
from common.errors import ConfigError
from learner.batch.batching import (
    MicroBatch,
    Sample,
    collate_tokens,
    make_minibatches,
    plan_microbatches,
)
from learner.objective.loss import Denominator, metric_names, policy_loss, value_loss
from learner.policy.critic import Critic
from learner.policy.forward import Passes, Scores
from learner.training.controller import Controller, Decision
from learner.training.optimizer import lr_scale, make_critic_optimizer, make_optimizer
from learner.training.ranks import Ranks
from learner.training.step import BatchStep, StepParts
from learner.training.step_metrics import mean_metrics, offpolicy_metrics, volume_metrics

logger = logging.getLogger(__name__)

CRITIC_METRICS = ("critic/loss", "critic/value_mean", "critic/target_mean")
NO_REACTION = Decision(lr_scale=1.0, is_skipped=False, max_ahead_steps=0)


class TrainingDiverged(ConfigError):
    """Losses or gradients were not finite in too many steps in a row.

    A learner that was started again would repeat the same steps, so the run ends: exit code 2.
    """


class Update(NamedTuple):
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
        max_ahead_steps: int = 0,
        critic: Critic | None = None,
        reference: PreTrainedModel | None = None,
        ranks: Ranks | None = None,
        announce: Callable[[Sequence[Sample], int, bool], object] | None = None,
        on_bad_batch: Callable[[int, list[Sample]], object] | None = None,
    ) -> None:
        """Make the optimizer.

        Args:
            num_steps: of the run; the learning rate's schedule ends there.
            seed: of the order of minibatches.
            temperature: of the sampler whose logprobs the samples carry.
            engine_dtype: `model.dtype`; a bf16 engine's logits are rounded, so ours are then too.
            max_ahead_steps: of the dispatch gate when nothing is amiss.
            critic: needed by `advantage=ppo`.
            reference: needed if `kl_coef` is not 0.
            ranks: the data-parallel learners; None is this one alone.
            announce: called with what `train_on` is about to train on, so that the other ranks can.
            on_bad_batch: called with version and samples of a step whose loss was not finite.
        """
        self._cfg = cfg
        self._algorithm = cfg_algorithm
        self._model = model
        self._critic = critic
        self._num_steps = num_steps
        self._ranks = ranks or Ranks()
        self._announce = announce
        self._on_bad_batch = on_bad_batch
        self._passes = Passes(
            cfg, model, critic, temperature=temperature, engine_dtype=engine_dtype
        )
        self._device = next(model.parameters()).device
        self._parts = StepParts(
            cfg=cfg,
            algorithm=cfg_algorithm,
            passes=self._passes,
            reference=reference,
            has_critic=critic is not None,
            ranks=self._ranks,
            device=self._device,
        )
        self._optimizer = make_optimizer(model, cfg)
        self._critic_optimizer = make_critic_optimizer(critic, cfg) if critic else None
        self._controller = Controller(cfg.controller, max_ahead_steps=max_ahead_steps)
        self._generator = torch.Generator().manual_seed(seed)
        self._num_bad_steps_in_a_row = 0
        self._num_updates = 0
        self.decision = NO_REACTION

    @property
    def num_updates(self) -> int:
        """Optimizer updates made so far; skipped ones do not count."""
        return self._num_updates

    @property
    def max_ahead_steps(self) -> int:
        """How far ahead of this learner the controller lets groups be opened."""
        return self._controller.max_ahead_steps

    def train_on(
        self, samples: Sequence[Sample], *, version: int, must_train: bool = False
    ) -> dict[str, float]:
        """Make ppo_epochs x num_minibatches updates; return the step's metrics.

        A sample without sampled tokens adds nothing. An update whose loss or gradient is not
        finite is skipped and counted, and metrics that are not finite are left out. If the
        controller skips the batch (`decision.is_skipped`), nothing has changed.

        Args:
            version: of the current weights; decides the learning rate and what counts as lag.
            must_train: the controller may not skip the batch: it was trained on once already.

        Raises:
            ValueError: there is no sampled token to train on.
            TrainingDiverged: this was the `max_bad_steps`-th step in a row with a skipped update.
        """
        started_s = time.perf_counter()
        samples = [sample for sample in samples if sample.num_sampled_tokens > 0]
        if not samples:
            raise ValueError("there is no sampled token to train on")
        if self._announce is not None:
            self._announce(samples, version, must_train)
        step = BatchStep(self._parts, samples, version, must_train=must_train)
        step.score_before()
        updates: list[Update] = []
        for _ in range(self._cfg.ppo_epochs):
            num_parts = self._cfg.num_minibatches
            parts = make_minibatches(step.samples, num_parts, generator=self._generator)
            for part in parts:
                update = self._update(step, part)
                if update is not None:
                    updates.append(update)
        self.decision = step.decision or NO_REACTION
        self._count_bad(updates, step)
        return self._metrics(step, updates, time.perf_counter() - started_s)

    def _metrics(self, step: BatchStep, updates: list[Update], step_s: float) -> dict[str, float]:
        metrics = mean_metrics(updates)
        before = self._ranks.sum(step.before.flat()).cpu()
        metrics |= offpolicy_metrics(step.samples, before, step.version)
        metrics |= volume_metrics(step.samples, step_s)
        metrics["train/lr"] = self._optimizer.lr
        metrics["controller/lr_scale"] = self.decision.lr_scale
        metrics["controller/skipped"] = float(self.decision.is_skipped)
        metrics["controller/max_ahead_steps"] = float(self._controller.max_ahead_steps)
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def _update(self, step: BatchStep, part: list[int]) -> Update | None:
        """Make one optimizer update; None if the controller skips the batch."""
        if step.decision is not None and step.decision.is_skipped:
            return None
        self._zero_grad()
        sums = self._accumulate(step, part)
        if step.decision is None:
            step.decision = self._controller.decide(
                version=step.version,
                ess_frac=step.ess_frac(),
                masked_frac=sums["policy/masked_frac"],
                must_train=step.must_train,
            )
            if step.decision.is_skipped:
                self._zero_grad()
                return None
        base = lr_scale(step.version, self._num_steps, self._cfg)
        self._optimizer.set_lr_scale(base * step.decision.lr_scale)
        grad_norm = self._clip(self._model.parameters())
        is_good = math.isfinite(sums.pop("loss")) and math.isfinite(grad_norm)
        if self._critic is not None:
            critic_norm = self._clip(self._critic.parameters())
            sums["critic/grad_norm"] = critic_norm
            is_good = is_good and math.isfinite(critic_norm)
        if is_good:
            if step.version >= self._warmup_steps:
                self._optimizer.step()
            if self._critic_optimizer is not None:
                self._critic_optimizer.step()
            self._num_updates += 1
        self._zero_grad()  # gradients need not outlive the step
        return Update(is_good, grad_norm, sums)

    @property
    def _warmup_steps(self) -> int:
        """Steps in which only the critic learns."""
        return self._cfg.critic.warmup_steps if self._critic is not None else 0

    def _clip(self, parameters: Any) -> float:
        kept = list(parameters)
        self._ranks.sum_gradients(kept)
        return nn.utils.clip_grad_norm_(kept, self._cfg.max_grad_norm).item()

    def _zero_grad(self) -> None:
        self._optimizer.zero_grad()
        if self._critic_optimizer is not None:
            self._critic_optimizer.zero_grad()

    def _accumulate(self, step: BatchStep, part: list[int]) -> dict[str, float]:
        """Add the gradient of a minibatch; return the metrics summed over its microbatches."""
        samples = [step.samples[index] for index in part]
        denominator = Denominator(
            num_tokens=sum(sample.num_sampled_tokens for sample in samples),
            num_sequences=len(samples),
        )
        num_states = sum(
            0.0 if sample.state_marks is None else float(sample.state_marks.sum())
            for sample in samples
        )
        names = ["loss", *metric_names(self._algorithm)]
        names += CRITIC_METRICS if self._critic is not None else ()
        rows: list[Tensor] = []  # on the device: asking for a number would wait for it each time
        for micro in step.microbatches(self._ranks.own(part)):
            scores = self._passes.score(
                micro.tokens,
                with_entropy=self._algorithm.entropy_coef != 0,
                with_values=self._critic is not None,
            )
            inputs = step.loss_inputs(micro, scores)
            loss, metrics = policy_loss(inputs, denominator, self._algorithm)
            if self._critic is not None:
                loss = loss + self._value_term(micro, scores, num_states, metrics)
            loss.backward()
            metrics["loss"] = loss.detach()
            rows.append(torch.stack([metrics[name] for name in names]))  # [metric]
        totals = torch.zeros(len(names), dtype=torch.float64)  # of a rank without a sample
        if rows:
            totals = torch.stack(rows).double().sum(0)
        return dict(zip(names, self._ranks.sum(totals).tolist(), strict=True))

    def _value_term(
        self, micro: MicroBatch, scores: Scores, num_states: float, metrics: dict[str, Tensor]
    ) -> Tensor:
        targets, old, marks = micro.value_targets, micro.values, micro.state_marks
        values = scores.values
        if values is None or targets is None or old is None or marks is None:
            raise ValueError("a critic's loss needs values, targets and marks of the batch")
        cfg = self._cfg.critic
        loss = value_loss(values, targets, old, marks / num_states, clip=cfg.clip)
        metrics["critic/loss"] = loss.detach()
        metrics["critic/value_mean"] = (marks * values.detach()).sum() / num_states
        metrics["critic/target_mean"] = (marks * targets).sum() / num_states
        is_shared = self._critic is not None and self._critic.trunk is None
        return loss * cfg.coef if is_shared else loss

    def _count_bad(self, updates: list[Update], step: BatchStep) -> None:
        num_bad = sum(not update.is_good for update in updates)
        if num_bad == 0:
            self._num_bad_steps_in_a_row = 0
            return
        self._num_bad_steps_in_a_row += 1
        in_a_row = self._num_bad_steps_in_a_row
        logger.warning(
            "skipped updates, not finite version=%d num_bad=%d in_a_row=%d",
            *(step.version, num_bad, in_a_row),
        )
        if self._on_bad_batch is not None:
            self._on_bad_batch(step.version, step.samples)
        if in_a_row >= self._cfg.max_bad_steps:
            raise TrainingDiverged(
                f"losses or gradients were not finite in {in_a_row} steps in a row, the last one "
                f"at version {step.version} (learner.max_bad_steps={self._cfg.max_bad_steps})"
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
            logprobs = self._passes.score(tokens, temperature=1.0).logprobs
            parts = logprobs.cpu().split([len(sequence) - 1 for sequence in sequences])
            for index, part in zip(block, parts, strict=True):
                scores[index] = part.tolist()
        return scores

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on exactly as this one would (live tensors)."""
        state = {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "generator": self._generator.get_state(),
            "num_bad_steps_in_a_row": self._num_bad_steps_in_a_row,
            "num_updates": self._num_updates,
            "controller": self._controller.state_dict(),
        }
        if self._critic is not None and self._critic_optimizer is not None:
            state["critic"] = self._critic.state_dict()
            state["critic_optimizer"] = self._critic_optimizer.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._generator.set_state(state["generator"])
        self._num_bad_steps_in_a_row = state["num_bad_steps_in_a_row"]
        self._num_updates = state["num_updates"]
        self._controller.load_state_dict(state["controller"])
        if self._critic is not None and self._critic_optimizer is not None:
            self._critic.load_state_dict(state["critic"])
            self._critic_optimizer.load_state_dict(state["critic_optimizer"])
