"""Law: in pairs and triples of settings the gradient is that of the printed objective."""

import random
from dataclasses import fields, replace
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from common.config.algorithm import (
    Advantage,
    Aggregation,
    AlgorithmSection,
    Baseline,
    Correction,
    CreditLevel,
    KlEstimator,
    PolicyLoss,
    Proximal,
    StateCredit,
)
from common.config.learner import (
    CriticKind,
    CriticSection,
    CriticTargets,
    LearnerSection,
    Precision,
    Timestep,
)
from learner.algorithms.m2po import second_moment_mask
from learner.algorithms.running import RunningBaseline
from learner.ingest.buffer import Group
from learner.objective.advantages import Scored, advantages_from_critic, samples_of
from learner.objective.description import objective_text
from learner.objective.loss import Denominator, policy_loss
from learner.policy.forward import Networks, Scores
from learner.policy.model import make_critic
from learner.training.ranks import Ranks
from learner.training.step import Gradients, ScoredBatch, TrainerSettings
from tests.learner.builders import make_microbatches, make_model
from tests.learner.objective.printed import Tokens, history, objective
from tests.learner.objective.ragged import VERSION, groups

VALUES: dict[str, list[Any]] = {
    "advantage": [each for each in Advantage if each is not Advantage.GRPO],
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
    "running_memory": [0.5],
    "running_prior": [0.5],
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
OF_CRITIC: dict[str, list[Any]] = {
    "timestep": [Timestep.TOKEN],
    "targets": [CriticTargets.VTRACE],
    "gae_lambda": [0.5],
    "vtrace_rho": [0.75],
    "vtrace_c": [0.5],
    "clip": [0.0625],
    "coef": [0.25],
    "whiten": [False],
    "kind": [CriticKind.MODEL],
}
CHOICES = [(key, value) for key, values in VALUES.items() for value in values]
WITH_CRITIC = [
    *((key, value) for key, values in OF_CRITIC.items() for value in values),
    *(each for each in CHOICES if each[0] not in ("advantage", "baseline", "normalize_std")),
]


def noise(seed: int, scale: float) -> torch.Tensor:
    num = sum(int(t.loss_mask.sum()) for group in groups() for t in group.members)
    return torch.from_numpy(np.random.default_rng(seed).normal(size=num) * scale)


@cache
def networks(*, has_head: bool) -> Networks:
    model = make_model()
    critic = make_critic(CriticSection(), model, policy_path="") if has_head else None
    return Networks(policy=model, critic=critic)


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
    baseline, members = RunningBaseline(), [group.members for group in groups()]
    if cfg.advantage is Advantage.RUNNING:
        before = [Group(group_id="before", members=each) for each in history(members)]
        samples_of(before, cfg, baseline)
    samples = samples_of(list(groups()), cfg, baseline)
    settings = TrainerSettings(learner=learner, algorithm=cfg, num_steps=10, engine_dtype="float32")
    has_head = cfg.advantage is Advantage.PPO and learner.critic.kind is CriticKind.HEAD
    computing = Gradients(settings, networks(has_head=has_head), Ranks())
    sizes = [sample.num_sampled_tokens for sample in samples]
    found: list[torch.Tensor] = []
    old, ends = noise(5, 0.5).float().double(), noise(6, 0.5)[: len(samples)].float().double()
    for now, begun, first in situations(cfg, learner):
        pi, entropy = now.clone().requires_grad_(), noise(3, 1.0).requires_grad_()
        values = (old + (0 if first is now is begun else noise(7, 0.1))).requires_grad_()
        if cfg.advantage is Advantage.PPO:
            scored = Scored(
                values=old.numpy().astype(np.float32),
                end_values=ends.numpy().astype(np.float32),
                logprobs=begun.numpy(),
            )
            samples = advantages_from_critic(samples, scored, cfg, learner.critic)

        def by_sample(flat: torch.Tensor) -> dict[int, torch.Tensor]:
            return dict(enumerate(flat.split(sizes)))

        reference = (begun + noise(4, 0.3)).detach()
        if printed:
            laws = objective_text(cfg, learner)
            tokens = named(samples, pi, begun, first, reference, entropy, values, old, ends)
            value = objective(laws, tokens, members)
        else:
            batch = ScoredBatch(
                samples=samples,
                version=VERSION,
                before=by_sample(begun),
                first={} if first is now else by_sample(first),
                reference=by_sample(reference) if cfg.kl_coef else {},
            )
            if cfg.correction is Correction.SECOND_MOMENT:
                mask = second_moment_mask(
                    computing._log_ratios(batch), threshold=cfg.m2_threshold
                ).float()
                batch.trusted.update(by_sample(mask))
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
            if cfg.advantage is Advantage.PPO:
                scores = replace(scores, values=values[order])
                marks = [s.state_marks for s in samples if s.state_marks is not None]
                num_states = sum(float(each.sum()) for each in marks)
                value = value - computing._value_term(micro, scores, num_states, {})
        wanted = (pi, entropy, values)
        parts = torch.autograd.grad(value, wanted, allow_unused=True, materialize_grads=True)
        found += [part.double() for part in parts]
    return torch.cat(found)


def named(samples: list[Any], *values: torch.Tensor) -> Tokens:
    pi, begun, first, reference, entropy, *of_critic = values
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
        values=of_critic[0],
        old_values=of_critic[1],
        end_values=of_critic[2],
    )


