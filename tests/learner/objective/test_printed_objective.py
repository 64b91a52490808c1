"""Law: in pairs and triples of settings the gradient is that of the printed objective."""

import random
from dataclasses import fields, replace
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from common.config.compute import Precision
from common.config.learning import (
    Advantage,
    Aggregation,
    AlgorithmSection,
    Baseline,
    Correction,
    CreditLevel,
    KlEstimator,
    LearnerSection,
    PolicyLoss,
    Proximal,
    StateCredit,
)
from common.wire.messages import Trajectory
from learner.batch.batching import make_microbatches
from learner.batch.credit import samples_of
from learner.ingest.group_assembly import Group
from learner.objective.describe import objective_text
from learner.objective.loss import Denominator, policy_loss
from learner.policy.forward import Networks, Scores
from learner.training.ranks import Ranks
from learner.training.step import Gradients, ScoredBatch, TrainerSettings
from tests.learner.builders import make_model, make_trajectory
from tests.learner.objective.printed import Tokens, objective

VERSION = 3
VALUES: dict[str, list[Any]] = {
    "advantage": [Advantage.RLOO, Advantage.REINFORCE_PP, Advantage.REINFORCE_PP_BASELINE],
    "baseline": [Baseline.GROUP_MEAN],
    "normalize_std": [True],
    "normalize_per_env": [True],
    "aggregation": [Aggregation.SEQUENCE, Aggregation.CONSTANT],
    "constant_tokens": [9],
    "reward_level": [CreditLevel.TURN],
    "turn_discount": [0.5],
    "state_credit": [StateCredit.GIGPO, StateCredit.ECPO, StateCredit.GAGPO],
    "state_weight": [0.5],
    "state_discount": [0.5],
    "state_prior": [3.0],
    "state_lambda": [0.25],
    "invalid_action_penalty": [0.25],
    "invalid_action_level": [CreditLevel.TURN],
    "policy_loss": [each for each in PolicyLoss if each is not PolicyLoss.PPO],
    "clip_low": [0.5],
    "clip_high": [0.5],
    "dual_clip": [0.0, 1.5],
    "dppo_delta": [0.03125],
    "correction": [each for each in Correction if each is not Correction.TOKEN_TIS],
    "tis_cap": [1.125],
    "mask_low": [0.75],
    "mask_high": [1.5],
    "geometric_low": [0.75],
    "geometric_high": [1.25],
    "m2_threshold": [0.125],
    "negative_mask_delta": [0.0625],
    "proximal": [each for each in Proximal if each is not Proximal.AUTO],
    "kl_coef": [0.25],
    "kl_estimator": [KlEstimator.K1, KlEstimator.K2],
    "drift_coef": [0.125],
    "entropy_coef": [0.5],
}
CHOICES = [(key, value) for key, values in VALUES.items() for value in values]


@cache
def groups() -> tuple[Group, ...]:
    """Build ragged episodes: turns of no token and of one, and a group of equal rewards."""
    rng = np.random.default_rng(5)
    built: list[Group] = []
    lengths = [[(2, 1, 3), (0, 2), (1,)], [(1, 1, 0, 2), (3, 2, 1)], [(2, 1), (1, 2)]]
    rewards = [[0.25, 1.0, 0.5], [0.0, 0.75], [0.5, 0.5]]
    for number, (sizes, worth) in enumerate(zip(lengths, rewards, strict=True)):
        members: list[Trajectory] = []
        for member, turns in enumerate(sizes):
            mask, turn_ids = [0], [0]
            for turn, size in enumerate(turns):
                mask += [0] + [1] * size
                turn_ids += [turn] * (size + 1)
            ids = rng.integers(0, 4, size=len(mask)).tolist()
            logprobs = (-rng.integers(16, 160, size=sum(mask)) / 64).tolist()
            plain = make_trajectory(
                ids, mask, logprobs=logprobs, group_id=f"g{number}", member=member
            )
            versions = np.where(plain.loss_mask, rng.integers(0, VERSION + 1, len(mask)), -1)
            invalid = rng.random(len(turns)) < 0.4
            rises = np.sort(rng.integers(0, 5, size=len(turns)) / 4 * worth[member])
            members.append(
                replace(
                    plain,
                    env=f"env{number % 2}",
                    num_turns=len(turns),
                    reward=worth[member],
                    turn_scores=np.append(rises[:-1], worth[member]).astype(np.float32),
                    invalid_turns=invalid,
                    num_invalid_actions=int(invalid.sum()),
                    turn_ids=np.array(turn_ids, dtype=np.int32),
                    turn_states=np.array([0, 1, 1, 0][: len(turns)], dtype=np.int32),
                    versions=versions.astype(np.int32),
                )
            )
        built.append(Group(group_id=f"g{number}", members=members))
    return tuple(built)


def noise(seed: int, scale: float) -> torch.Tensor:
    num = sum(int(t.loss_mask.sum()) for group in groups() for t in group.members)
    return torch.from_numpy(np.random.default_rng(seed).normal(size=num) * scale)


@cache
def networks() -> Networks:
    return Networks(policy=make_model())


