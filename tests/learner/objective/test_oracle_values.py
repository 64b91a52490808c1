"""Estimates of a critic against their definitions as sums, on ragged episodes."""

from itertools import pairwise, product

import numpy as np
import pytest
import torch

from common.config.algorithm import Advantage, AlgorithmSection, CreditLevel
from common.config.learner import CriticSection, Timestep
from common.wire.messages import Trajectory
from learner.algorithms.critic import value_loss
from learner.batch.batching import Sample
from learner.objective.advantages import Scored, advantages_from_critic, samples_of
from tests.learner.objective.ragged import groups

GAMMA, LAMBDA = 0.9, 0.8


def scored(samples: list[Sample]) -> Scored:
    rng = np.random.default_rng(2)
    num = sum(sample.num_sampled_tokens for sample in samples)
    return Scored(
        values=rng.normal(0.4, 0.3, num).astype(np.float32),
        end_values=rng.normal(0.4, 0.3, len(samples)).astype(np.float32),
        logprobs=np.zeros(num, dtype=np.float32),
    )


def definition(
    e: Trajectory, values: np.ndarray, end: float, step: Timestep, level: CreditLevel
) -> tuple[np.ndarray, np.ndarray]:
    """Return (advantages, targets) [tokens] by arXiv:1506.02438, equation 16, as a double sum."""
    turns = e.turn_ids[e.loss_mask].tolist()
    present = sorted(set(turns))
    firsts = [turns.index(t) for t in present] if step is Timestep.TURN else [*range(len(turns))]
    paid = np.zeros(len(turns))  # The reward lies on the last token of its turn or before.
    scores = [e.start_score, *e.turn_scores.tolist()]
    is_cut = e.end_reason == "horizon"
    for turn in range(e.num_turns):
        pay = scores[turn + 1] - scores[turn]
        if level is CreditLevel.EPISODE:
            is_paid = turn == e.num_turns - 1 and not is_cut
            pay = e.reward - e.start_score if is_paid else 0.0
        owner = max([t for t in present if t <= turn], default=present[0])
        paid[len(turns) - 1 - turns[::-1].index(owner)] += pay
    gamma = GAMMA if step is Timestep.TURN else 1.0
    bounds = [*firsts, len(turns)]
    rewards = [paid[a:b].sum() for a, b in pairwise(bounds)]
    v = [float(values[a]) for a in firsts]
    bootstrap = 0.0
    if is_cut:
        value = (v[-1] - rewards[-1]) / gamma if e.loss_mask[-1] else end
        reached = e.reward - e.start_score if level is CreditLevel.EPISODE else 0.0
        least = reached + min(value, 0.0) if gamma == 1.0 and e.start_score == 0.0 else value
        bootstrap = min(max(value, least), 1 - e.reward + reached)
    following = [*v[1:], bootstrap]
    deltas = [r + gamma * n - own for r, n, own in zip(rewards, following, v, strict=True)]
    number = len(deltas)
    gae = [
        sum((gamma * LAMBDA) ** (k - s) * deltas[k] for k in range(s, number))
        for s in range(number)
    ]
    sizes = np.diff(bounds)
    return np.repeat(gae, sizes), np.repeat(np.array(gae) + v, sizes)


@pytest.mark.parametrize(("step", "level"), [*product(Timestep, CreditLevel)])
def test_gae_and_its_targets_are_their_definition(step: Timestep, level: CreditLevel) -> None:
    algorithm = AlgorithmSection(
        advantage=Advantage.PPO, reward_level=level, turn_discount=GAMMA if step == "turn" else 1.0
    )
    samples = samples_of(list(groups()), algorithm)
    told = scored(samples)
    critic = CriticSection(timestep=step, gae_lambda=LAMBDA, whiten=False)
    found = advantages_from_critic(samples, told, algorithm, critic)
    cuts = np.cumsum([sample.num_sampled_tokens for sample in samples])[:-1]
    for sample, values, end in zip(
        found, np.split(told.values, cuts), told.end_values, strict=True
    ):
        advantages, targets = definition(sample.trajectory, values, float(end), step, level)
        np.testing.assert_allclose(sample.token_advantages(), advantages, atol=1e-6, rtol=0)
        assert sample.value_targets is not None
        np.testing.assert_allclose(sample.value_targets, targets, atol=1e-6, rtol=0)


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_computedand_gradient_match_hand_computed_numbers(clip: float) -> None:
    rng = np.random.default_rng(1)
    now, target, old = (rng.normal(size=9) for _ in range(3))
    marks = np.array([1, 0, 1, 1, 0, 0, 1, 1, 1]) / 6
    loss, slopes = 0.0, []
    for v, t, o, w in zip(now, target, old, marks, strict=True):
        held = o + min(max(v - o, -clip), clip) if clip else v
        free, bound = (v - t) ** 2, (held - t) ** 2
        loss += w * max(free, bound) / 2
        moves = not clip or abs(v - o) < clip or free > bound
        slopes.append(w * (v - t) if moves else 0.0)
    values = torch.from_numpy(now).requires_grad_()
    given = (torch.from_numpy(each) for each in (target, old, marks))
    computed = value_loss(values, *given, clip=clip)
    computed.backward()
    assert computed.item() == pytest.approx(loss, abs=1e-6)
    assert values.grad is not None
    np.testing.assert_allclose(values.grad.numpy(), slopes, atol=1e-6, rtol=0)
