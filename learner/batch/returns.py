"""Computes returns, GAE and V-trace over the timesteps of one episode. Pure functions.

A timestep is a turn or a sampled token. Observation tokens are not timesteps, so credit passes
through them unchanged. `bootstrap` is the value of the state after the last timestep: the critic's
value if the horizon cut the episode, zero if the episode ended.
"""

import torch
from torch import Tensor


def discounted_returns(rewards: Tensor, *, discount: float, bootstrap: float = 0.0) -> Tensor:
    """Return G_k = r_k + discount * G_{k+1}, where G after the last timestep is `bootstrap`.

    Args:
        rewards: [step].

    Returns:
        [step] of the same dtype.
    """
    returns = torch.empty_like(rewards)
    following = rewards.new_tensor(bootstrap)
    for step in range(rewards.shape[0] - 1, -1, -1):
        following = rewards[step] + discount * following
        returns[step] = following
    return returns


def gae(
    rewards: Tensor, values: Tensor, *, discount: float, trace: float, bootstrap: float
) -> Tensor:
    """Return generalised advantage estimates.

    delta_k = r_k + discount * V_{k+1} - V_k;  A_k = delta_k + discount * trace * A_{k+1}.

    Args:
        rewards: [step], the reward of step k.
        values: [step], V of the state before step k.
        trace: lambda; 1 gives return - value, 0 the one-step error.

    Returns:
        [step]. A_k + V_k is the critic's target.

    Source: arXiv:1506.02438.
    """
    _check(rewards, values)
    advantages = torch.empty_like(rewards)
    following = rewards.new_zeros(())
    next_value = rewards.new_tensor(bootstrap)
    for step in range(rewards.shape[0] - 1, -1, -1):
        delta = rewards[step] + discount * next_value - values[step]
        following = delta + discount * trace * following
        advantages[step] = following
        next_value = values[step]
    return advantages


def vtrace(
    rewards: Tensor,
    values: Tensor,
    log_ratios: Tensor,
    *,
    discount: float,
    trace: float,
    max_rho: float,
    max_c: float,
    bootstrap: float,
) -> tuple[Tensor, Tensor]:
    """Return V-trace targets and advantages: the off-policy counterpart of GAE.

    delta_k = rho_k (r_k + discount V_{k+1} - V_k)
    v_k - V_k = delta_k + discount * trace * c_k * (v_{k+1} - V_{k+1})
    A_k = r_k + discount v_{k+1} - V_k. The correction of the policy loss weights it.

    Args:
        rewards: [step].
        values: [step].
        log_ratios: [step] nats, log(pi / mu) of all tokens sampled in the step.
        max_rho: cap of rho = pi / mu in delta; determines the policy whose values are learned.
        max_c: cap of the ratio in the trace; determines how far corrections propagate.

    Returns:
        (targets [step], advantages [step]). On-policy with trace 1 both come from n-step returns.

    Source: IMPALA, arXiv:1802.01561.
    """
    _check(rewards, values)
    _check(rewards, log_ratios)
    ratios = log_ratios.clamp(-20.0, 20.0).exp()
    rho = ratios.clamp(max=max_rho)
    c = ratios.clamp(max=max_c)
    targets = torch.empty_like(values)
    advantages = torch.empty_like(values)
    next_value = next_target = rewards.new_tensor(bootstrap)
    for step in range(rewards.shape[0] - 1, -1, -1):
        delta = rho[step] * (rewards[step] + discount * next_value - values[step])
        correction = discount * trace * c[step] * (next_target - next_value)
        targets[step] = values[step] + delta + correction
        advantages[step] = rewards[step] + discount * next_target - values[step]
        next_value = values[step]
        next_target = targets[step]
    return targets, advantages


def _check(rewards: Tensor, other: Tensor) -> None:
    """Raise ValueError if the shapes of an episode's timesteps differ."""
    if rewards.ndim != 1 or rewards.shape != other.shape or rewards.shape[0] == 0:
        shapes = (tuple(rewards.shape), tuple(other.shape))
        raise ValueError(
            f"expected two tensors of one shape [step >= 1], got {shapes[0]} and {shapes[1]}"
        )
