"""One batch on its way through a step: what is known of it before and during the updates."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from common.config.learning import AlgorithmSection, LearnerSection, Proximal
from learner.batch.batching import MicroBatch, Sample, make_microbatches
from learner.batch.critic_advantage import Scored, advantages_from_critic
from learner.objective.correction import (
    importance_weights,
    interpolated_logprobs,
    log_ratio,
    negative_mask,
    sample_size_of,
    weight_moments,
)
from learner.objective.describe import is_anchored_at_sampler
from learner.objective.loss import LossInputs
from learner.policy.forward import Passes, PerSample, Scores
from learner.training.controller import Decision
from learner.training.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """What every step needs and none changes."""

    cfg: LearnerSection
    algorithm: AlgorithmSection
    passes: Passes
    reference: PreTrainedModel | None
    has_critic: bool
    ranks: Ranks
    device: torch.device


class BatchStep:
    """The samples of a step with their log-probabilities before it, and the controller's word."""

    def __init__(
        self, parts: StepParts, samples: list[Sample], version: int, *, must_train: bool
    ) -> None:
        """Start with nothing known.

        Args:
            version: of the current weights.
            must_train: the controller may not skip it.
        """
        counts = [sample.num_sampled_tokens for sample in samples]
        self._parts = parts
        self.samples = samples
        self.version = version
        self.must_train = must_train
        self.before = PerSample(counts)  # log-probabilities before the first update
        self.decision: Decision | None = None
        self._reference = PerSample(counts)
        self._proximal = parts.algorithm.proximal
        if self._proximal is Proximal.AUTO:
            is_single = is_anchored_at_sampler(parts.cfg)
            self._proximal = Proximal.SAMPLER if is_single else Proximal.RECOMPUTED

    def microbatches(self, indices: Sequence[int]) -> list[MicroBatch]:
        """Return the samples at `indices` in blocks of the token budget."""
        budget = self._parts.cfg.max_tokens_per_microbatch
        return make_microbatches(
            self.samples, indices, max_tokens=budget, device=self._parts.device
        )

    def score_before(self) -> None:
        """Do the passes without gradient that the configuration needs before the first update."""
        parts = self._parts
        is_recomputed = self._proximal is Proximal.RECOMPUTED
        if not (is_recomputed or parts.has_critic or parts.reference):
            return
        values = PerSample([sample.num_sampled_tokens for sample in self.samples])
        ends = PerSample([1] * len(self.samples))
        for micro in self.microbatches(parts.ranks.own(range(len(self.samples)))):
            with torch.no_grad():
                scores = parts.passes.score(micro.tokens, with_values=parts.has_critic)
                if parts.reference is not None:
                    known = parts.passes.score_with(parts.reference, micro.tokens)
                    self._reference.store(micro, known)
            self.before.store(micro, scores.logprobs)
            if scores.values is not None and scores.end_values is not None:
                values.store(micro, scores.values)
                ends.store(micro, scores.end_values)
        if parts.has_critic:
            self._estimate(values, ends)

    def _estimate(self, values: PerSample, ends: PerSample) -> None:
        parts = self._parts
        scored = Scored(
            values=parts.ranks.sum(values.flat()).cpu().numpy(),
            end_values=parts.ranks.sum(ends.flat()).cpu().numpy(),
            logprobs=parts.ranks.sum(self.before.flat()).cpu().numpy(),
        )
        self.samples = advantages_from_critic(
            self.samples, scored, parts.algorithm, parts.cfg.critic
        )

    def loss_inputs(self, micro: MicroBatch, scores: Scores) -> LossInputs:
        """Return what the loss needs, see `objective/loss.py`; fills in what is not known."""
        new, mu = scores.logprobs, micro.sampler_logprobs
        if not self.before.has(micro.sample_indices):
            self.before.store(micro, new)
        before = self.before.of(micro.sample_indices)
        anchor = before
        if self._proximal is Proximal.SAMPLER:
            anchor = mu
        elif self._proximal is Proximal.INTERPOLATED:
            anchor = interpolated_logprobs(new, mu, micro.versions, self.version)
        is_included = self._proximal is Proximal.SAMPLER
        log_rho = log_ratio((new if is_included else anchor).detach(), mu)
        sequences = (micro.sequence_ids, micro.num_sequences)
        weights = importance_weights(
            log_rho, *sequences, self._parts.algorithm, is_ratio_included=is_included
        )
        delta = self._parts.algorithm.negative_mask_delta
        weights = weights * negative_mask(
            log_ratio(before, mu), micro.advantages, *sequences, delta=delta
        )
        has_reference = self._parts.reference is not None
        return LossInputs(
            new_logprobs=new,
            anchor_logprobs=anchor,
            sampler_logprobs=mu,
            advantages=micro.advantages,
            is_weights=weights,
            sequence_ids=micro.sequence_ids,
            num_sequences=micro.num_sequences,
            entropy=scores.entropy,
            reference_logprobs=self._reference.of(micro.sample_indices) if has_reference else None,
        )

    def ess_frac(self) -> float:
        """Return the effective sample size of pi / mu over the tokens scored so far, (0, 1].

        That is over the tokens of all ranks, however many there are.
        """
        moments = torch.zeros(3, dtype=torch.float64)
        known = self.before.known()
        if known:
            mu = np.concatenate(
                [
                    (t := self.samples[index].trajectory).logprobs[t.loss_mask].astype(np.float32)
                    for index in known
                ]
            )
            ratio = log_ratio(self.before.of(known).cpu(), torch.from_numpy(mu)).exp()
            moments = weight_moments(ratio)
        return float(sample_size_of(self._parts.ranks.sum(moments)))
