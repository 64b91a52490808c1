"""Laws of the optimizer and its learning rate."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from common.config.learner import LearnerSection, Moments, OptimizerKind
from learner.policy.sharding import shard
from learner.training.optimizer import (
    BatchedMuon,
    _adamw,
    _muon_part,
    _own_experts,
    batches_of,
    lr_scale,
    make_optimizer,
    orthogonalised,
)
from tests.learner.builders import make_model
from tests.learner.policy.test_loading import rank_of


def step_once(model, optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def test_rate_warms_up_stays_and_decays() -> None:
    cfg = LearnerSection(warmup_steps=4, decay_start_frac=0.5, min_lr_frac=0.2)
    scales = [lr_scale(step, 20, cfg) for step in (0, 1, 3, 10, 15, 20)]
    assert scales == pytest.approx([0.25, 0.5, 1.0, 1.0, 0.6, 0.2])


def test_rate_is_constant_after_warm_up_by_default() -> None:
    cfg = LearnerSection(warmup_steps=0)
    assert [lr_scale(step, 10, cfg) for step in (0, 5, 10, 11)] == [1.0] * 4


def test_rate_stays_at_minimum_beyond_end() -> None:
    cfg = LearnerSection(warmup_steps=0, decay_start_frac=0.0, min_lr_frac=0.1)
    assert lr_scale(99, 10, cfg) == pytest.approx(0.1)


@pytest.mark.parametrize("kind", list(OptimizerKind))
@pytest.mark.parametrize("is_tied", [False, True])
def test_every_parameter_has_exactly_one_optimizer(kind: OptimizerKind, is_tied: bool) -> None:
    model = make_model(is_tied=is_tied)
    optimizer = make_optimizer(model, LearnerSection(optimizer=kind))
    owned = [
        id(p) for opt in optimizer.optimizers for group in opt.param_groups for p in group["params"]
    ]
    assert sorted(owned) == sorted(id(p) for p in model.parameters())


def test_muon_owns_the_hidden_matrices_only() -> None:
    model = make_model()
    optimizer = make_optimizer(model, LearnerSection(optimizer=OptimizerKind.MUON))
    muon = {id(p) for p in optimizer.optimizers[1].param_groups[0]["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in muon}
    assert len(names) == 2 * 7  # four of attention and three of the MLP in each of two layers
    assert all(".layers." in name and name.endswith("_proj.weight") for name in names)


def test_norms_do_not_decay() -> None:
    model = make_model()
    optimizer = make_optimizer(model, LearnerSection(lr=0.1, weight_decay=0.5))
    norm, matrix = model.model.norm.weight, model.lm_head.weight
    before = norm.detach().clone(), matrix.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(norm, before[0])
    torch.testing.assert_close(matrix, before[1] * 0.95)


def test_rates_are_scaled_together() -> None:
    cfg = LearnerSection(optimizer=OptimizerKind.MUON, lr=1e-3, muon_lr=2e-2)
    optimizer = make_optimizer(make_model(), cfg)
    optimizer.set_lr_scale(0.5)
    optimizer.set_lr_scale(0.1)  # Scales the configured rate, not the last one.
    assert optimizer.lr == pytest.approx(1e-4)
    assert optimizer.optimizers[1].param_groups[0]["lr"] == pytest.approx(2e-3)


def test_muon_on_cpu_equals_torchs() -> None:
    torch.manual_seed(0)
    start = [torch.randn(6, 24), torch.randn(24, 6), torch.randn(8, 8)]
    ours, theirs = ([torch.nn.Parameter(each.clone()) for each in start] for _ in range(2))
    optimizers = [kind(own, lr=0.1) for kind, own in zip(MUONS, (ours, theirs), strict=True)]
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other, first in zip(ours, theirs, start, strict=True):
        assert (one - other).norm() < 0.02 * (one - first).norm()
    singular = torch.linalg.svdvals(orthogonalised(torch.randn(6, 24)))
    assert 0.6 < singular.min() < singular.max() < 1.3


def test_matrices_iterate_together_as_each_alone() -> None:
    shapes = [(6, 24), (24, 6), (6, 24), (8, 8), (24, 6), (6, 24)]
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    gradients = [torch.randn(shape, generator=generator) for shape in shapes]
    together, alone = ([torch.nn.Parameter(each.clone()) for each in start] for _ in range(2))
    how: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
    optimizers = [BatchedMuon(together, **how), *(BatchedMuon([each], **how) for each in alone)]
    for _ in range(3):
        for parameters in (together, alone):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other, first in zip(together, alone, start, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
        assert (one - first).norm() > 0.1


def test_batches_have_one_size_and_limited_memory() -> None:
    size = (1024, 1024)  # Four of them are the largest batch on a CPU.
    matrices = [torch.empty(size) for _ in range(6)] + [torch.empty(3, 5), torch.empty(3, 5)]
    found = [[tuple(each.shape) for each in batch] for batch in batches_of(matrices)]
    assert found == [[size] * 4, [size] * 2, [(3, 5)] * 2]


def test_shards_are_updated_without_lerp_on_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 has no such operation on DTensors."""
    num_lists = 0

    def refusing(name: str) -> None:
        lerp = getattr(torch, name)

        def guarded(tensors: list[Tensor], *rest: Any) -> Any:
            nonlocal num_lists
            num_lists += 1
            assert not any(isinstance(each, DTensor) for each in tensors)
            return lerp(tensors, *rest)

        monkeypatch.setattr(torch, name, guarded)

    refusing("_foreach_lerp")
    refusing("_foreach_lerp_")
    model: Any = make_model()
    cfg = LearnerSection(optimizer=OptimizerKind.MUON)
    with rank_of(2) as mesh:
        shard(model, mesh, dtype=torch.float32)
        muon = make_optimizer(model, cfg).optimizers[1]
        matrix = muon.param_groups[0]["params"][0]
        before = matrix.to_local().clone()
        matrix.grad = torch.ones_like(matrix)
        muon.step()
        assert not torch.equal(matrix.to_local(), before)
    assert num_lists == 0
    whole = torch.nn.Parameter(torch.ones(4, 4))
    whole.grad = torch.ones(4, 4)
    BatchedMuon([whole], lr=0.1).step()
    assert num_lists == 2  # The guard sees the operations of plain tensors.


