"""Laws of a trainer's tensors on disk: any number of ranks reads what any number has written."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from common.config.compute import CriticKind, CriticSection
from common.config.learning import LearnerSection
from common.errors import ConfigError
from learner.policy.critic import make_critic
from learner.policy.sharding import shard
from learner.training.optimizers.optimizer import make_critic_optimizer, make_optimizer
from learner.training.ranks import Ranks
from learner.training.state import StateWriter, live_tensors, restore
from tests.learner.builders import make_model
from tests.learner.policy.test_loading import rank_of


def make_parts(folder: Path, seed: int) -> tuple[dict[str, nn.Module], list[Any]]:
    """Return policy and critic, and what will train them."""
    policy: Any = make_model(seed=seed)
    policy.save_pretrained(folder / str(seed))
    cfg = LearnerSection(lr=1e-2, critic=CriticSection(kind=CriticKind.MODEL))
    critic = make_critic(cfg.critic, policy, policy_path=str(folder / str(seed)))
    return {"model": policy, "critic": critic}, [policy, critic, cfg]


def optimizers_of(made: list[Any]) -> list[torch.optim.Optimizer]:
    policy, critic, cfg = made
    makers = (make_optimizer(policy, cfg), make_critic_optimizer(critic, cfg))
    return [each for made in makers for each in made.optimizers]


def train_once(optimizers: list[torch.optim.Optimizer]) -> None:
    generator = torch.Generator().manual_seed(3)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for each in group["params"]:
                each.grad = torch.randn(each.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_several_ranks_read_the_state_of_one(tmp_path: Path, size: int) -> None:
    modules, made = make_parts(tmp_path, seed=1)
    optimizers = optimizers_of(made)
    train_once(optimizers)
    written = {name: each.detach() for name, each in live_tensors(modules, optimizers).items()}
    StateWriter(Ranks()).start(written, tmp_path / "state").result(60)
    assert sum("exp_avg_sq" in name for name in written) == sum("exp_avg" in n for n in written) / 2
    others, made = make_parts(tmp_path, seed=2)
    with rank_of(size) as mesh:
        for module in others.values():
            shard(module, mesh, is_bf16=False)
        optimizers = optimizers_of(made)
        rates = [group["lr"] for each in optimizers for group in each.param_groups]
        restore(tmp_path / "state", others, optimizers)
        assert [group["lr"] for each in optimizers for group in each.param_groups] == rates
        found = live_tensors(others, optimizers)
        assert found.keys() == written.keys()
        for name, part in found.items():
            want, local = written[name], part.detach()
            if isinstance(local, DTensor):
                local, want = local.to_local(), want[: -(-len(want) // size)]
            assert torch.equal(local, want), name
        assert all(each.grad is None for module in others.values() for each in module.parameters())


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    StateWriter(Ranks()).start({"model.weight": torch.zeros(3)}, tmp_path / "state").result(60)
    with pytest.raises(ConfigError, match="do not fit this model"):
        restore(tmp_path / "state", {"model": nn.Linear(2, 2, bias=False)}, [])
