"""The optimizers, their learning rate schedule, and the updates that they make."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

from common.config.learner import LearnerSection, Moments, OptimizerKind, Rounding
from learner.policy.finite import TrainingDiverged
from learner.policy.model import whole
from learner.policy.precision import RoundedWeights, VanishedUpdates
from learner.training.ranks import Ranks

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
EPS = 1e-7
# Largest number of elements to orthogonalise at once; the copies take memory.
MAX_NUMBERS = 1 << 26
MAX_CPU_NUMBERS = 1 << 22

_torch: Any = torch  # The stubs lack the functions of several tensors.


class BatchedMuon(torch.optim.Muon):
    """`torch.optim.Muon` with the same state and defaults; matrices of equal size iterate together.

    A GPU computes the small products of one matrix in less time than their kernels take to start.
    On a CPU the iteration is in fp32.

    Source: Jordan et al., 2024.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient; `closure` is ignored."""
        for group in self.param_groups:
            trained = [each for each in group["params"] if each.grad is not None]
            for chosen in batches_of(trained):
                self._update(chosen, group)

    def _update(self, chosen: list[Tensor], group: dict[str, Any]) -> None:
        """Update matrices of one size and device."""
        lr = float(group["lr"])
        momentum = group["momentum"]
        gradients = [each.grad for each in chosen if each.grad is not None]
        for parameter, gradient in zip(chosen, gradients, strict=True):
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(gradient)
        means = [self.state[each]["momentum_buffer"] for each in chosen]
        directions = _moved(means, gradients, momentum)
        num_rows, num_columns = chosen[0].shape
        scale = lr * math.sqrt(max(1.0, num_rows / num_columns))
        _torch._foreach_mul_(chosen, 1 - lr * group["weight_decay"])
        updates = all_orthogonalised(directions, arithmetic_of(chosen[0]))
        _torch._foreach_add_(
            chosen,
            [each.to(own.dtype) for each, own in zip(updates, chosen, strict=True)],
            alpha=-scale,
        )


def _moved(means: list[Tensor], gradients: list[Tensor], momentum: float) -> list[Tensor]:
    """Move the means towards the gradients; return the directions of Nesterov's momentum."""
    if isinstance(means[0], DTensor):  # torch 2.11 has no such operation on a list of DTensors.
        return [
            gradient.lerp(mean.lerp_(gradient, 1 - momentum), momentum)
            for mean, gradient in zip(means, gradients, strict=True)
        ]
    _torch._foreach_lerp_(means, gradients, 1 - momentum)
    return _torch._foreach_lerp(gradients, means, momentum)


