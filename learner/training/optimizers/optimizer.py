"""The optimizers and their learning rate schedule."""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from common.config.learner import LearnerSection, Moments, OptimizerKind
from learner.training.optimizers.muon import BatchedMuon, ExpertMuon

logger = logging.getLogger(__name__)

BLOCK = 256  # Number of 8-bit moments, contiguous in memory, that share a scale.
_SMALLEST = 4096  # Elements per rank below which torchao keeps the moments of a weight in fp32.


def lr_scale(step: int, num_steps: int, cfg: LearnerSection) -> float:
    """Return the factor of the configured learning rates.

    The factor rises linearly during the warm-up, then stays at 1. It then decays linearly and would
    reach `min_lr_frac` at `num_steps`.

    Args:
        step: 0-based, the version before the update.
        num_steps: number of steps of the whole run.
    """
    warm = min(1.0, (step + 1) / max(cfg.warmup_steps, 1))
    decay_start = cfg.decay_start_frac * num_steps  # steps
    if step <= decay_start or decay_start >= num_steps:
        return warm
    progress = min(1.0, (step - decay_start) / (num_steps - decay_start))
    return warm * (1 - (1 - cfg.min_lr_frac) * progress)


class PolicyOptimizer:
    """Torch optimizers that step together; one factor scales all their rates."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        # torchao rounds the rates of its groups to fp32; the defaults have the configured number.
        self._base_lrs = [[float(opt.defaults["lr"])] * len(opt.param_groups) for opt in optimizers]

    def set_lr_scale(self, scale: float) -> None:
        """Set every rate to its configured value times `scale`."""
        for optimizer, base_lrs in zip(self.optimizers, self._base_lrs, strict=True):
            for group, base_lr in zip(optimizer.param_groups, base_lrs, strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(base_lr * scale)
                else:
                    group["lr"] = base_lr * scale

    @property
    def lr(self) -> float:
        """The current rate of the first optimizer, which is AdamW: the scaled `learner.lr`."""
        return float(self.optimizers[0].param_groups[0]["lr"])

    def set_rates(self, lr: float, muon_lr: float) -> None:
        """Replace the configured rates of AdamW and of Muon from the next `set_lr_scale` on."""
        rates = [
            muon_lr if isinstance(each, BatchedMuon | ExpertMuon) else lr
            for each in self.optimizers
        ]
        self._base_lrs = [
            [rate] * len(opt.param_groups) for rate, opt in zip(rates, self.optimizers, strict=True)
        ]

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def make_optimizer(model: PreTrainedModel, cfg: LearnerSection) -> PolicyOptimizer:
    """Return AdamW on all weights, or Muon on the hidden matrices and AdamW on the rest.

    Weight decay acts on matrices only, not on norms and biases. Embeddings and the head always use
    AdamW: their rows are looked up one by one, so orthogonalising the whole table has no meaning.

    Source: AdamW, arXiv:1711.05101; Muon, Jordan et al., 2024.
    """
    parts = _parts(model, cfg)
    decayed = [each for each in parts["adamw"] if each.ndim >= 2]
    plain = [each for each in parts["adamw"] if each.ndim < 2]
    optimizers = _adamw([(decayed, cfg.weight_decay), (plain, 0.0)], cfg.lr, cfg)
    if cfg.optimizer is OptimizerKind.ADAMW:
        return PolicyOptimizer(optimizers)
    how: dict[str, Any] = {"lr": cfg.muon_lr, "weight_decay": cfg.weight_decay}
    hidden = parts["muon"]
    if hidden:
        optimizers.append(BatchedMuon(hidden, **how))
    stacks = [
        {"params": parts[name], "is_transposed": name == "experts [in, out]"}
        for name in ("experts [out, in]", "experts [in, out]")
        if parts[name]
    ]
    if stacks:
        optimizers.append(ExpertMuon(stacks, **how))
    counts = (f"{name}={sum(each.numel() for each in own)}" for name, own in parts.items())
    logger.info("optimizer=muon, number of weights by part: %s", " ".join(counts))
    return PolicyOptimizer(optimizers)


def _parts(model: PreTrainedModel, cfg: LearnerSection) -> dict[str, list[Tensor]]:
    """Return the trained weights by optimizer, and those of experts by memory layout."""
    parts: dict[str, list[Tensor]] = {
        "adamw": [],
        "muon": [],
        "experts [out, in]": [],
        "experts [in, out]": [],
    }
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    tables = {id(table.weight) for table in ends if table is not None}
    owners = {id(each): owner for owner in model.modules() for each in owner.parameters(False)}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        owner = owners[id(parameter)]
        kind = "adamw"
        if cfg.optimizer is OptimizerKind.MUON and id(parameter) not in tables:
            kind = _muon_part(name, parameter, owner)
        parts[kind].append(parameter)
    return parts


def _muon_part(name: str, parameter: Tensor, owner: nn.Module) -> str:
    """Return the part, as in `_parts`, of a weight outside the embedding tables."""
    if name.endswith("bias"):  # A bias of experts has two axes.
        return "adamw"
    if parameter.ndim == 2:
        return "muon"
    is_convolution = isinstance(owner, nn.modules.conv._ConvNd)
    if parameter.ndim != 3 or is_convolution or min(parameter.shape[1:]) == 1:
        return "adamw"
    is_transposed = getattr(owner, "is_transposed", False)
    return "experts [in, out]" if is_transposed else "experts [out, in]"


def make_critic_optimizer(critic: nn.Module, cfg: LearnerSection) -> PolicyOptimizer:
    """Return AdamW at the critic's own constant rate, on the weights that only the critic has."""
    groups = [(list(critic.parameters()), cfg.weight_decay)]
    return PolicyOptimizer(_adamw(groups, cfg.critic.lr, cfg))