def test_iteration_of_many_matrices_takes_few_products() -> None:
    matrices = [torch.nn.Parameter(torch.randn(16, 32)) for _ in range(100)]
    for matrix in matrices:
        matrix.grad = torch.randn_like(matrix)
    optimizer = BatchedMuon(matrices, lr=0.1)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        optimizer.step()
    names = [each.name for each in seen.events() or []]
    # Five iterations of three products.
    assert sum(name in ("aten::bmm", "aten::baddbmm") for name in names) == 15
    assert "aten::mm" not in names


MUONS = (BatchedMuon, torch.optim.Muon)


def moe_model() -> Qwen3MoeForCausalLM:
    """Build a small Qwen3-MoE of four experts, fp32."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return Qwen3MoeForCausalLM(config)


def test_muon_orthogonalises_each_expert_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = moe_model()
    cfg = LearnerSection(optimizer=OptimizerKind.MUON, muon_lr=0.1, weight_decay=0.0)
    with caplog.at_level("INFO"):
        optimizer = make_optimizer(model, cfg)
    experts = cast(Any, model.model.layers[0]).mlp.experts
    owned = {id(each) for each in optimizer.optimizers[2].param_groups[0]["params"]}
    assert owned == {id(experts.gate_up_proj), id(experts.down_proj)}
    # 4 experts of 32 x 32 and of 32 x 16; two tables of 50 x 32 and norms of 3 x 32 + 2 x 8.
    assert "experts [out, in]=6144" in caplog.text
    assert "adamw=3312" in caplog.text
    stack = experts.down_proj  # [4, 32, 16]
    before = stack.detach().clone()
    generator = torch.Generator().manual_seed(0)
    stack.grad = torch.randn(stack.shape, generator=generator)
    optimizer.step()
    for old, new, gradient in zip(before, stack.detach(), stack.grad, strict=True):
        expected = orthogonalised(gradient) * 0.1 * 2**0.5  # The matrix has 32 rows and 16 columns.
        torch.testing.assert_close(old - new, expected, atol=1e-5, rtol=1e-4)
        values = torch.linalg.svdvals((old - new) / (0.1 * 2**0.5))
        assert 0.6 < values.min() < values.max() < 1.3


def test_biases_and_convolutions_use_adamw() -> None:
    stack = torch.zeros(4, 8, 8)
    plain = torch.nn.Module()
    assert _muon_part("experts.down_proj", stack, plain) == "experts [out, in]"
    plain.is_transposed = True  # pyright: ignore
    assert _muon_part("experts.down_proj", stack, plain) == "experts [in, out]"
    assert _muon_part("experts.down_proj_bias", stack[0], plain) == "adamw"
    convolution = torch.nn.Conv1d(8, 8, 4, groups=4)
    assert _muon_part("conv1d.weight", convolution.weight, convolution) == "adamw"


@pytest.mark.parametrize("size", [1, 2])
def test_muon_updates_sharded_experts_as_whole_ones(size: int) -> None:
    cfg = LearnerSection(optimizer=OptimizerKind.MUON, muon_lr=0.1)
    gradient = torch.randn(4, 32, 16, generator=torch.Generator().manual_seed(0))
    found = []
    for is_sharded in (False, True):
        model = moe_model()
        with rank_of(size) as mesh:
            if is_sharded:
                shard(model, mesh, dtype=torch.float32)
            stack = cast(Any, model.model.layers[0]).mlp.experts.down_proj
            stack.grad = _as(stack, gradient)
            make_optimizer(model, cfg).step()
            found.append(_own_experts(stack).detach().clone())
    torch.testing.assert_close(found[1], found[0][: 4 // size], atol=0, rtol=0)


def _as(pattern: Tensor, whole: Tensor) -> Tensor:
    """Return a tensor as the part of it that this rank keeps, if the pattern is sharded."""
    if not isinstance(pattern, DTensor):
        return whole.clone()
    own = whole[: len(pattern.to_local())].clone()
    return DTensor.from_local(own, pattern.device_mesh, pattern.placements, run_check=False)


def largest_update(
    moments: Moments, *, shape: tuple[int, int], betas: tuple[float, float]
) -> float:
    """Return the largest update of a table of rare rows, in units of the learning rate."""
    torch.manual_seed(0)
    table = torch.nn.Parameter(torch.randn(*shape))
    cfg = LearnerSection(lr=1e-3, moments=moments, beta1=betas[0], beta2=betas[1])
    groups = [([table], 0.0)]
    (optimizer,) = _adamw(groups, cfg.lr, cfg)
    assert ("Coarse" in type(optimizer).__name__) == (moments is Moments.INT8)
    generator = torch.Generator().manual_seed(1)
    frequency = 1 / torch.arange(1, shape[0] + 1).float()
    largest = 0.0
    for _ in range(30):
        rows = torch.multinomial(frequency, 16, True, generator=generator)
        scale = 10.0 ** (-4 * torch.rand(16, 1, generator=generator))
        change = torch.randn(16, shape[1], generator=generator) * scale
        table.grad = torch.zeros(shape).index_add(0, rows, change)
        before = table.detach().clone()
        optimizer.step()
        largest = max(largest, (table.detach() - before).abs().max().item() / 1e-3)
    return largest


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.9, 0.81)])
@pytest.mark.parametrize("shape", [(128, 64), (64, 1024), (4096, 16)])
def test_8bit_moments_never_blow_up_an_update(
    shape: tuple[int, int], betas: tuple[float, float]
) -> None:
    exact = largest_update(Moments.FP32, shape=shape, betas=betas)
    assert exact == pytest.approx(1.0, abs=0.2)
    assert largest_update(Moments.INT8, shape=shape, betas=betas) < 1.5 * exact


@pytest.mark.parametrize("kind", list(OptimizerKind))
def test_adamw_updates_all_weights_in_one_kernel(kind: OptimizerKind) -> None:
    optimizer = make_optimizer(make_model(), LearnerSection(optimizer=kind))
    assert optimizer.optimizers[0].defaults["fused"] is True


def test_changed_rates_reach_adamw_and_muon() -> None:
    cfg = LearnerSection(optimizer=OptimizerKind.MUON, lr=1e-3, muon_lr=4e-3)
    optimizer = make_optimizer(make_model(), cfg)
    optimizer.set_rates(lr=2e-3, muon_lr=3e-3)
    optimizer.set_lr_scale(0.5)
    rates = [{float(group["lr"]) for group in each.param_groups} for each in optimizer.optimizers]
    assert rates == [{1e-3}, {1.5e-3}]
