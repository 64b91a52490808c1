"""Measures of a batch: how far the policy is from the sampler, and whether it reads its prompts."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.wire.messages import Trajectory
from learner.algorithms.interface import log_ratio

NUM_PROMPTS = 4  # Number of compared prompts: every answer is scored after every prompt.
MAX_ANSWER_TOKENS = 256  # Only this many first tokens of an answer are scored.


def weight_moments(weights: Tensor) -> Tensor:
    """Return [3] float64: the number of weights, their sum, the sum of their squares.

    The moments of a batch are the sums of the moments of its parts.
    """
    wide = weights.double()  # float32 squares of exp(20) would lose the small weights.
    return torch.stack([wide.new_tensor(wide.numel()), wide.sum(), (wide**2).sum()])


def sample_size_of(moments: Tensor) -> Tensor:
    """Return the effective sample size as a fraction: (sum w)^2 / (N sum w^2).

    Args:
        moments: [3] of `weight_moments`, from importance ratios, > 0, not truncated.

    Returns:
        Scalar float64 in (0, 1]; 1 if all weights are equal.

    Source: Kong, "A note on importance sampling using standardized weights", 1992.
    """
    return moments[1] ** 2 / (moments[0] * moments[2])


class Overlap(NamedTuple):
    """Overlap of policy and sampler; both values are 1 on-policy, NaN if the policy is broken."""

    ess_frac: float  # Effective sample size of pi / mu, (0, 1]; it falls if the ratios differ.
    weight_mean: float  # Mean of pi / mu; it falls if sampled tokens become unlikely.


def overlap_of(moments: Tensor) -> Overlap:
    """Return the overlap from `weight_moments` of importance ratios, > 0, not truncated."""
    return Overlap(sample_size_of(moments).item(), (moments[1] / moments[0]).item())


def ratio_statistics(new_logprobs: Tensor, sampler_logprobs: Tensor) -> dict[str, float]:
    """Return quantiles and effective sample size of r = pi / mu, and k3's estimate of KL(mu | pi).

    Args:
        new_logprobs: [tokens] nats, policy before the step.
        sampler_logprobs: [tokens] nats of mu.

    Raises:
        ValueError: there are no tokens, or the shapes differ.

    Source of k3 = r - 1 - log r (>= 0): Schulman, "Approximating KL divergence", 2020.
    """
    delta = log_ratio(new_logprobs, sampler_logprobs)  # [tokens]
    if delta.numel() == 0:
        raise ValueError("the effective sample size needs at least one token")
    ratio = delta.exp()
    ordered = ratio.sort().values  # Sorted, since torch.quantile refuses more than 16M entries.
    last = ordered.numel() - 1
    return {
        "offpolicy/ess_frac": sample_size_of(weight_moments(ratio)).item(),
        "offpolicy/ratio_p01": ordered[round(0.01 * last)].item(),
        "offpolicy/ratio_p50": ordered[round(0.50 * last)].item(),
        "offpolicy/ratio_p99": ordered[round(0.99 * last)].item(),
        "policy/kl_sampler": (ratio - 1 - delta).mean().item(),
    }


def lag_statistics(new_logprobs: Tensor, sampler_logprobs: Tensor, lag: Tensor) -> dict[str, float]:
    """Split |log(pi / mu)| into arithmetic noise and the effect of version lag.

    Args:
        new_logprobs: [tokens] nats, policy before the step.
        sampler_logprobs: [tokens] nats of mu.
        lag: [tokens] int64 versions between the sampler and the policy.

    Returns:
        noise_abs_logprob: mean over tokens of the current version, which differ by arithmetic only.
        lag_abs_logprob: mean over the other tokens, minus that noise; absent without both kinds.
    """
    is_same = lag == 0
    metrics = {"offpolicy/num_same_version_tokens": float(is_same.sum())}
    distance = (new_logprobs - sampler_logprobs).abs()
    if is_same.any():
        metrics["offpolicy/noise_abs_logprob"] = distance[is_same].mean().item()
        if (~is_same).any():
            gap = distance[~is_same].mean() - distance[is_same].mean()
            metrics["offpolicy/lag_abs_logprob"] = gap.item()
    return metrics


def first_answers(trajectories: Sequence[Trajectory]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (prompt, answer) for the first different prompts, at most `NUM_PROMPTS` of them.

    A prompt [seq] contains the tokens before the first sampled token. An answer [seq] contains the
    tokens sampled in the first turn. Episodes without such a prompt or answer are skipped.
    """
    answers: dict[bytes, tuple[np.ndarray, np.ndarray]] = {}
    for trajectory in trajectories:
        begins = int(np.argmax(trajectory.loss_mask))
        is_answer = trajectory.loss_mask[begins:] & (trajectory.turn_ids[begins:] == 0)
        length = min(int(np.argmin(np.append(is_answer, False))), MAX_ANSWER_TOKENS)
        if not begins or not length:
            continue
        prompt = trajectory.token_ids[:begins]
        answers.setdefault(
            prompt.tobytes(), (prompt, trajectory.token_ids[begins : begins + length])
        )
        if len(answers) == NUM_PROMPTS:
            break
    return list(answers.values())


def mutual_information(cross_logprobs: Tensor) -> dict[str, float]:
    """Return an estimate of I(prompt; answer), from the scores of each answer after each prompt.

    I = mean over answers z of log p(z | its own x) - log mean over all x' of p(z | x'). If the
    answers vary but ignore the prompt (template collapse), the entropy stays high and I is 0. For n
    equally likely prompts I is at most log(n), and long answers soon reach this bound. The metric
    therefore detects ignored prompts, but does not measure how strong the dependence is. With one
    answer for each prompt, single estimates are noisy and may be negative: average them over steps.

    Args:
        cross_logprobs: [answer, prompt] nats, log p(answer | prompt) summed over its tokens. The
            diagonal holds each answer's own prompt.

    Returns:
        policy/mutual_information in nats, and policy/prompt_recall: the fraction of answers whose
        own prompt makes them more likely than any other prompt; 1 / n by chance.

    Raises:
        ValueError: the matrix is not square, or smaller than two.

    Source: RAGEN-2, arXiv:2604.06268. Its proxies average over an answer's tokens instead of
    summing. This is not mutual information, but grows with it and has no such bound.
    """
    num, width = cross_logprobs.shape
    if num != width or num < 2:
        raise ValueError(
            f"cross_logprobs must be square [answer >= 2, prompt >= 2], got {(num, width)}"
        )
    scores = cross_logprobs.double()
    with_its_prompt = scores.diagonal()
    marginal = scores.logsumexp(1) - math.log(num)
    others = scores.clone().fill_diagonal_(-math.inf)
    return {
        "policy/mutual_information": (with_its_prompt - marginal).mean().item(),
        "policy/prompt_recall": (with_its_prompt > others.max(1).values).double().mean().item(),
    }
