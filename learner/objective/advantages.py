"""Groups -> samples: each trajectory with its advantages, by the estimator of the configuration.

`learner/algorithms` has the estimators. Without a critic the advantage of a turn is its credit
minus a baseline of the group or the batch. With a critic, `advantages_from_critic` computes the
advantages, after the critic has scored the batch.
"""
# torch's type stubs lack numpy's element types:
# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from common.config.algorithm import Advantage, AlgorithmSection
from common.config.learner import CriticSection
from common.errors import LongstrideError
from common.wire.messages import Trajectory
from learner.algorithms.critic import with_advantages
from learner.algorithms.interface import STD_EPSILON
from learner.algorithms.reinforce_pp import whiten
from learner.algorithms.rewards import outcome_credit
from learner.algorithms.running import RunningBaseline, running_advantages
from learner.algorithms.table import estimator_of
from learner.algorithms.trees import with_trees
from learner.batch.batching import Sample, episodes_of, rows_of, with_row_credit
from learner.ingest.buffer import Group


def group_has_signal(members: list[Trajectory], algorithm: AlgorithmSection) -> bool:
    """Return False if all members have equal credit, so that every advantage is zero.

    Algorithms whose baseline is not computed within the group always return True. So do those with
    a teacher, which teaches each token.
    """
    estimator = estimator_of(algorithm)
    if algorithm.teacher.is_on or not estimator.is_group_relative or estimator.of_group is None:
        return True
    advantages, turns = estimator.of_group(_outcomes(members, algorithm), members, algorithm)
    return bool(advantages.any()) or any(of_turns.any() for of_turns in turns or [])


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
    estimator = estimator_of(algorithm)
    samples: list[Sample] = []
    batches = [group.members for group in groups]
    if algorithm.advantage is Advantage.RUNNING:
        batches = [[member for group in groups for member in group.members]]
    for members in batches:
        rewards = _outcomes(members, algorithm)
        advantages = torch.zeros(len(members))
        turns = None
        if algorithm.advantage is Advantage.RUNNING:
            means = baseline or RunningBaseline()
            advantages, turns = running_advantages(rewards, members, algorithm, means)
        elif estimator.of_group is not None:
            advantages, turns = with_trees(members, rewards, algorithm, estimator.of_group)
        samples += [
            Sample(trajectory=trajectory, advantage=float(advantage), turn_advantages=of_turns)
            for trajectory, advantage, of_turns in zip(
                members, advantages, turns or [None] * len(members), strict=True
            )
        ]
    if estimator.is_whitened:
        samples = whitened(samples)
    elif algorithm.normalize_per_env:
        samples = per_env(samples)
    samples = [with_row_credit(sample, algorithm.row_credit) for sample in samples]
    return _with_scores(samples, groups) if algorithm.teacher.is_on else samples


def _outcomes(members: list[Trajectory], algorithm: AlgorithmSection) -> Tensor:
    """Return the credit of each member's whole episode, [member] float32."""
    credits = [outcome_credit(trajectory, algorithm) for trajectory in members]
    return torch.tensor(credits, dtype=torch.float32)


def _with_scores(samples: list[Sample], groups: list[Group]) -> list[Sample]:
    """Return the samples with the teacher's columns.

    Raises: LongstrideError: an episode has no scores.
    """
    scores = {name: score for group in groups for name, score in group.scores.items()}
    taught: list[Sample] = []
    for sample in samples:
        name = sample.trajectory.episode_id
        if name not in scores:
            raise LongstrideError(f"episode {name} has no scores of algorithm.teacher")
        taught.append(replace(sample, **scores[name].columns))
    return taught


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
            values=of_sample,
            bootstrap=float(end),
            log_ratios=now - sample.trajectory.logprobs[sample.trajectory.loss_mask],
            algorithm=algorithm,
            critic=critic,
        )
        for sample, of_sample, end, now in zip(samples, values, end_values, logprobs, strict=True)
    ]
    if algorithm.normalize_per_env:
        estimated = per_env(estimated)
    return rows_of(whitened(estimated) if critic.whiten else estimated)


def whitened(samples: list[Sample]) -> list[Sample]:
    """Return the samples with advantages of mean 0 and deviation 1 over all tokens of the batch."""
    return _with_token_advantages(samples, lambda flat: whiten(flat, torch.ones_like(flat)))


def per_env(samples: list[Sample]) -> list[Sample]:
    """Return the samples with advantages of the same scale in every environment."""
    kinds = [sample.trajectory.env for sample in samples for _ in range(sample.num_sampled_tokens)]
    return _with_token_advantages(
        samples, lambda flat: _scale_per_kind(flat, torch.ones_like(flat), kinds)
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


def _scale_per_kind(values: Tensor, weights: Tensor, kinds: list[str]) -> Tensor:
    """Return values divided by the weighted root mean square of their own kind.

    In a batch of several environments, each environment then has advantages of the same scale,
    whatever the deviation of its rewards. The mean does not change: group baselines have already
    centred it.

    Args:
        values: [entry].
        weights: [entry] >= 0.
        kinds: [entry], the environment of each.

    Source: task advantage normalisation, AgentRL, arXiv:2510.04206.
    """
    scaled = values.float().clone()
    for kind in sorted(set(kinds)):
        is_kind = torch.tensor([name == kind for name in kinds])
        w = weights[is_kind].double()
        spread = ((values[is_kind].double() ** 2 * w).sum() / w.sum()).sqrt()
        if spread > 0:
            scaled[is_kind] = (values[is_kind].double() / (spread + STD_EPSILON)).float()
    return scaled
