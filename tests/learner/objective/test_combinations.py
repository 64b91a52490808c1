"""Law: in every combination of settings a knob changes a gradient, or is named as doing nothing."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

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
from common.config.learner import ControllerSection, CriticSection, LearnerSection, Timestep
from learner.algorithms.interface import LossInputs
from learner.algorithms.m2po import second_moment_mask
from learner.algorithms.running import RunningBaseline
from learner.batch.batching import Sample
from learner.ingest.buffer import Group
from learner.objective.advantages import Scored, advantages_from_critic, samples_of
from learner.objective.description import dead_knobs, proximal_in_use
from learner.objective.loss import Denominator, anchor_and_weights, kl_weights, policy_loss
from tests.learner.builders import make_microbatches, make_trajectory

VERSION = 2
# Log ratios to the sampler before the step, and how far an update moves an episode of a member.
RATIOS = ([-0.1, 0.14, 0.4], [0.9, -0.4, 0.3], [0.12, -0.12])  # means by group and member
SPREAD = {3: [-1.2, 0.0, 1.2], 4: [-1.2, 0.0, 0.05, 1.15], 5: [-1.2, -0.3, 0.0, 0.25, 1.25]}
MOVES = [-0.1, 0.15, 0.3]


def groups() -> list[Group]:
    """Build groups of three, three and two episodes of one or two turns, at lags 0 to 2."""
    built: list[Group] = []
    for number in range(3):
        members = []
        for member in range(len(RATIOS[number])):
            mask = [0, 1, 1, 0, 1, 1, 1][: 5 + member]
            trajectory = make_trajectory(
                [1] * len(mask), mask, logprobs=[-2.5] * sum(mask), group_id=f"g{number}"
            )
            reward = [[0.1, 0.5, 0.25], [0.2, 1.0, 0.5], [0.9, 0.1]][number][member]
            num_turns = 1 if member == 1 else 2
            versions = np.array([-1, 2, 1, -1, 0, 2, 1][: len(mask)], dtype=np.int32)
            members.append(
                replace(
                    trajectory,
                    member=member,
                    env=f"env{number % 2}",
                    num_turns=num_turns,
                    reward=reward,
                    turn_scores=np.array([reward / 3, reward][-num_turns:], dtype=np.float32),
                    invalid_turns=np.array([member == 0, member == 2][:num_turns]),
                    num_invalid_actions=int(member != 1),
                    turn_ids=np.array([0, 0, 0, 1, 1, 1, 1][: len(mask)], dtype=np.int32)
                    * (num_turns - 1),
                    versions=versions,
                )
            )
        built.append(Group(group_id=f"g{number}", members=members))
    return built


GROUPS = groups()
MEMBERS = [member for group in GROUPS for member in group.members]


def policy(index: int, num_updates: int) -> Tensor:
    """Return [tokens] nats of an episode under the policy after so many updates of the batch."""
    group, member = divmod(index, 3)
    spread = torch.tensor(SPREAD[3 + member])
    moved = num_updates * (MOVES[member] + 0.2 * spread)
    return -2.5 + RATIOS[group][member] + spread - spread.mean() + moved


def samples(algorithm: AlgorithmSection, learner: LearnerSection) -> list[Sample]:
    baseline = RunningBaseline()
    for seen in (GROUPS[::-1], GROUPS[1:]):  # batches before, of the same items
        if algorithm.advantage is Advantage.RUNNING:
            samples_of(seen, algorithm, baseline)
    found = samples_of(GROUPS, algorithm, baseline)
    if algorithm.advantage is not Advantage.PPO:
        return found
    num_tokens = sum(sample.num_sampled_tokens for sample in found)
    scored = Scored(
        values=np.linspace(-0.2, 0.9, num_tokens, dtype=np.float32),
        end_values=np.zeros(len(found), dtype=np.float32),
        logprobs=torch.cat([policy(i, 0) for i in range(len(found))]).numpy(),
    )
    return advantages_from_critic(found, scored, algorithm, learner.critic)


def gradient(algorithm: AlgorithmSection, learner: LearnerSection) -> Tensor:
    """Return the gradients of all updates of a batch by the log-probabilities of its tokens."""
    batch, proximal = samples(algorithm, learner), proximal_in_use(algorithm, learner)
    found: list[Tensor] = []
    for update in range(learner.ppo_epochs * learner.num_minibatches):
        part = update % learner.num_minibatches
        indices = [i for i in range(len(batch)) if i % learner.num_minibatches == part]
        (micro,) = make_microbatches(batch, indices, max_tokens=999, device="cpu")
        order = micro.sample_indices
        new = torch.cat([policy(i, update) for i in order]).requires_grad_()
        first = 0 if proximal is Proximal.RECOMPUTED else part  # the update when it was scored
        seen = torch.cat([policy(i, first) for i in order])
        anchor, weights = anchor_and_weights(
            new, seen, micro, algorithm, proximal=proximal, version=VERSION
        )
        if algorithm.correction is Correction.SECOND_MOMENT:
            weights = weights * torch.cat([trusted(len(batch), algorithm)[i] for i in order])
        inputs = LossInputs(
            new_logprobs=new,
            anchor_logprobs=anchor,
            sampler_logprobs=micro.sampler_logprobs,
            advantages=micro.advantages,
            is_weights=weights,
            sequence_ids=micro.sequence_ids,
            turn_ids=micro.turn_ids,
            num_sequences=micro.num_sequences,
            entropy=-0.5 * new,
            reference_logprobs=torch.cat([policy(i, 0) - 0.3 * (i + 1) for i in order]),
            kl_weights=kl_weights(new, micro, algorithm),
        )
        sizes = Denominator(num_tokens=len(new), num_sequences=len(order))
        policy_loss(inputs, sizes, algorithm)[0].backward()
        assert new.grad is not None
        found.append(new.grad)
    return torch.cat(found)


def first_clipped_frac(algorithm: AlgorithmSection, learner: LearnerSection) -> float:
    """Return the share of tokens that a bound decides in a batch's first update."""
    batch, proximal = samples(algorithm, learner), proximal_in_use(algorithm, learner)
    (micro,) = make_microbatches(batch, range(len(batch)), max_tokens=999, device="cpu")
    now = torch.cat([policy(i, 0) for i in micro.sample_indices])
    anchor, weights = anchor_and_weights(
        now, now, micro, algorithm, proximal=proximal, version=VERSION
    )
    inputs = LossInputs(
        new_logprobs=now,
        anchor_logprobs=anchor,
        sampler_logprobs=micro.sampler_logprobs,
        advantages=micro.advantages,
        is_weights=weights,
        sequence_ids=micro.sequence_ids,
        turn_ids=micro.turn_ids,
        num_sequences=micro.num_sequences,
    )
    sizes = Denominator(num_tokens=len(now), num_sequences=len(batch))
    return float(policy_loss(inputs, sizes, algorithm)[1]["policy/clipped_frac"])


