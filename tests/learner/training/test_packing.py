"""Laws of packing: the loss and its gradient are those of padded sequences."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch

from common.config.algorithm import (
    Advantage,
    Aggregation,
    AlgorithmSection,
    Correction,
    PolicyLoss,
    Proximal,
)
from common.config.learner import (
    Attention,
    CriticKind,
    CriticSection,
    Layout,
    LearnerSection,
    LoraSection,
    Precision,
)
from common.errors import ConfigError
from learner.batch.batching import MicroBatch, collate_tokens
from learner.policy.forward import Networks
from learner.policy.kernels import compiling
from learner.policy.kernels.compiling import compile_parts
from learner.policy.lora import add_adapters
from learner.policy.model import Critic
from learner.training.ranks import Ranks
from learner.training.step import Gradient, Gradients, ScoredBatch, TrainerSettings
from learner.training.trainer import Trainer
from tests.learner.builders import (
    make_microbatches,
    make_model,
    make_model_with_adapters,
    make_samples,
    recompute,
    with_prompts,
)

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
# Layout, tokens of a microbatch, and whether prefixes are shared: by part of the batch.
WAYS = (
    [(PACKED, 45, False), (PACKED, 10_000, True)],
    [(PACKED, 10_000, False), (PACKED, 45, True)],
)


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
            weight.data.mul_(0.5)  # Equal magnitudes give equal rounding.
        if is_checkpointed and each is not None:
            recompute(each)
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
    batch = gradients.prepare(with_prompts(make_samples()), version=1)
    found = gradients.accumulate(batch, part)
    modules = [networks.policy] + ([] if networks.critic is None else [networks.critic])
    parts = [p.grad.flatten() for m in modules for p in m.parameters() if p.grad is not None]
    return batch, found, torch.cat(parts)


COMPUTED = "train/num_computed_tokens"
ALSO_BY_PRODUCTS = ("by token", "gspo")


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *((name, Attention.FUSED) for name in ALGORITHMS),
        *((name, Attention.PRODUCTS) for name in ALSO_BY_PRODUCTS),
        *(
            pytest.param(name, Attention.PRODUCTS, marks=pytest.mark.long)
            for name in ALGORITHMS
            if name not in ALSO_BY_PRODUCTS
        ),
    ],
)
def test_packed_sequences_have_the_padded_loss_and_gradient(
    name: str, attention: Attention
) -> None:
    algorithm, kind = ALGORITHMS[name]
    for part, ways in zip(PARTS, WAYS, strict=True):
        outcomes = []
        for layout, max_tokens, shares in [(PADDED, 10_000, False), *ways]:
            how = {"layout": layout, "attention": attention, "shared_prefix": shares}
            networks = networks_of(algorithm, **kind)
            outcomes.append(
                computed(algorithm, networks, part, max_tokens_per_microbatch=max_tokens, **how)
            )
        (batch, expected, gradient), *others = outcomes
        assert gradient.norm() > 1e-3
        for packed_batch, packed, packed_gradient in others:
            assert (packed_gradient - gradient).norm() / gradient.norm() < 1e-6
            assert packed.sums[COMPUTED] <= expected.sums[COMPUTED]  # Rows share common tokens.
            for metric, value in (expected.sums | {COMPUTED: packed.sums[COMPUTED]}).items():
                assert packed.sums[metric] == pytest.approx(value, rel=1e-6, abs=1e-6), metric
            for index, logprobs in expected.logprobs.items():
                torch.testing.assert_close(packed.logprobs[index], logprobs, atol=2e-6, rtol=1e-6)
            for index, logprobs in batch.before.items():
                torch.testing.assert_close(packed_batch.before[index], logprobs, atol=2e-6, rtol=0)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("layout", [PADDED, PACKED])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_compiled_parts_have_the_plain_loss_and_gradient(name: str, layout: Layout) -> None:
    algorithm, kind = ALGORITHMS[name]
    for part in PARTS:
        outcomes = []
        for is_compiled in (False, True):
            networks = networks_of(algorithm, **kind)
            how = {"layout": layout, "max_tokens_per_microbatch": 45, "compile": is_compiled}
            outcomes.append(computed(algorithm, networks, part, **how))
            own = {type(m).__name__ for m in networks.policy.modules() if "forward" in vars(m)}
            assert own == ({"Qwen3RMSNorm", "Qwen3MLP"} if is_compiled else set())
        (_, expected, gradient), (_, found, compiled) = outcomes
        assert (compiled - gradient).norm() / gradient.norm() < 1e-6
        for metric, value in expected.sums.items():
            assert found.sums[metric] == pytest.approx(value, rel=1e-6, abs=1e-6), metric


def test_network_without_parts_to_compile_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"compile=true: Linear has no RMSNorm and no MLP.*false"):
        compile_parts([torch.nn.Linear(2, 2)], fit="")


def test_compiler_that_fails_is_named() -> None:
    def broken(_: torch.fx.GraphModule, __: object) -> Any:
        raise RuntimeError("ld: cannot find -lgomp")

    part = torch.compile(lambda x: x + 1, backend=broken)
    said = r"^learner\.compile=true: the kernels cannot be compiled.*ld: cannot find -lgomp$"
    with pytest.raises(ConfigError, match=said), compiling.naming_compiler():
        part(torch.ones(2))


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the compiler trace each part, but translate no kernel to machine code."""

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        return graph.forward

    monkeypatch.setattr(compiling, "_compiled", {})
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("critic's own trunk", PACKED),
        pytest.param("adapters' base as reference", PADDED, marks=pytest.mark.long),
        pytest.param("critic's own trunk", PADDED, marks=pytest.mark.long),
        pytest.param("adapters' base as reference", PACKED, marks=pytest.mark.long),
    ],
)
def test_no_block_recompiles_after_first_kernels(
    traced_only: None, name: str, layout: Layout
) -> None:
    algorithm, kind = ALGORITHMS[name]
    how = {"layout": layout, "max_tokens_per_microbatch": 256, "compile": True}
    gradients = Gradients(settings_of(algorithm, **how), networks_of(algorithm, **kind), Ranks())
    passes, is_packed = gradients.passes, layout is PACKED
    passes._is_one_of_many = True
    passes.warm_up()
    with torch.compiler.set_stance("fail_on_recompile"):
        for lengths in ([2], [70], [3, 2], [40, 50, 60, 70], [1]):
            ids, masks = ([np.arange(n) % 2 for n in lengths], [np.arange(n) > 0 for n in lengths])
            tokens = collate_tokens(ids, masks, device="cpu", is_packed=is_packed)
            passes.score(tokens, with_values="critic" in name).logprobs.sum().backward()
            with torch.no_grad():
                passes.score(tokens)
                passes.score_by_reference(tokens)