def _adamw(
    groups: Iterable[tuple[list[nn.Parameter] | list[Tensor], float]],
    lr: float,
    cfg: LearnerSection,
) -> list[torch.optim.Optimizer]:
    """Return AdamW on groups of (weights, decay), and a second one for 8-bit moments.

    Raises: ValueError: there is nothing to train.
    """
    exact: list[dict[str, Any]] = []
    coarse: list[dict[str, Any]] = []
    for parameters, decay in groups:
        is_coarse = [cfg.moments is Moments.INT8 and has_whole_blocks(each) for each in parameters]
        for chosen, wanted in ((exact, False), (coarse, True)):
            own = [p for p, found in zip(parameters, is_coarse, strict=True) if found is wanted]
            if own:
                chosen.append({"params": own, "weight_decay": decay})
    if not (exact or coarse):
        raise ValueError("the model has no weights to train")
    how: dict[str, Any] = {"lr": lr, "betas": (cfg.beta1, cfg.beta2)}
    optimizers: list[torch.optim.Optimizer] = []
    if exact:
        optimizers.append(torch.optim.AdamW(exact, **how, fused=True))
    if coarse:
        optimizers.append(_make_coarse(coarse, **how))
    return optimizers


def _make_coarse(groups: list[dict[str, Any]], **how: Any) -> torch.optim.Optimizer:
    """Return AdamW with 8-bit moments. CUDA compiles its arithmetic; a CPU would take minutes."""
    from torchao.optim import AdamW8bit  # The import takes two seconds.

    class CoarseAdamW(AdamW8bit):
        """AdamW with torchao's 8-bit moments and the update of `_coarse_update`."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            is_cuda = self.param_groups[0]["params"][0].is_cuda
            with (
                torch.compiler.set_stance("default" if is_cuda else "force_eager"),
                torch._dynamo.utils.disable_cache_limit(),  # pyright: ignore
            ):
                update = torch.compile(_coarse_update, fullgraph=True, dynamic=False)
                for group in self.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            self._update(update, group, parameter)

        def _update(self, update: Any, group: dict[str, Any], parameter: Tensor) -> None:
            state = self.state[parameter]
            if len(state) == 0:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = self._new_buffer(parameter, True)
                state["exp_avg_root"] = self._new_buffer(parameter, False)
            state["step"] += 1
            update(
                parameter.detach(),
                parameter.grad,
                state["exp_avg"],
                state["exp_avg_root"],
                state["step"],
                group["lr"],
                *group["betas"],
                group["weight_decay"],
                group["eps"],
            )

    return CoarseAdamW(groups, **how)


def _coarse_update(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    root: Tensor,
    step: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
) -> None:
    """Make one AdamW update in place, with moments that are stored in 8 bits.

    A block has one scale. A second moment of 1e-8 of the block's largest would be rounded to zero.
    The first moment, 1e-4 of the largest, would not: the next update would be the mean divided by
    eps. Therefore the square root of the second moment is stored, which has the range of the mean.
    Adam's own bound |mean| <= c * root also limits the rounding, so no update is larger than with
    fp32 moments.

    Args:
        mean: the first moment, 8 bits or fp32.
        root: the square root of the second moment, 8 bits or fp32.
        step: 1-based.
    """
    grad = gradient.float()
    nothing = torch.zeros_like(grad)
    old_mean = mean.lerp(nothing, 0.0)  # torchao dequantises in this operation only.
    old_root = root.lerp(nothing, 0.0)
    old_root = torch.maximum(old_root, old_mean.abs() / _bound(beta1, beta2, step - 1))
    new_mean = old_mean.lerp(grad, 1 - beta1)
    new_square = old_root.square().lerp(grad.square(), 1 - beta2)
    new_root = new_square.sqrt()
    mean.copy_(new_mean)
    root.copy_(new_root)
    size = new_root / (1 - beta2**step).sqrt() + eps
    whole = weight.float()
    whole = whole - lr * weight_decay * whole
    weight.copy_(whole - lr * (new_mean / (1 - beta1**step)) / size)


def _bound(beta1: float, beta2: float, num_steps: Tensor) -> Tensor:
    """Return the largest |mean| / root of the moments after some steps; at least a tiny number.

    By Cauchy and Schwarz: the square is (1 - b1)^2 / (1 - b2) * sum over steps of (b1^2 / b2)^i.
    """
    ratio = beta1**2 / max(beta2, 1e-12)
    is_one = abs(ratio - 1) < 1e-9
    total = num_steps if is_one else (1 - ratio**num_steps) / (1 - ratio)
    return ((1 - beta1) ** 2 / (1 - beta2) * total).sqrt().clamp(1e-12, 1e12)


def has_whole_blocks(parameter: Tensor) -> bool:
    """Return whether a weight may have 8-bit moments: the rows of each rank are whole blocks.

    The result is the same on all ranks. Moments can be restored with any number of ranks for which
    the result is True.
    """
    if parameter.ndim == 0:
        return False
    num_rows = len(parameter)
    ranks = parameter.device_mesh.size(-1) if isinstance(parameter, DTensor) else 1
    most = -(-num_rows // ranks)  # FSDP leaves the remaining rows to the last rank.
    least = num_rows - most * (ranks - 1)
    row = parameter.numel() // num_rows
    return least * row >= _SMALLEST and most * row % BLOCK == least * row % BLOCK == 0
