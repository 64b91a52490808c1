"""The optimizer and its learning rate."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from common.config.learning import LearnerSection, OptimizerKind


def lr_scale(step: int, num_steps: int, cfg: LearnerSection) -> float:
    """Return what the configured rates are multiplied by.

    Linear warm-up, then 1, then a linear decay that would reach `min_lr_frac` at `num_steps`.

    Args:
        step: 0-based, the version that is being improved.
        num_steps: of the whole run.
    """
    warm = min(1.0, (step + 1) / max(cfg.warmup_steps, 1))
    decay_start = cfg.decay_start_frac * num_steps  # steps
    if step <= decay_start or decay_start >= num_steps:
        return warm
    progress = min(1.0, (step - decay_start) / (num_steps - decay_start))
    return warm * (1 - (1 - cfg.min_lr_frac) * progress)


class PolicyOptimizer:
    """One or two torch optimizers that step together, with rates scaled by one number."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        self._base_lrs = [[group["lr"] for group in opt.param_groups] for opt in optimizers]

    def set_lr_scale(self, scale: float) -> None:
        """Set every rate to its configured value times `scale`."""
        for optimizer, base_lrs in zip(self.optimizers, self._base_lrs, strict=True):
            for group, base_lr in zip(optimizer.param_groups, base_lrs, strict=True):
                group["lr"] = base_lr * scale

    @property
    def lr(self) -> float:
        """The current rate of the first optimizer: AdamW's, so the scaled `learner.lr`."""
        return self.optimizers[0].param_groups[0]["lr"]

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def make_optimizer(model: PreTrainedModel, cfg: LearnerSection) -> PolicyOptimizer:
    """Return AdamW on everything, or Muon on the hidden matrices and AdamW on the rest.

    Weight decay acts on matrices only, not on norms and biases. Embeddings and the head always
    belong to AdamW: their rows are looked up one by one, and orthogonalising a whole table of
    them has no meaning.

    Source: AdamW, arXiv:1711.05101; Muon, Jordan et al., 2024.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    tables = {id(table.weight) for table in ends if table is not None}
    hidden: list[Tensor] = []  # matrices between embedding and head
    decayed: list[Tensor] = []
    plain: list[Tensor] = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        is_hidden = parameter.ndim == 2 and id(parameter) not in tables
        if cfg.optimizer is OptimizerKind.MUON and is_hidden:
            hidden.append(parameter)
        else:
            (decayed if parameter.ndim >= 2 else plain).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": cfg.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=cfg.lr,
        betas=(cfg.beta1, cfg.beta2),
        fused=True,
    )
    if cfg.optimizer is OptimizerKind.ADAMW:
        return PolicyOptimizer([adamw])
    muon = torch.optim.Muon(hidden, lr=cfg.muon_lr, weight_decay=cfg.weight_decay)
    return PolicyOptimizer([adamw, muon])


def make_critic_optimizer(critic: nn.Module, cfg: LearnerSection) -> torch.optim.Optimizer:
    """Return AdamW at the critic's own, constant rate on everything that is only the critic's."""
    return torch.optim.AdamW(
        critic.parameters(),
        lr=cfg.critic.lr,
        betas=(cfg.beta1, cfg.beta2),
        weight_decay=cfg.weight_decay,
        fused=True,
    )