def situations(cfg: AlgorithmSection, learner: LearnerSection) -> list[tuple[torch.Tensor, ...]]:
    """Return (pi, at the batch's beginning, at the first update) of the updates of a batch."""
    mu = torch.cat(
        [torch.from_numpy(t.logprobs[t.loss_mask]).double() for g in groups() for t in g.members]
    )
    begun = (mu + noise(1, 0.5)).clamp(max=-0.01)
    later = (begun + noise(2, 0.4)).clamp(max=-0.01)
    found = [(begun, begun, begun)]
    if learner.num_minibatches > 1:
        found.append((later, begun, later))
    if learner.ppo_epochs > 1:
        found.append((later, begun, begun))
    return found


def gradients(
    cfg: AlgorithmSection, learner: LearnerSection, *, printed: bool = False
) -> torch.Tensor:
    """Return the gradients by pi and by the entropy in all situations, computed or as printed."""
    samples = samples_of(list(groups()), cfg)
    settings = TrainerSettings(learner=learner, algorithm=cfg, num_steps=10, engine_dtype="float32")
    computing = Gradients(settings, networks(), Ranks())
    sizes = [sample.num_sampled_tokens for sample in samples]
    found: list[torch.Tensor] = []
    for now, begun, first in situations(cfg, learner):
        pi, entropy = now.clone().requires_grad_(), noise(3, 1.0).requires_grad_()

        def by_sample(flat: torch.Tensor) -> dict[int, torch.Tensor]:
            return dict(enumerate(flat.split(sizes)))

        reference = (begun + noise(4, 0.3)).detach()
        if printed:
            laws = objective_text(cfg, learner)
            tokens = named(samples, pi, begun, first, reference, entropy)
            value = objective(laws, tokens, [group.members for group in groups()])
        else:
            batch = ScoredBatch(
                samples=samples,
                version=VERSION,
                before=by_sample(begun),
                first={} if first is now else by_sample(first),
                reference=by_sample(reference) if cfg.kl_coef else {},
            )
            if cfg.correction is Correction.SECOND_MOMENT:
                batch.trusted.update(computing._trusted(batch))
            (micro,) = make_microbatches(
                samples, range(len(samples)), max_tokens=10**6, device="cpu", is_packed=True
            )
            order = torch.cat(
                [torch.arange(sum(sizes)).split(sizes)[i] for i in micro.sample_indices]
            )
            scores = Scores(
                logprobs=pi[order], entropy=entropy[order], values=None, end_values=None
            )
            inputs = computing.loss_inputs(batch, micro, scores)
            counts = Denominator(num_tokens=sum(sizes), num_sequences=len(samples))
            value = -policy_loss(inputs, counts, cfg)[0]
        parts = torch.autograd.grad(value, (pi, entropy), allow_unused=True, materialize_grads=True)
        found += [part.double() for part in parts]
    return torch.cat(found)


def named(samples: list[Any], *values: torch.Tensor) -> Tokens:
    pi, begun, first, reference, entropy = values
    trajectories = [sample.trajectory for sample in samples]
    counts = [sample.num_sampled_tokens for sample in samples]
    episode = np.repeat(np.arange(len(samples)), counts)
    turns = np.concatenate([t.turn_ids[t.loss_mask] for t in trajectories])
    logprobs = np.concatenate([t.logprobs[t.loss_mask] for t in trajectories])
    lag = VERSION - np.concatenate([t.versions[t.loss_mask] for t in trajectories])
    return Tokens(
        pi=pi,
        mu=torch.from_numpy(logprobs).double(),
        prox=begun,
        first=first,
        reference=reference,
        entropy=entropy,
        lag=torch.from_numpy(lag).double(),
        episode=torch.from_numpy(episode),
        turn=torch.from_numpy(turns + 100 * episode),
    )


def learners() -> list[LearnerSection]:
    ways = [{}, {"ppo_epochs": 2}, {"num_minibatches": 2}]
    return [LearnerSection(precision=Precision.FP32, **way) for way in ways]


def settings(size: int, number: int) -> list[dict[str, Any]]:
    """Return combinations of settings of unlike keys; all of them, or `number` of them drawn."""
    found = [dict(each) for each in combinations(CHOICES, size) if len(dict(each)) == size]
    return found if len(found) <= number else random.Random(7).sample(found, number)


def test_every_setting_that_has_a_choice_is_walked() -> None:
    elsewhere = {"reference_path", "filter_zero_variance", "running_memory", "running_prior"}
    assert set(VALUES) == {field.name for field in fields(AlgorithmSection)} - elsewhere


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradient_is_that_of_the_printed_objective(size: int) -> None:
    wrong: list[str] = []
    for index, given in enumerate(settings(size, 1200 if size == 2 else 800)):
        cfg, learner = AlgorithmSection(**given), learners()[index % 3]
        computed, expected = (gradients(cfg, learner, printed=each) for each in (False, True))
        error = (computed - expected).abs().max().item()
        if not error < 1e-6:
            wrong.append(f"{error:.2g} {given} {objective_text(cfg, learner)}")
    assert wrong == []
