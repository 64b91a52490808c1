"""Groups -> samples: each trajectory with its advantages.

Without a critic the advantage of a turn is its credit minus a baseline of the group or the batch.
The credit is the outcome of the episode or the return after the turn. With a critic,
`critic_advantage.py` computes the advantages.
"""
# torch's type stubs lack numpy's element types:
# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from common.config.algorithm import Advantage, AlgorithmSection, Baseline, CreditLevel, StateCredit
from common.formats.seats import role_of
from common.wire.messages import Trajectory
from learner.batch.advantage import (
    STD_EPSILON,
    group_advantages,
    has_signal,
    less_turn_baseline,
    scale_per_kind,
    shaped_reward,
    whiten,
)
from learner.batch.batching import Sample
from learner.batch.returns import discounted_returns
from learner.batch.running_baseline import RunningBaseline
from learner.batch.state_credit import state_advantages
from learner.batch.taught import with_scores
from learner.ingest.group_assembly import Group


def outcome_credit(trajectory: Trajectory, algorithm: AlgorithmSection) -> float:
    """Return the credit of a whole episode: discounted reward minus the episode's penalty."""
    is_on_episode = algorithm.invalid_action_level is CreditLevel.EPISODE
    return shaped_reward(
        total_turn_reward(trajectory) * algorithm.turn_discount ** max(trajectory.num_turns - 1, 0),
        trajectory.num_invalid_actions,
        trajectory.num_turns,
        algorithm.invalid_action_penalty if is_on_episode else 0.0,
    )


def total_turn_reward(trajectory: Trajectory) -> float:
    """Return the sum of all turn rewards: the last score minus the score before the first turn."""
    return trajectory.reward - trajectory.start_score


def turn_rewards(
    trajectory: Trajectory, algorithm: AlgorithmSection, *, with_end: bool = True
) -> np.ndarray:
    """Return the reward of each turn, [num_turns] float32.

    `turn_scores` are cumulative scores, so a turn's reward is the increase of the score. The first
    turn's reward is the increase over `start_score`. At episode level the last turn receives the
    whole reward. `invalid_action_level` determines the turns that receive penalties.

    Args:
        with_end: False omits the `end_reward`, as for an episode that was cut short.
    """
    num_turns = trajectory.num_turns
    rewards = np.zeros(num_turns, dtype=np.float32)
    if num_turns == 0:
        return rewards
    if algorithm.reward_level is CreditLevel.TURN:
        rewards += np.diff(trajectory.turn_scores, prepend=np.float32(trajectory.start_score))
    if algorithm.invalid_action_level is CreditLevel.TURN:
        rewards -= algorithm.invalid_action_penalty * trajectory.invalid_turns
    if with_end:
        rewards[-1] += end_reward(trajectory, algorithm)
    return rewards


def end_reward(trajectory: Trajectory, algorithm: AlgorithmSection) -> float:
    """Return the reward of the episode's end: the part of the reward at episode level."""
    reward = total_turn_reward(trajectory) if algorithm.reward_level is CreditLevel.EPISODE else 0.0
    if algorithm.invalid_action_level is CreditLevel.EPISODE:
        share = trajectory.num_invalid_actions / max(trajectory.num_turns, 1)
        reward -= algorithm.invalid_action_penalty * share
    return reward


def group_has_signal(members: list[Trajectory], algorithm: AlgorithmSection) -> bool:
    """Return False if all members have equal credit, so that every advantage is zero.

    Algorithms whose baseline is not computed within the group always return True. So do those with
    a teacher, which teaches each token.
    """
    if algorithm.teacher.is_on:
        return True
    if not algorithm.is_group_relative:
        return True
    is_of_turns = algorithm.state_credit is StateCredit.GAGPO
    is_of_episodes = not is_of_turns and algorithm.reward_level is not CreditLevel.TURN
    if is_of_episodes and has_signal(_outcomes(members, algorithm)):
        return True
    if any(each.any() for each in _state_credit(members, algorithm) or []):
        return True
    if is_of_turns:
        return False
    per_turn = _turn_offsets(members, algorithm)
    return per_turn is not None and any(offset.any() for offset in per_turn)


def samples_of(
    groups: list[Group], algorithm: AlgorithmSection, baseline: RunningBaseline | None = None
) -> list[Sample]:
    """Return the samples of a batch, group by group, member by member.

    With `advantage=ppo` the advantages are zero here: they need the critic.

    Args:
        baseline: for `advantage=running`: expected rewards from earlier batches. This batch updates
            it, so each batch must be passed once, in order. None: this is the first batch.

    Raises: LongstrideError: the algorithm has a teacher, and an episode has no scores of it.
    """
    samples = _credited(groups, algorithm, baseline)
    if algorithm.teacher.is_on:
        scores = {name: each for group in groups for name, each in group.scores.items()}
        samples = with_scores(samples, scores)
    return samples


