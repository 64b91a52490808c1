"""The metrics of one training step."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.wire.messages import Trajectory
from learner.batch.batching import Sample, sampled
from learner.objective.correction import (
    lag_statistics,
    log_ratio,
    overlap_of,
    ratio_statistics,
    weight_moments,
)
from learner.objective.information import first_answers, mutual_information
from learner.policy.forward import Passes

MAX_LAG_SHOWN = 8  # The histogram's last bin holds this lag and all larger ones.


class Update(NamedTuple):
    """The result of one optimizer update."""

    is_good: bool  # False: a value was not finite and the weights are unchanged.
    grad_norm: float  # Gradient norm before clipping.
    metrics: dict[str, float]  # Means over the minibatch's trained tokens.


def mean_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Average the metrics of the successful updates, and count the failed updates."""
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


def offpolicy_metrics(
    samples: Sequence[Sample], before: Tensor, is_known: Tensor, version: int
) -> dict[str, float]:
    """Compare the policy before the step with the sampler; separate noise from version lag.

    Args:
        before: [tokens] nats, policy before the step.
        is_known: [tokens] bool, False for tokens that a skipped step did not score.
        version: version of that policy.
    """
    trajectories = [sample.trajectory for sample in samples]
    mu = torch.from_numpy(sampled(trajectories, [t.logprobs for t in trajectories])).float()
    lag = version - torch.from_numpy(sampled(trajectories, [t.versions for t in trajectories]))
    metrics: dict[str, float] = {}
    if is_known.any():
        metrics |= ratio_statistics(before[is_known], mu[is_known])
        metrics |= lag_statistics(before[is_known], mu[is_known], lag[is_known])
        metrics |= _metrics_by_actor(trajectories, before, mu, lag, is_known)
    metrics["offpolicy/lag_mean"] = lag.double().mean().item()
    metrics["offpolicy/lag_max"] = float(lag.max())
    for number in range(MAX_LAG_SHOWN + 1):
        in_bin = lag == number if number < MAX_LAG_SHOWN else lag >= number
        metrics[f"offpolicy/lag_{number}_tokens"] = float(in_bin.sum())
    return metrics


def _metrics_by_actor(
    trajectories: Sequence[Trajectory], before: Tensor, mu: Tensor, lag: Tensor, is_known: Tensor
) -> dict[str, float]:
    """Return noise, lag and importance weights of each actor; {} with one actor.

    Engines may differ in precision, so each has its own noise. The mean weight pi / mu of an engine
    is 1 up to chance if its recorded logprobs are those of its samples.
    """
    names = sorted({trajectory.actor for trajectory in trajectories})
    if len(names) < 2:
        return {}
    numbers = {name: number for number, name in enumerate(names)}
    owners = [np.full(len(each.loss_mask), numbers[each.actor]) for each in trajectories]
    owner = torch.from_numpy(sampled(trajectories, owners))  # [tokens]
    metrics: dict[str, float] = {}
    for name, number in numbers.items():
        own = is_known & (owner == number)
        if not own.any():
            continue
        found = lag_statistics(before[own], mu[own], lag[own])
        overlap = overlap_of(weight_moments(log_ratio(before[own], mu[own]).exp()))
        found |= {f"offpolicy/{key}": value for key, value in overlap._asdict().items()}
        metrics |= {f"{key}/{name}": value for key, value in found.items()}
    return metrics


def information_metrics(samples: Sequence[Sample], passes: Passes) -> dict[str, float]:
    """Return how far answers depend on prompts, see `information.py`; {} without two prompts."""
    pairs = first_answers([sample.trajectory for sample in samples])
    if len(pairs) < 2:
        return {}
    prompts, answers = zip(*pairs, strict=True)
    return mutual_information(passes.score_crosswise(prompts, answers))


def routing_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the share of the tokens whose experts the engine recorded."""
    num_tokens = sum(len(sample.trajectory.token_ids) for sample in samples)
    num_recorded = sum(int(sample.trajectory.expert_mask.sum()) for sample in samples)
    return {"routing/recorded_frac": num_recorded / num_tokens}


def volume_metrics(samples: Sequence[Sample], step_s: float) -> dict[str, float]:
    """Return the numbers of tokens of a step, and their rate."""
    num_tokens = sum(len(sample.trajectory.token_ids) for sample in samples)
    return {
        "train/num_tokens": float(num_tokens),
        "train/num_sampled_tokens": float(sum(sample.num_sampled_tokens for sample in samples)),
        "train/tokens_per_s": num_tokens / step_s,
        "train/step_s": step_s,
    }