def batches_of(matrices: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the matrices in batches of one size, dtype and device, small enough for the memory.

    A matrix that several ranks share is alone: its products need all ranks.
    """
    alike: dict[Any, list[Tensor]] = {}
    for number, matrix in enumerate(matrices):
        is_shared = isinstance(matrix, DTensor)
        key = number if is_shared else (matrix.shape, matrix.dtype, matrix.device)
        alike.setdefault(key, []).append(matrix)
    for batch in alike.values():
        limit = MAX_NUMBERS if batch[0].is_cuda else MAX_CPU_NUMBERS
        size = max(1, limit // max(1, batch[0].numel()))
        for start in range(0, len(batch), size):
            yield batch[start : start + size]


def all_orthogonalised(matrices: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """Return `orthogonalised` of matrices [rows, columns] of one size, computed together."""
    if len(matrices) == 1:
        return [orthogonalised(matrices[0], dtype)]
    return orthogonalised(torch.stack([each.to(dtype) for each in matrices]), dtype).unbind(0)


def arithmetic_of(weights: Tensor) -> torch.dtype:
    """Return the dtype of the iteration: bf16 on a GPU, as torch's own Muon."""
    return torch.float32 if weights.device.type == "cpu" else torch.bfloat16


class ExpertMuon(torch.optim.Optimizer):
    """Muon on stacks of matrices [expert, rows, columns]: each matrix is orthogonalised alone.

    FSDP shards a stack along its experts, so each rank has whole matrices and updates its own.

    Source: Jordan et al., 2024.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
    ) -> None:
        """Take groups with `params` and `is_transposed`: matrices are [in, out], not [out, in]."""
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every stack that has a gradient; `closure` is ignored."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Update the experts of a stack that this rank owns."""
        lr = float(group["lr"])
        momentum = group["momentum"]
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        gradient = _own_experts(grad)
        mean = _own_experts(state["momentum_buffer"]).lerp_(gradient, 1 - momentum)
        num_rows, num_columns = parameter.shape[1:]
        ratio = num_columns / num_rows if group["is_transposed"] else num_rows / num_columns
        weights = _own_experts(parameter)
        weights.mul_(1 - lr * group["weight_decay"])
        size = max(1, MAX_NUMBERS // (num_rows * num_columns))  # Number of experts at once.
        dtype = arithmetic_of(weights)
        for experts, direction in zip(
            weights.split(size), gradient.lerp(mean, momentum).split(size), strict=True
        ):
            if experts.numel():
                update = orthogonalised(direction.to(dtype), dtype)
                experts.add_(update.to(experts.dtype), alpha=-lr * math.sqrt(max(1.0, ratio)))


def _own_experts(tensor: Tensor) -> Tensor:
    """Return this rank's experts of a stack."""
    if not isinstance(tensor, DTensor):
        return tensor
    assert all(each in (Shard(0), Replicate()) for each in tensor.placements)
    return tensor.to_local()


def orthogonalised(matrix: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return matrices [..., rows, columns] with their singular values moved to about 1.

    Args:
        matrix: one matrix, or a stack of matrices along one leading axis.
        dtype: dtype of the arithmetic and of the result.
    """
    a, b, c = COEFFICIENTS
    add = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    wide = matrix.to(dtype).mT if is_tall else matrix.to(dtype)
    wide = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(NUM_ITERATIONS):
        gram = wide @ wide.mT
        wide = add(wide, add(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.mT if is_tall else wide


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
            muon_lr if isinstance(optimizer, BatchedMuon | ExpertMuon) else lr
            for optimizer in self.optimizers
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
    hidden = parts["muon"]
    if hidden:
        muon = BatchedMuon(hidden, lr=cfg.muon_lr, weight_decay=cfg.weight_decay)
        optimizers.append(muon)
    stacks = [
        {"params": parts[name], "is_transposed": name == "experts [in, out]"}
        for name in ("experts [out, in]", "experts [in, out]")
        if parts[name]
    ]
    if stacks:
        optimizers.append(ExpertMuon(stacks, lr=cfg.muon_lr, weight_decay=cfg.weight_decay))
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
            weights = [p for p, found in zip(parameters, is_coarse, strict=True) if found is wanted]
            for part in by_mesh(weights):
                chosen.append({"params": part, "weight_decay": decay})
    if not (exact or coarse):
        raise ValueError("the model has no weights to train")
    betas = (cfg.beta1, cfg.beta2)
    optimizers: list[torch.optim.Optimizer] = []
    if exact:
        optimizers.append(torch.optim.AdamW(exact, lr=lr, betas=betas, fused=True))
    if coarse:
        optimizers.append(_make_coarse(coarse, lr=lr, betas=betas))
    return optimizers


def _make_coarse(
    groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float]
) -> torch.optim.Optimizer:
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

    return CoarseAdamW(groups, lr=lr, betas=betas)


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


def by_mesh(weights: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return weights in lists that one operation can take: of one mesh, or not sharded.

    Experts that ranks divide are on a mesh of their own.
    """
    parts: dict[object, list[Tensor]] = {}
    for each in weights:
        mesh = each.device_mesh if isinstance(each, DTensor) else None
        parts.setdefault(mesh, []).append(each)
    return list(parts.values())


class LossScale:
    """The factor of losses whose gradients are computed in fp16.

    fp16 has no numbers between 0 and 6e-8, so small gradients would be zero. They are computed of
    the loss times the scale, and divided by it in fp32. The scale is a power of two, so the
    division is exact. Gradients above 65,504 overflow: their update is skipped, and the scale is
    halved. After 2,000 updates without an overflow it is doubled.

    The rule is that of `torch.amp.GradScaler`. GradScaler decides for each optimizer by itself, so
    AdamW could update its weights while Muon skips. It decides by the gradients of one mesh. Here
    one decision, by the norm of all gradients over all ranks, holds for all optimizers.

    Example: a gradient overflows with scale 65536. Nothing changes but the scale, 32768.

    Source: arXiv:1710.03740; numbers of `torch.amp.GradScaler`.
    """

    FIRST = 2.0**16
    LEAST = 1.0
    GROWTH_UPDATES = 2000

    def __init__(self, dtype: torch.dtype) -> None:
        """Start with the first scale for passes in fp16; losses of other dtypes are not scaled."""
        self.is_on = dtype is torch.float16
        self.value = self.FIRST if self.is_on else 1.0
        self.num_good = 0  # Updates without an overflow since the last change of the scale.

    def count_good(self) -> None:
        """Count an update with finite gradients; the last of many in a row doubles the scale."""
        self.num_good += self.is_on
        if self.num_good == self.GROWTH_UPDATES:
            self.value *= 2
            self.num_good = 0

    def shrink(self) -> bool:
        """Halve the scale after an overflow; return False if it is at its least already."""
        if not self.is_on or self.value <= self.LEAST:
            return False
        self.value /= 2
        self.num_good = 0
        return True

    def state_dict(self) -> dict[str, float]:
        """Return the state for JSON; {} without scaling."""
        return {"value": self.value, "num_good": self.num_good} if self.is_on else {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue with a saved state; {} changes nothing."""
        if self.is_on and state:
            self.value = float(state["value"])
            self.num_good = int(state["num_good"])


class Update(NamedTuple):
    """The result of one optimizer update."""

    is_good: bool  # False: a value was not finite and the weights are unchanged.
    grad_norm: float  # Gradient norm before clipping.
    metrics: dict[str, float]  # Means over the minibatch's trained tokens.
    # True: gradients overflowed in fp16, and the next update has a smaller scale of the loss.
    is_overflow: bool = False


class Updates:
    """Owns the optimizers of a policy and of its critic. Not thread-safe."""

    def __init__(
        self,
        policy: PreTrainedModel,
        cfg: LearnerSection,
        *,
        dtype: torch.dtype,
        critic: nn.Module | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Make the optimizers. The networks must be sharded by now.

        Args:
            dtype: dtype of the passes.
        """
        self._cfg = cfg
        self._policy = policy
        self._critic = critic
        self.optimizer = make_optimizer(policy, cfg)
        self._critic_optimizer = None if critic is None else make_critic_optimizer(critic, cfg)
        is_stochastic = dtype is torch.bfloat16 and cfg.rounding is Rounding.STOCHASTIC
        self._copies = RoundedWeights(policy) if is_stochastic else None
        self.vanished = VanishedUpdates(policy, dtype=dtype, ranks=ranks, copies=self._copies)
        self.loss_scale = LossScale(dtype)
        self.num_updates = 0  # Updates made so far; skipped updates do not count.
        self.rounded_at = 0  # Number of updates when the policy's weights were last rounded.
        self.take_weights(0)
        self.num_bad_steps_in_a_row = 0

    @property
    def torch_optimizers(self) -> list[torch.optim.Optimizer]:
        """All optimizers, those of the policy first."""
        critic = self._critic_optimizer
        return [*self.optimizer.optimizers, *(critic.optimizers if critic is not None else [])]

    @property
    def masters(self) -> dict[int, Tensor]:
        """The masters of stochastically rounded weights, by the identity of these; {}: none."""
        return {} if self._copies is None else self._copies.masters

    def take_weights(self, number: int) -> None:
        """Round the policy's weights, which have the numbers of the masters now.

        Nothing happens with `learner.rounding=nearest`.

        Args:
            number: the updates made so far, from which the random numbers follow.
        """
        self.rounded_at = number
        if self._copies is not None:
            self._copies.take(number)

    def put_masters(self) -> None:
        """Let the policy's weights have the numbers of the masters."""
        if self._copies is not None:
            self._copies.put()

    def zero_grad(self) -> None:
        """Clear the gradients of the policy and of the critic, and free their memory."""
        self.optimizer.zero_grad()
        if self._critic_optimizer is not None:
            self._critic_optimizer.zero_grad()

    def make(
        self,
        loss: float,
        metrics: Mapping[str, float],
        *,
        scale: float,
        changes_policy: bool = True,
    ) -> Update:
        """Clip the gradients, and change the weights if they and the loss are finite.

        All ranks call this method together. The gradients are those of the loss times
        `loss_scale.value`.

        Args:
            loss: the loss without its scale, over all microbatches and ranks.
            scale: factor of the configured learning rates.
            changes_policy: False: only the critic learns.
        """
        self.optimizer.set_lr_scale(scale)
        metrics = dict(metrics)
        grad_norm = self._clip(self._policy)
        is_finite = math.isfinite(grad_norm)
        if self._critic is not None:
            metrics["critic/grad_norm"] = self._clip(self._critic)
            is_finite = is_finite and math.isfinite(metrics["critic/grad_norm"])
        # An infinite loss overflowed in the forward pass, which no scale of the loss can mend.
        is_overflow = math.isfinite(loss) and not is_finite and self.loss_scale.shrink()
        is_good = math.isfinite(loss) and is_finite
        if is_good:
            self.num_updates += 1
            self.loss_scale.count_good()
            if changes_policy:
                self.put_masters()
                self.optimizer.step()
                self.take_weights(self.num_updates)
            if self._critic_optimizer is not None:
                self._critic_optimizer.step()
        return Update(is_good, grad_norm, metrics, is_overflow)

    def _clip(self, network: nn.Module) -> float:
        """Remove the loss's scale from a network's gradient, then clip it; return its true norm."""
        parts = by_mesh(each for each in network.parameters() if each.grad is not None)
        if self.loss_scale.value != 1:
            for part in parts:
                gradients = [each.grad for each in part]
                _torch._foreach_mul_(gradients, 1 / self.loss_scale.value)
        norms = [
            whole(nn.utils.get_total_norm([each.grad for each in part if each.grad is not None]))
            for part in parts
        ]
        norm = torch.linalg.vector_norm(torch.stack(norms or [torch.zeros(())]))
        for part in parts:
            nn.utils.clip_grads_with_norm_(part, self._cfg.max_grad_norm, norm)
        return norm.item()

    def count_bad(
        self,
        updates: Sequence[Update],
        *,
        unit: str,
        number: int,
        remedy: str,
        on_bad: Callable[[], object] | None = None,
    ) -> None:
        """Count a step in which an update was skipped; a step without updates changes nothing.

        An overflow in fp16 is logged, and does not count: the next update has a smaller scale.

        Args:
            unit: names the count of steps, such as "version"; `number` is that of the step.
            remedy: sentences for the error.

        Raises: TrainingDiverged: this was the `max_bad_steps`-th such step in a row.
        """
        if not updates:
            return
        num_overflows = sum(update.is_overflow for update in updates)
        if num_overflows:
            logger.warning(
                "skipped updates whose gradients overflowed in fp16 %s=%d num_overflows=%d"
                " next_loss_scale=%g",
                unit,
                number,
                num_overflows,
                self.loss_scale.value,
            )
        num_bad = sum(not update.is_good for update in updates) - num_overflows
        if num_bad == 0:
            self.num_bad_steps_in_a_row = 0
            return
        self.num_bad_steps_in_a_row += 1
        in_a_row = self.num_bad_steps_in_a_row
        logger.warning(
            "skipped updates with NaN or infinite values %s=%d num_bad=%d in_a_row=%d",
            unit,
            number,
            num_bad,
            in_a_row,
        )
        if on_bad is not None:
            on_bad()
        if in_a_row >= self._cfg.max_bad_steps:
            raise TrainingDiverged(
                f"Losses or gradients were NaN or infinite in {in_a_row} consecutive steps up to"
                f" {unit} {number} (learner.max_bad_steps={self._cfg.max_bad_steps}). {remedy}"
            )