def _credited(
    groups: list[Group], algorithm: AlgorithmSection, baseline: RunningBaseline | None
) -> list[Sample]:
    """Return the samples of a batch with the advantages of their rewards."""
    samples: list[Sample] = []
    if algorithm.advantage is Advantage.RUNNING:
        members = [each for group in groups for each in group.members]
        samples = _samples_against_running_mean(members, algorithm, baseline or RunningBaseline())
    else:
        for group in groups:
            advantages, turns = _group_advantages(group.members, algorithm)
            for trajectory, advantage, own in zip(group.members, advantages, turns, strict=True):
                samples.append(
                    Sample(trajectory=trajectory, advantage=advantage, turn_advantages=own)
                )
    if algorithm.advantage in (Advantage.REINFORCE_PP, Advantage.REINFORCE_PP_BASELINE):
        return whitened(samples)
    return per_env(samples) if algorithm.normalize_per_env else samples


def _group_advantages(
    members: list[Trajectory], algorithm: AlgorithmSection
) -> tuple[list[float], list[np.ndarray | None]]:
    """Return each member's advantage, and the separate advantages of its turns [num_turns]."""
    by_state = _state_credit(members, algorithm)
    if by_state is not None and algorithm.state_credit is StateCredit.GAGPO:
        return [0.0] * len(members), [*by_state]
    advantages = [float(each) for each in _group_part(members, algorithm)]
    offsets = _turn_offsets(members, algorithm)
    if offsets is None or by_state is None:
        return advantages, [*(offsets or by_state or [None] * len(members))]
    return advantages, [a + b for a, b in zip(offsets, by_state, strict=True)]


def _state_credit(
    members: list[Trajectory], algorithm: AlgorithmSection
) -> list[np.ndarray] | None:
    """Return the state credit of each member's turns [num_turns]; None if it is not configured."""
    if algorithm.state_credit is StateCredit.NONE or not algorithm.is_group_relative:
        return None
    return state_advantages(
        members,
        [turn_rewards(each, algorithm) for each in members],
        algorithm,
        baseline=_baseline(algorithm),
        normalize_std=algorithm.normalize_std and algorithm.advantage is Advantage.GRPO,
    )


def _samples_against_running_mean(
    members: list[Trajectory], algorithm: AlgorithmSection, baseline: RunningBaseline
) -> list[Sample]:
    """Return samples whose credit is compared with running means of their items.

    A mean belongs to one seat and one opponent: they decide an outcome, and the policy does not
    choose them. The return or the penalty of a turn is compared with those of turns of the same
    number.
    """
    penalty = algorithm.invalid_action_penalty
    advantages = np.zeros(len(members), dtype=np.float32)
    turns: list[np.ndarray | None] = [None] * len(members)
    if algorithm.reward_level is CreditLevel.TURN:
        returns = [_returns(each, algorithm) for each in members]
        turns = [*_less_running_mean(returns, members, algorithm, baseline, "turn")]
    else:
        outcomes = [each[None] for each in _outcomes(members, algorithm).numpy()]
        less = _less_running_mean(outcomes, members, algorithm, baseline, "")
        advantages = np.concatenate(less) if less else advantages
        if algorithm.invalid_action_level is CreditLevel.TURN and penalty != 0.0:
            costs = [(-penalty * each.invalid_turns).astype(np.float32) for each in members]
            turns = [*_less_running_mean(costs, members, algorithm, baseline, "penalty of turn")]
    return [
        Sample(trajectory=each, advantage=float(advantage), turn_advantages=own)
        for each, advantage, own in zip(members, advantages, turns, strict=True)
    ]


def _less_running_mean(
    credit: list[np.ndarray],
    members: list[Trajectory],
    algorithm: AlgorithmSection,
    baseline: RunningBaseline,
    kind: str,
) -> list[np.ndarray]:
    """Return credit minus its running means, which this call updates.

    Args:
        credit: for each member [entry] float32.
        kind: names the entries, which are numbered turns; "": one entry for the episode.
    """
    items: list[str] = []
    tasks: list[str] = []
    for entries, member in zip(credit, members, strict=True):
        role = role_of(member.metrics)
        for number in range(len(entries)):
            where = (f" in seat {role}" if role else "") + (f" {kind} {number}" if kind else "")
            items.append(f"{member.env}/{member.item_id}{where}")
            tasks.append(f"{member.env}/{member.item_id.rpartition('-')[0]}{where}")
    less = baseline.advantages(
        [float(entry) for entries in credit for entry in entries],
        items,
        tasks,
        memory=algorithm.running_memory,
        prior=algorithm.running_prior,
    )
    return np.split(less, np.cumsum([len(entries) for entries in credit])[:-1]) if credit else []


