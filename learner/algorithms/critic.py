"""A critic's advantages: GAE and V-trace over turns or tokens, and the critic's loss.

A timestep is a turn or a sampled token. Observation tokens have no value of their own. Credit
passes through them from one timestep to the next. `bootstrap` is the value of the state after the
last timestep: the critic's value if the horizon cut the episode, zero if the episode ended.

Source: GAE, arXiv:1506.02438; PPO, arXiv:1707.06347; V-trace, IMPALA, arXiv:1802.01561.
"""
# torch's type stubs lack numpy's element types:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from common.config.algorithm import Advantage, AlgorithmSection, CreditLevel
from common.config.learner import CriticKind, CriticSection, CriticTargets, LearnerSection, Timestep
from common.wire.messages import EndReason, Trajectory
from learner.algorithms.interface import Estimator, tensor_of
from learner.algorithms.rewards import end_reward, paid_formula, turn_rewards

if TYPE_CHECKING:
    from torch import Tensor

    from learner.batch.batching import Sample

# End reasons after which the task would have continued. An environment that scores an episode at
# its own limit ends it as DONE.
CUT_SHORT = (EndReason.HORIZON, EndReason.TRUNCATED, EndReason.CONTEXT_FULL, EndReason.UNFINISHED)


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
    advantages = rewards.new_empty(rewards.shape)
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
    targets = values.new_empty(values.shape)
    advantages = values.new_empty(values.shape)
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


def with_advantages(
    sample: Sample,
    *,
    values: np.ndarray,
    bootstrap: float,
    log_ratios: np.ndarray,
    algorithm: AlgorithmSection,
    critic: CriticSection,
) -> Sample:
    """Return the sample with the advantages and value targets of its sampled tokens.

    Args:
        values: [tokens] float32 of the states before each sampled token.
        bootstrap: value of the state at the very end, used only if the episode was cut short. It is
            read at the start of the next turn, like the values of turns. Without a last observation
            `value_after` replaces it.
        log_ratios: [tokens] nats of pi / mu; used by V-trace only.
    """
    trajectory = sample.trajectory
    steps = timesteps(trajectory, critic.timestep)  # [tokens] index of each token's timestep
    # [step] first token of each timestep; timesteps of rows that were sampled at once alternate.
    first = np.unique(steps, return_index=True)[1]
    marks = np.zeros(len(steps), dtype=np.float32)
    marks[first] = 1.0
    is_cut = trajectory.end_reason in CUT_SHORT
    of_steps = step_rewards(trajectory, algorithm, critic.timestep, with_end=not is_cut)
    rewards = tensor_of(of_steps).double()
    states = tensor_of(values[first]).double()
    is_turn = critic.timestep is Timestep.TURN
    discount = algorithm.turn_discount if is_turn else 1.0
    ending = 0.0
    if is_cut:
        if trajectory.loss_mask[-1]:
            bootstrap = value_after(float(states[-1]), float(rewards[-1]), discount)
        ending = continuation(trajectory, algorithm, bootstrap, discount)
    if critic.targets is CriticTargets.VTRACE:
        summed = np.bincount(steps, weights=log_ratios.astype(np.float64))  # [step]
        targets, advantages = vtrace(
            rewards,
            states,
            tensor_of(summed),
            discount=discount,
            trace=critic.gae_lambda,
            max_rho=critic.vtrace_rho,
            max_c=critic.vtrace_c,
            bootstrap=ending,
        )
    else:
        advantages = gae(
            rewards, states, discount=discount, trace=critic.gae_lambda, bootstrap=ending
        )
        targets = advantages + states
    return replace(
        sample,
        own_advantages=advantages.numpy().astype(np.float32)[steps],
        value_targets=targets.numpy().astype(np.float32)[steps],
        values=values.astype(np.float32),
        state_marks=marks,
    )


def value_after(value: float, reward: float, discount: float) -> float:
    """Return the value of the state after a timestep from that of the state before it.

    Args:
        value: value before the timestep: reward + discount * value after it.
        reward: reward of the timestep itself.
    """
    return (value - reward) / discount


def continuation(
    trajectory: Trajectory, algorithm: AlgorithmSection, value: float, discount: float
) -> float:
    """Return the bounded value of the state at the very end of an episode that was cut short.

    The task would have continued, so the reward of its end (`end_reward`) was not paid yet: the
    value includes it. A value above the largest score is clipped to it. A score that begins at 0
    measures progress, which is never taken back. Without discount the value is then at least the
    score.

    Args:
        value: value of the state at the very end.
        discount: discount per timestep. Below 1 a later reward is discounted by an unknown number
            of turns.
    """
    at_end = end_reward(trajectory, algorithm)
    most = 1.0 - trajectory.reward + at_end
    is_progress = trajectory.start_score == 0.0 and discount == 1.0
    least = at_end + min(value, 0.0) if is_progress else value
    return min(max(value, least), most)