def test_layers_with_adapters_share_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def num_kernels(num_layers: int) -> int:
        graphs: list[torch.fx.GraphModule] = []

        def backend(graph: torch.fx.GraphModule, _: object) -> Any:
            graphs.append(graph)
            return graph.forward

        model = make_model(num_layers=num_layers)
        add_adapters(model, LoraSection(rank=2), base_path="base")
        with monkeypatch.context() as patch:
            patch.setattr(compiling, "_compiled", {})
            patch.setattr(torch, "compile", partial(torch.compile, backend=backend))
            torch._dynamo.reset()
            compile_parts([model], fit="")
            model(torch.arange(9)[None]).logits.sum().backward()
        return len(graphs)

    # The first layer differs, since its input needs no gradient.
    assert 0 < num_kernels(2) == num_kernels(5)


def test_copied_compiled_network_uses_own_weights(traced_only: None) -> None:
    model, ids = make_model(), torch.arange(9)[None]
    compile_parts([model], fit="")
    before = model(ids).logits
    other = copy.deepcopy(model)
    for name, weight in other.named_parameters():
        if "mlp" in name:
            weight.data.mul_(-2.0)
    assert not other(ids).logits.allclose(before)
    assert model(ids).logits.equal(before)


def num_rows_of(micro: MicroBatch) -> int:
    """Return the number of rows with tokens, without the filling of the block."""
    return int(micro.tokens.source_rows.max()) + 2


def test_shared_prefix_is_laid_out_once_per_block() -> None:
    samples = with_prompts(make_samples())
    own = [len(s.trajectory.token_ids) - 20 for s in samples]
    how: dict[str, Any] = {"device": "cpu", "is_packed": True, "shares_prefix": True}
    (micro,) = make_microbatches(samples, range(6), max_tokens=10_000, **how)
    assert num_rows_of(micro) == 3 * 20 + sum(own)
    apart = make_microbatches(samples, range(6), max_tokens=33, **how)
    assert [len(m.sample_indices) for m in apart] == [1] * 6
    assert sorted(i for m in apart for i in m.sample_indices) == list(range(6))
    assert {num_rows_of(m) for m in apart} == {20 + length for length in own}
    plain = with_prompts(make_samples(num_groups=6, size=1))
    (alone,) = make_microbatches(plain, range(6), max_tokens=10_000, **how)
    assert alone.tokens.packing is not None
    assert alone.tokens.packing.key_rows is None


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
            trainer.train_on(
                with_prompts(make_samples(seed=version)), version=version, must_train=True
            )
        states.append(networks.policy.state_dict())
    for name, tensor in states[0].items():
        assert tensor.equal(states[1][name]), name