def _outcomes(members: list[Trajectory], algorithm: AlgorithmSection) -> Tensor:
    """Return the credit of each member's whole episode, [member] float32."""
    credits = [outcome_credit(t, algorithm) for t in members]
    return torch.tensor(credits, dtype=torch.float32)  # [member]


def _group_part(members: list[Trajectory], algorithm: AlgorithmSection) -> Tensor:
    """Return each member's advantage from a comparison within its group."""
    if algorithm.advantage is Advantage.PPO or algorithm.reward_level is CreditLevel.TURN:
        return torch.zeros(len(members))
    outcomes = _outcomes(members, algorithm)
    if algorithm.advantage is Advantage.REINFORCE_PP:
        return outcomes
    return group_advantages(
        outcomes,
        baseline=_baseline(algorithm),
        normalize_std=algorithm.normalize_std and algorithm.advantage is Advantage.GRPO,
    )


def _turn_offsets(
    members: list[Trajectory], algorithm: AlgorithmSection
) -> list[np.ndarray] | None:
    """Return each member's turn advantages [num_turns]; None if turns receive no credit.

    The advantages are centred. Otherwise a group with only invalid turns would be pushed away from
    all its actions, and a group without invalid turns would gain nothing. REINFORCE++ without
    baseline leaves the centring to the batch.
    """
    if algorithm.advantage is Advantage.PPO:
        return None
    penalty = algorithm.invalid_action_penalty
    has_returns = algorithm.reward_level is CreditLevel.TURN
    if has_returns:
        credit = [_returns(t, algorithm) for t in members]
    elif algorithm.invalid_action_level is CreditLevel.TURN and penalty != 0.0:
        credit = [(-penalty * t.invalid_turns).astype(np.float32) for t in members]
    else:
        return None
    if algorithm.advantage is Advantage.REINFORCE_PP:
        return credit
    centred = less_turn_baseline(credit, _baseline(algorithm), holds_last=has_returns)
    if has_returns and algorithm.normalize_std and algorithm.advantage is Advantage.GRPO:
        deviation = np.concatenate(credit).std() + STD_EPSILON
        centred = [(each / deviation).astype(np.float32) for each in centred]
    return centred


def _baseline(algorithm: AlgorithmSection) -> Baseline:
    """Return the baseline of a member; only GRPO uses the setting `baseline`."""
    fixed = {
        Advantage.RLOO: Baseline.LEAVE_ONE_OUT,
        Advantage.REINFORCE_PP_BASELINE: Baseline.GROUP_MEAN,
    }
    return fixed.get(algorithm.advantage, algorithm.baseline)


def _returns(trajectory: Trajectory, algorithm: AlgorithmSection) -> np.ndarray:
    """Return the discounted return after each turn, [num_turns]."""
    rewards = torch.from_numpy(turn_rewards(trajectory, algorithm))
    return discounted_returns(rewards, discount=algorithm.turn_discount).numpy()


def whitened(samples: list[Sample]) -> list[Sample]:
    """Return the samples with advantages of mean 0 and deviation 1 over all tokens of the batch."""
    return _with_token_advantages(samples, lambda flat: whiten(flat, torch.ones_like(flat)))


def per_env(samples: list[Sample]) -> list[Sample]:
    """Return the samples with advantages of the same scale in every environment."""
    kinds = [sample.trajectory.env for sample in samples for _ in range(sample.num_sampled_tokens)]
    return _with_token_advantages(
        samples, lambda flat: scale_per_kind(flat, torch.ones_like(flat), kinds)
    )


def _with_token_advantages(
    samples: list[Sample], transform: Callable[[Tensor], Tensor]
) -> list[Sample]:
    """Return the samples with advantages that are transformed over all tokens of the batch."""
    counts = [sample.num_sampled_tokens for sample in samples]
    flat = np.concatenate([sample.token_advantages() for sample in samples])  # [tokens]
    parts = np.split(transform(torch.from_numpy(flat)).numpy(), np.cumsum(counts)[:-1])
    return [
        replace(sample, own_advantages=part) for sample, part in zip(samples, parts, strict=True)
    ]
