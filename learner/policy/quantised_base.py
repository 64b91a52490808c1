"""Frozen weights in 8 or 4 bits beside trained adapters.

A checkpoint in bf16 is rounded to quantised numbers once, before the start, and stays a checkpoint
in bf16 (`tools/dequantise`). The engines load this checkpoint. The learner quantises its numbers
again, which changes none of them: the largest number of each block is a number of the format. Both
therefore compute with equal weights, which the learner checks for each weight.

Source: QLoRA, arXiv:2305.14314, for the 16 numbers of nf4. The scales stay in bf16 and are not
quantised themselves: a second rounding of the scales would change the numbers again.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from common.config.model import BLOCK_NUMBERS, BaseFormat
from common.errors import ConfigError
from learner.policy.expert_weights import expert_weights
from learner.policy.precision import exact_names

MAX_INT8 = 127
# Quantiles of the normal distribution, scaled to [-1, 1].
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# Blocks below this magnitude become zeros: bf16 has too few digits for the numbers of the format.
SMALLEST = 2.0**-118
PIECE_NUMBERS = 1 << 24  # Numbers that are computed at once, so that copies in fp32 are small.


def quantise(weight: Tensor, kind: BaseFormat) -> tuple[Tensor, Tensor]:
    """Return the codes and the scales of a weight, which is first rounded to bf16.

    Args:
        weight: any shape; its numbers are divided into blocks in their order.

    Returns: uint8 [number] for int8, [number / 2] for nf4; bfloat16 [number / 64], the largest
        magnitude of each block.
    """
    flat = weight.detach().to(torch.bfloat16).flatten()
    codes: list[Tensor] = []
    scales: list[Tensor] = []
    for start in range(0, len(flat), PIECE_NUMBERS):
        blocks = flat[start : start + PIECE_NUMBERS].view(-1, BLOCK_NUMBERS)
        largest = blocks.abs().amax(1, keepdim=True)
        is_zero = largest < SMALLEST
        blocks = blocks.masked_fill(is_zero, 0)
        largest = largest.masked_fill(is_zero, 0)
        shares = blocks.float() / largest.float().clamp_min(torch.finfo(torch.float32).tiny)
        scales.append(largest.flatten())
        if kind is BaseFormat.INT8:
            codes.append((shares * MAX_INT8).round_().to(torch.int8).view(torch.uint8).flatten())
            continue
        numbers = torch.tensor(NF4, device=weight.device)
        nearest = torch.bucketize(shares, (numbers[1:] + numbers[:-1]) / 2).to(torch.uint8)
        pairs = nearest.view(-1, 2)
        codes.append(pairs[:, 0] * 16 + pairs[:, 1])
    return torch.cat(codes), torch.cat(scales)


def dequantise(codes: Tensor, scales: Tensor, kind: BaseFormat, dtype: torch.dtype) -> Tensor:
    """Return the numbers of codes, flat: bf16 numbers in `dtype`."""
    per_code = 2 if kind is BaseFormat.NF4 else 1
    made = torch.empty(len(codes) * per_code, dtype=dtype, device=codes.device)
    table = _pairs(codes.device) if kind is BaseFormat.NF4 else None
    size = PIECE_NUMBERS // per_code
    for start in range(0, len(codes), size):
        part = codes[start : start + size]
        first = start * per_code
        rows = slice(first, first + len(part) * per_code)
        of_blocks = scales[first // BLOCK_NUMBERS : -(-rows.stop // BLOCK_NUMBERS), None].float()
        if table is None:
            shares = part.view(torch.int8).float().view(-1, BLOCK_NUMBERS)
            of_blocks = of_blocks / MAX_INT8
        else:
            shares = table[part.int()].view(-1, BLOCK_NUMBERS)
        made[rows] = (shares * of_blocks).flatten().to(torch.bfloat16)
    return made


def _pairs(device: torch.device) -> Tensor:
    """Return the two numbers of each byte of nf4, [256, 2] fp32."""
    numbers = torch.tensor(NF4, device=device)
    codes = torch.arange(256, device=device)
    return torch.stack([numbers[codes // 16], numbers[codes % 16]], 1)


class QuantisedWeight:
    """A quantised matrix, which is filled from a checkpoint like a tensor."""

    def __init__(self, shape: torch.Size, kind: BaseFormat, device: torch.device) -> None:
        self.shape = shape
        self.kind = kind
        per_code = 2 if kind is BaseFormat.NF4 else 1
        self.codes = torch.empty(shape.numel() // per_code, dtype=torch.uint8, device=device)
        num_blocks = shape.numel() // BLOCK_NUMBERS
        self.scales = torch.empty(num_blocks, dtype=torch.bfloat16, device=device)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()

    def copy_(self, weight: Tensor) -> None:
        """Store the numbers of a checkpoint. Raises: ConfigError: the format would change one."""
        moved = weight.to(self.codes.device)
        codes, scales = quantise(moved, self.kind)
        self.codes.copy_(codes)
        self.scales.copy_(scales)
        if not torch.equal(self.numbers(torch.float32), moved.float()):
            raise ConfigError(
                f"model.base={self.kind.value}: a weight of shape {list(self.shape)} has numbers"
                " that this format lacks, and the engine would compute with other weights than the"
                " learner. Start the run with `python run.py`, which rounds the checkpoint"
            )

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix: bf16 numbers in `dtype`."""
        return dequantise(self.codes, self.scales, self.kind, dtype).view(self.shape)


class QuantisedLinear(nn.Module):
    """A frozen linear layer whose weight is dequantised in each pass."""

    def __init__(self, layer: nn.Linear, kind: BaseFormat, device: torch.device) -> None:
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.weight = QuantisedWeight(layer.weight.shape, kind, device)
        self.bias = layer.bias

    def forward(self, states: Tensor) -> Tensor:
        """Return the products of states [..., in]."""
        kind = states.device.type
        bias = self.bias
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            states = states.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        made: Any = _Product.apply(states, self.weight, bias)
        return made


class _Product(torch.autograd.Function):
    """W x + bias with a frozen quantised W: the graph keeps no dequantised copy."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return F.linear(states, weight.numbers(states.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient @ ctx.weight.numbers(gradient.dtype), None, None


def quantisable(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """Yield (name, layer) of the linear layers below the head whose weights are quantised.

    Tables, the head, norms and the rows of routers stay in the dtype of the checkpoint.

    Raises: ConfigError: the model has experts, whose weights are not linear layers.
    """
    if expert_weights(model):
        raise ConfigError(
            f"model.base: {type(model).__name__} has experts, whose weights have no quantised form"
            " here. Use model.base=full for this model"
        )
    head = model.get_output_embeddings()
    layers = {
        name: each
        for name, each in model.named_modules()
        if isinstance(each, nn.Linear) and each is not head and ".lora_" not in name
    }
    shapes = {f"{name}.weight": each.weight.shape for name, each in layers.items()}
    exact = exact_names(model, shapes)
    for name, each in layers.items():
        if f"{name}.weight" not in exact and each.weight.numel() % BLOCK_NUMBERS == 0:
            yield name, each


def quantise_layers(model: PreTrainedModel, kind: BaseFormat, device: torch.device) -> None:
    """Replace the linear layers of a network without memory by quantised ones, to be filled."""
    for name, layer in list(quantisable(model)):
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, QuantisedLinear(layer, kind, device))


def quantised_layers(model: nn.Module) -> Iterator[tuple[str, QuantisedLinear]]:
    """Yield (name, layer) of the quantised layers of a network."""
    for name, module in model.named_modules():
        if isinstance(module, QuantisedLinear):
            yield name, module
