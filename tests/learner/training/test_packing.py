"""Laws of packing: the loss and its gradient are those of padded sequences."""

from dataclasses import replace
from typing import cast

import pytest
import torch

from common.config.learning import (
    Advantage,
    Aggregation,
    AlgorithmSection,
    Attention,
    Correction,
    CriticKind,
    CriticSection,
    Layout,
    LearnerSection,
    PolicyLoss,
    Precision,
    Proximal,
)
from learner.policy.critic import Critic
from learner.policy.forward import Networks
from learner.training.ranks import Ranks
from learner.training.step import Gradient, Gradients, ScoredBatch, TrainerSettings
from learner.training.trainer import Trainer
from tests.learner.builders import make_model, make_model_with_adapters, make_samples

PPO = AlgorithmSection(advantage=Advantage.PPO)
ALGORITHMS = {
    "by token": (AlgorithmSection(), {}),
    "by sequence, recomputed": (
        AlgorithmSection(aggregation=Aggregation.SEQUENCE, proximal=Proximal.RECOMPUTED),
        {"is_checkpointed": True},
    ),
    "constant, per sequence weights": (
        AlgorithmSection(
            aggregation=Aggregation.CONSTANT, correction=Correction.SEQUENCE_TIS, drift_coef=0.1
        ),
        {"has_adapters": True},
    ),
    "gspo": (
        AlgorithmSection(policy_loss=PolicyLoss.GSPO, aggregation=Aggregation.SEQUENCE),
        {"has_adapters": True, "is_checkpointed": True},
    ),
    "critic's head": (PPO, {"critic": CriticKind.HEAD}),
    "critic's own trunk": (
        replace(PPO, aggregation=Aggregation.SEQUENCE, kl_coef=0.1),
        {"critic": CriticKind.MODEL, "is_checkpointed": True},
    ),
    "reference and entropy": (AlgorithmSection(kl_coef=0.1, entropy_coef=0.01), {}),
    "adapters' base as reference": (AlgorithmSection(kl_coef=0.1), {"has_adapters": True}),
}
PARTS = ([0, 1, 2, 3, 4, 5], [5, 1, 2])  # the whole batch, and a minibatch of it
PADDED, PACKED = Layout.PADDED, Layout.PACKED


def networks_of(
    algorithm: AlgorithmSection,
    *,
    has_adapters: bool = False,
    is_checkpointed: bool = False,
    critic: CriticKind | None = None,
) -> Networks:
    model = make_model_with_adapters() if has_adapters else make_model()
    trunk = cast(torch.nn.Module, make_model(seed=2).model) if critic is CriticKind.MODEL else None
    values = None if critic is None else Critic(model.config.hidden_size, cast(None, trunk))
    if values is not None:
        torch.nn.init.normal_(values.head.weight, generator=torch.Generator().manual_seed(3))
    for each in (model, trunk):
        for weight in [] if each is None else each.parameters():
            weight.data.mul_(0.5)  # of a common size, so that rounding is, too
        if is_checkpointed and each is not None:
            each.gradient_checkpointing_enable(  # pyright: ignore
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
    has_reference = algorithm.kl_coef > 0
    return Networks(
        policy=model,
        critic=values,
        reference=make_model(seed=1) if has_reference and not has_adapters else None,
        is_base_reference=has_reference and has_adapters,
    )


def settings_of(algorithm: AlgorithmSection, **learner: object) -> TrainerSettings:
    section = LearnerSection(
        warmup_steps=0,
        precision=Precision.FP32,
        critic=CriticSection(whiten=False),
        **learner,  # pyright: ignore[reportArgumentType]
    )
    return TrainerSettings(learner=section, algorithm=algorithm, num_steps=10)


def computed(
    algorithm: AlgorithmSection, networks: Networks, part: list[int], **learner: object
) -> tuple[ScoredBatch, Gradient, torch.Tensor]:
    """Return a scored batch and the gradient of a part of it, flat."""
    settings = settings_of(algorithm, **learner)
    gradients = Gradients(settings, networks, Ranks())
    batch = gradients.prepare(make_samples(), version=1)
    found = gradients.accumulate(batch, part)
    modules = [networks.policy] + ([] if networks.critic is None else [networks.critic])
    parts = [p.grad.flatten() for m in modules for p in m.parameters() if p.grad is not None]
    return batch, found, torch.cat(parts)


@pytest.mark.parametrize("attention", [Attention.FUSED, Attention.PRODUCTS])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_packed_sequences_have_the_loss_and_gradient_of_padded_ones(
    name: str, attention: Attention
) -> None:
    algorithm, kind = ALGORITHMS[name]
    for part in PARTS:
        outcomes = []
        for layout, max_tokens in ((PADDED, 10_000), (PACKED, 10_000), (PACKED, 25)):
            how = {"layout": layout, "attention": attention}
            networks = networks_of(algorithm, **kind)
            outcomes.append(
                computed(algorithm, networks, part, max_tokens_per_microbatch=max_tokens, **how)
            )
        (batch, expected, gradient), *others = outcomes
        assert gradient.norm() > 1e-3
        for packed_batch, packed, packed_gradient in others:
            assert (packed_gradient - gradient).norm() / gradient.norm() < 1e-6
            for metric, value in expected.sums.items():
                assert packed.sums[metric] == pytest.approx(value, rel=1e-6, abs=1e-6), metric
            for index, logprobs in expected.logprobs.items():
                torch.testing.assert_close(packed.logprobs[index], logprobs, atol=2e-6, rtol=1e-6)
            for index, logprobs in batch.before.items():
                torch.testing.assert_close(packed_batch.before[index], logprobs, atol=2e-6, rtol=0)


@pytest.mark.parametrize("attention", [Attention.FUSED, Attention.PRODUCTS])
def test_packed_steps_repeat_themselves_bit_for_bit(attention: Attention) -> None:
    states = []
    for _ in range(2):
        networks = networks_of(PPO, critic=CriticKind.HEAD)
        settings = settings_of(
            PPO, layout=PACKED, attention=attention, num_minibatches=2, ppo_epochs=2
        )
        trainer = Trainer(settings, networks)
        for version in range(2):
            trainer.train_on(make_samples(seed=version), version=version, must_train=True)
        states.append(networks.policy.state_dict())
    for name, tensor in states[0].items():
        assert tensor.equal(states[1][name]), name