def timesteps(trajectory: Trajectory, kind: Timestep) -> np.ndarray:
    """Return the 0-based timestep of every sampled token, [tokens] int64."""
    if kind is Timestep.TOKEN:
        return np.arange(int(trajectory.loss_mask.sum()))
    turns = trajectory.turn_ids[trajectory.loss_mask]
    return np.unique(turns, return_inverse=True)[1].astype(np.int64)


def step_rewards(
    trajectory: Trajectory, algorithm: AlgorithmSection, kind: Timestep, *, with_end: bool = True
) -> np.ndarray:
    """Return the reward of every timestep, [step] float32, with or without the `end_reward`.

    The last sampled token of a turn receives the turn's reward, even if observations follow it. A
    turn without sampled tokens passes its reward to the last turn before it that has some, else to
    the first after it. The rewards of turns before a part belong to earlier parts.
    """
    per_turn = turn_rewards(trajectory, algorithm, with_end=with_end)
    per_turn[: trajectory.num_shared_turns] = 0.0
    turns = trajectory.turn_ids[trajectory.loss_mask]  # [tokens]
    present, last_from_end = np.unique(turns[::-1], return_index=True)
    last = len(turns) - 1 - last_from_end  # [turn present] its last sampled token
    owner = np.maximum(np.searchsorted(present, np.arange(len(per_turn)), side="right") - 1, 0)
    sums = np.bincount(owner, weights=per_turn, minlength=len(present)).astype(np.float32)
    if kind is Timestep.TURN:
        return sums
    rewards = np.zeros(len(turns), dtype=np.float32)
    rewards[last] = sums
    return rewards


def value_loss(
    values: Tensor, targets: Tensor, old_values: Tensor, weights: Tensor, *, clip: float
) -> Tensor:
    """Return the weighted mean squared error of the critic, with PPO's clipping.

    0.5 * max((V - target)^2, (old + clamp(V - old, -clip, clip) - target)^2)

    Args:
        values: [entry] with gradient.
        targets: [entry].
        old_values: [entry], the critic's values before the step.
        weights: [entry], with sum one over the whole minibatch.
        clip: 0 disables clipping.

    Source: arXiv:1707.06347; its reference implementation.
    """
    error = (values - targets) ** 2
    if clip > 0:
        near = old_values + (values - old_values).clamp(-clip, clip)
        error = error.maximum((near - targets) ** 2)
    return 0.5 * (weights * error).sum()


def formula(cfg: AlgorithmSection, learner: LearnerSection) -> str:
    """Return the definition of A with a critic."""
    critic = learner.critic
    step = critic.timestep.value
    discount = cfg.turn_discount if critic.timestep is Timestep.TURN else 1.0
    kind = "GAE" if critic.targets is CriticTargets.GAE else "V-trace"
    text = f"{kind}(per {step}, gamma={discount:g}, lambda={critic.gae_lambda:g}"
    if critic.targets is CriticTargets.VTRACE:
        text += f", rho<={critic.vtrace_rho:g}, c<={critic.vtrace_c:g}"
    text += f", V={critic.kind.value}, pay={paid_formula(cfg)}, {cut_formula(cfg, discount)})"
    return text


def cut_formula(cfg: AlgorithmSection, discount: float) -> str:
    """Return the reward and the value at the end of an episode that was cut short.

    S is the last score, S0 the score before the first turn, R = S - S0. E is the reward at the end
    of the task. V_last and pay_last belong to the last timestep.
    """
    is_level = cfg.reward_level is CreditLevel.EPISODE
    parts = ["R"] if is_level else []
    if cfg.invalid_action_penalty and cfg.invalid_action_level is CreditLevel.EPISODE:
        parts.append(f"{-cfg.invalid_action_penalty:g}*invalid_frac")
    most = "1 - S + E" if parts else "1 - S"
    bound = f"min(V_end, {most})"
    if is_level and discount == 1.0:
        bound = f"clip(V_end, E + min(V_end, 0) if S0 == 0 else V_end, {most})"
    end = f"E={' + '.join(parts)} is not paid and " if parts else ""
    behind = f"V_end=(V_last - pay_last)/{discount:g}"
    return f"if cut short then {end}V_after={bound}, without a last observation {behind}"


def value_formulas(cfg: AlgorithmSection, critic: CriticSection) -> Iterator[str]:
    """Yield the critic's objective; with a head on the policy's trunk it also trains the trunk."""
    if cfg.advantage is not Advantage.PPO:
        return
    free = f"(V-target)^2/2, first token of each {critic.timestep.value}"
    near = (
        f"maximum of this and (V_old+clip(V-V_old, -{critic.clip:g}, {critic.clip:g})-target)^2/2"
    )
    yield f"VL=mean_{critic.timestep.value}s [{free}" + (f"; {near}]" if critic.clip else "]")
    if critic.kind is CriticKind.MODEL:
        yield "minimised by the critic's own network"
    if critic.warmup_steps:
        yield f"the policy trains from step {critic.warmup_steps} on"


PPO = Estimator(formula=formula, keys=(), of_group=None)