@pytest.mark.parametrize(("num_epochs", "num_minibatches"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("proximal", list(Proximal))
@pytest.mark.parametrize("kind", list(PolicyLoss))
def test_gate_of_clipping_acts_or_is_named(
    kind: PolicyLoss, proximal: Proximal, num_epochs: int, num_minibatches: int
) -> None:
    algorithm = AlgorithmSection(
        policy_loss=kind, proximal=proximal, clip_low=0.05, clip_high=0.05, dppo_delta=0.01
    )
    learner = LearnerSection(
        controller=ControllerSection(clip_gate=0.01),
        ppo_epochs=num_epochs,
        num_minibatches=num_minibatches,
    )
    key = "learner.controller.clip_gate="
    is_named = any(line.startswith(key) for line in dead_knobs(algorithm, learner))
    assert (first_clipped_frac(algorithm, learner) > 0.01) == (not is_named)


def trusted(num: int, algorithm: AlgorithmSection) -> list[Tensor]:
    """Return the tokens [tokens] of each episode that the whole batch's second moment leaves."""
    ratios = [policy(i, 0) + 2.5 for i in range(num)]
    kept = second_moment_mask(torch.cat(ratios), threshold=algorithm.m2_threshold).float()
    return list(kept.split([len(each) for each in ratios]))


TURN = CreditLevel.TURN
GEOMETRIC = {"correction": Correction.GEOMETRIC, "geometric_low": 0.6, "geometric_high": 3.5}
SECOND = {"correction": Correction.SECOND_MOMENT, "m2_threshold": 0.3}
BOUNDED = (Correction.GEOMETRIC, Correction.SECOND_MOMENT)  # Their bounds lie within the ratios.
CONTEXTS: list[dict[str, Any]] = [
    *({"advantage": kind} for kind in Advantage),
    *({"policy_loss": kind} for kind in PolicyLoss),
    *({"aggregation": kind} for kind in Aggregation),
    *({"proximal": kind} for kind in Proximal),
    *({"correction": kind} for kind in Correction if kind not in BOUNDED),
    *(GEOMETRIC, SECOND, {"negative_mask_delta": 0.2}),
    *({"state_credit": kind} for kind in StateCredit),
    *({"normalize_std": True}, {"normalize_per_env": True}, {"reward_level": TURN}),
    *({"invalid_action_penalty": 0.4}, {"turn_discount": 0.7}, {"dual_clip": 0.0}),
    *({"dual_clip": 1.5}, {"tis_cap": 1.1}, {"kl_coef": 0.1}, {"drift_coef": 0.1}),
    {"invalid_action_penalty": 0.4, "invalid_action_level": TURN},
    *({"ppo_epochs": 2}, {"num_minibatches": 2}, {"timestep": Timestep.TOKEN}),
]
PROBES: list[tuple[str, Any]] = [
    ("baseline", Baseline.GROUP_MEAN),
    *(("normalize_std", True), ("normalize_per_env", True), ("constant_tokens", 100)),
    *(("turn_discount", 0.5), ("invalid_action_penalty", 0.3), ("invalid_action_level", TURN)),
    *(("clip_low", 0.05), ("clip_high", 0.05), ("dual_clip", 1.2), ("dppo_delta", 0.01)),
    *(("correction", Correction.NONE), ("tis_cap", 0.7), ("tis_cap", 4.0)),
    *(("mask_low", 0.8), ("mask_high", 1.5), ("geometric_low", 0.7), ("geometric_high", 1.3)),
    *(("negative_mask_delta", 0.05), ("kl_coef", 0.2), ("kl_estimator", KlEstimator.K2)),
    *(("drift_coef", 0.2), ("entropy_coef", 0.2), ("m2_threshold", 0.15)),
    *(("state_credit", StateCredit.GIGPO), ("state_weight", 0.5), ("state_discount", 0.5)),
    *(("state_prior", 3.0), ("state_lambda", 0.25)),
    *(("running_memory", 0.1), ("running_prior", 0.3)),
    *(("policy_loss", kind) for kind in PolicyLoss if kind is not PolicyLoss.PPO),
    ("proximal", Proximal.RECOMPUTED),
]
OF_LEARNER = ("ppo_epochs", "num_minibatches")


def configured(settings: dict[str, Any]) -> tuple[AlgorithmSection, LearnerSection]:
    critic = CriticSection(timestep=settings.get("timestep", Timestep.TURN))
    learner = {name: settings[name] for name in OF_LEARNER if name in settings}
    others = {k: v for k, v in settings.items() if k not in (*OF_LEARNER, "timestep")}
    return AlgorithmSection(**others), LearnerSection(critic=critic, **learner)


def contexts(seed: int, num_pairs: int) -> Iterator[dict[str, Any]]:
    """Yield every setting alone and a draw of the pairs that do not contradict each other."""
    yield from CONTEXTS
    pairs = [one | other for one, other in combinations(CONTEXTS, 2) if not one.keys() & other]
    yield from random.Random(seed).sample(pairs, num_pairs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_pairs", "every"), [(3, 4), pytest.param(40, 1, marks=pytest.mark.long)]
)
def test_every_knob_changes_a_gradient_or_is_named(num_pairs: int, every: int) -> None:
    """Each context has every fourth probe, and the next one has their neighbours."""
    wrong: list[str] = []
    for number, context in enumerate(contexts(seed=0, num_pairs=num_pairs)):
        before = gradient(*configured(context))
        for name, value in PROBES[number % every :: every]:
            if name in context:
                continue
            changed = configured(context | {name: value})
            if proximal_in_use(*changed) is value and value is proximal_in_use(
                *configured(context)
            ):
                continue  # it spells out the default
            is_named = any(line.startswith(f"algorithm.{name}=") for line in dead_knobs(*changed))
            after = gradient(*changed)
            is_same = after.allclose(before, rtol=1e-5, atol=1e-7)
            if is_same != is_named:
                what = "does nothing and is not named" if is_same else "is named and does something"
                wrong.append(f"{name}={value} {what} in {context}")
    assert wrong == []
