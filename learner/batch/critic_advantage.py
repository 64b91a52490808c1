"""The critic's values of a batch -> advantages of its samples."""

from dataclasses import dataclass, field

import numpy as np

from common.config.learning import AlgorithmSection, CriticSection
from learner.batch.batching import Sample
from learner.batch.credit import per_env, whitened
from learner.policy.critic import with_advantages


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What the networks say about a batch before its first update, sample by sample."""

    values: np.ndarray = field(repr=False)  # [tokens] float32
    end_values: np.ndarray = field(repr=False)  # [sample] float32
    logprobs: np.ndarray = field(repr=False)  # [tokens] float32 nats


def advantages_from_critic(
    samples: list[Sample], scored: Scored, algorithm: AlgorithmSection, critic: CriticSection
) -> list[Sample]:
    """Return the samples with advantages and value targets; whitened over the batch if asked."""
    cuts = np.cumsum([sample.num_sampled_tokens for sample in samples])[:-1]
    values = np.split(scored.values, cuts)
    logprobs = np.split(scored.logprobs, cuts)
    estimated = [
        with_advantages(
            sample,
            values=own,
            bootstrap=float(end),
            log_ratios=now - sample.trajectory.logprobs[sample.trajectory.loss_mask],
            algorithm=algorithm,
            critic=critic,
        )
        for sample, own, end, now in zip(samples, values, scored.end_values, logprobs, strict=True)
    ]
    if algorithm.normalize_per_env:
        estimated = per_env(estimated)
    return whitened(estimated) if critic.whiten else estimated
