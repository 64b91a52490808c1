"""Converts a critic's values of a batch to advantages and value targets of its samples.

Observation tokens have no value of their own. Credit passes through them from one turn or sampled
token to the next.
"""
# torch's type stubs lack numpy's element types:
# pyright: reportUnknownMemberType=false

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from common.config.algorithm import AlgorithmSection
from common.config.learner import CriticSection, CriticTargets, Timestep
from common.wire.messages import EndReason, Trajectory
from learner.batch.batching import Sample
from learner.batch.credit import end_reward, per_env, turn_rewards, whitened
from learner.batch.returns import gae, vtrace
from learner.batch.rows import episodes_of, rows_of

# End reasons after which the task would have continued. An environment that scores an episode at
# its own limit ends it as DONE.
CUT_SHORT = (EndReason.HORIZON, EndReason.TRUNCATED, EndReason.CONTEXT_FULL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The critic's values of a batch before the step."""

    values: np.ndarray = field(repr=False)  # [tokens] float32
    end_values: np.ndarray = field(repr=False)  # [sample] float32
    logprobs: np.ndarray = field(repr=False)  # [tokens] float32 nats


def advantages_from_critic(
    samples: list[Sample], scored: Scored, algorithm: AlgorithmSection, critic: CriticSection
) -> list[Sample]:
    """Return the samples with advantages and value targets, whitened over the batch if configured.

    Credit passes from one row of an episode to the next: its rows are one sequence of timesteps.
    """
    lasts = [index - 1 for index, sample in enumerate(samples) if sample.row == 0 and index]
    end_values = scored.end_values[[*lasts, len(samples) - 1]]  # [episode]
    samples = episodes_of(samples)
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
        for sample, own, end, now in zip(samples, values, end_values, logprobs, strict=True)
    ]
    if algorithm.normalize_per_env:
        estimated = per_env(estimated)
    return rows_of(whitened(estimated) if critic.whiten else estimated)


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
    first = np.flatnonzero(np.diff(steps, prepend=-1))  # [step] first token of each timestep
    is_cut = trajectory.end_reason in CUT_SHORT
    of_steps = step_rewards(trajectory, algorithm, critic.timestep, with_end=not is_cut)
    rewards = torch.from_numpy(of_steps).double()
    states = torch.from_numpy(values[first]).double()
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
            torch.from_numpy(summed),
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
        state_marks=(np.diff(steps, prepend=-1) != 0).astype(np.float32),
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
    the first after it.
    """
    per_turn = turn_rewards(trajectory, algorithm, with_end=with_end)
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