def learners() -> list[LearnerSection]:
    ways = [{}, {"ppo_epochs": 2}, {"num_minibatches": 2}]
    return [LearnerSection(precision=Precision.FP32, **way) for way in ways]


def settings(
    size: int, number: int, choices: list[tuple[str, Any]] = CHOICES
) -> list[dict[str, Any]]:
    """Return combinations of settings of unlike keys; all of them, or `number` of them drawn."""
    found = [dict(each) for each in combinations(choices, size) if len(dict(each)) == size]
    return found if len(found) <= number else random.Random(7).sample(found, number)


def test_walk_covers_every_setting_with_a_choice() -> None:
    of_experts = {"router_aux_coef", "routing_replay"}  # The networks of this test have none.
    elsewhere = {"reference_path", "filter_zero_variance", "teacher", "row_credit"} | of_experts
    assert set(VALUES) == {field.name for field in fields(AlgorithmSection)} - elsewhere


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "number"),
    [
        (1, 800),
        (2, 60),
        pytest.param(2, 1200, marks=pytest.mark.long),
        pytest.param(3, 800, marks=pytest.mark.long),
    ],
)
def test_gradient_is_that_of_the_printed_objective(size: int, number: int) -> None:
    check(settings(size, number))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "number"),
    [
        (Advantage.PPO, 10),
        (Advantage.RUNNING, 10),
        pytest.param(Advantage.PPO, 100, marks=pytest.mark.long),
        pytest.param(Advantage.RUNNING, 100, marks=pytest.mark.long),
    ],
)
def test_printed_objective_matches_the_gradient_with_a_critic(base: Advantage, number: int) -> None:
    choices = WITH_CRITIC if base is Advantage.PPO else CHOICES
    given = [each for size in (1, 2, 3) for each in settings(size, number, choices)]
    check([{"advantage": base} | each for each in given if "advantage" not in each])


def check(given_settings: list[dict[str, Any]]) -> None:
    wrong: list[str] = []
    for index, given in enumerate(given_settings):
        own = {key: value for key, value in given.items() if key not in OF_CRITIC}
        of_critic = {key: value for key, value in given.items() if key in OF_CRITIC}
        learner = learners()[index % 3]
        cfg, learner = AlgorithmSection(**own), replace(learner, critic=CriticSection(**of_critic))
        computed, expected = (gradients(cfg, learner, printed=each) for each in (False, True))
        error = (computed - expected).abs().max().item()
        if not error < 1e-6:
            wrong.append(f"{error:.2g} {given} {objective_text(cfg, learner)}")
    assert wrong == []
