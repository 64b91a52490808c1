"""Laws of the optimizer and its learning rate."""

import pytest
import torch

from common.config.compute import OptimizerKind
from common.config.learning import LearnerSection
from learner.training.optimizers.muon import ExactMuon, orthogonalised
from learner.training.optimizers.optimizer import lr_scale, make_optimizer
from tests.learner.builders import make_model


def step_once(model, optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def test_rate_warms_up_stays_and_decays() -> None:
    cfg = LearnerSection(warmup_steps=4, decay_start_frac=0.5, min_lr_frac=0.2)
    scales = [lr_scale(step, 20, cfg) for step in (0, 1, 3, 10, 15, 20)]
    assert scales == pytest.approx([0.25, 0.5, 1.0, 1.0, 0.6, 0.2])


def test_rate_is_constant_by_default_after_warm_up() -> None:
    cfg = LearnerSection(warmup_steps=0)
    assert [lr_scale(step, 10, cfg) for step in (0, 5, 10, 11)] == [1.0] * 4


def test_rate_stays_at_its_minimum_beyond_the_last_step() -> None:
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
    optimizer.set_lr_scale(0.1)  # of the configured rate, not of the last one
    assert optimizer.lr == pytest.approx(1e-4)
    assert optimizer.optimizers[1].param_groups[0]["lr"] == pytest.approx(2e-3)


def test_muon_on_a_cpu_is_torchs_without_its_rounding() -> None:
    torch.manual_seed(0)
    start = [torch.randn(6, 24), torch.randn(24, 6), torch.randn(8, 8)]
    ours, theirs = ([torch.nn.Parameter(each.clone()) for each in start] for _ in range(2))
    optimizers = [kind(own, lr=0.1) for kind, own in zip(MUONS, (ours, theirs), strict=True)]
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for each in optimizers:
            each.step()
    for one, other, first in zip(ours, theirs, start, strict=True):
        assert (one - other).norm() < 0.02 * (one - first).norm()
    singular = torch.linalg.svdvals(orthogonalised(torch.randn(6, 24)))
    assert 0.6 < singular.min() < singular.max() < 1.3


MUONS = (ExactMuon, torch.optim.Muon)
