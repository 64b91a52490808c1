"""Weights with their adapters merged: for files, and live for engines that take no adapters."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from learner.policy.lora import ADAPTED, ADAPTER, adapted_layers, summed


@dataclass(frozen=True, slots=True)
class _Change:
    """The change of one weight by its adapter."""

    layer: str  # Name of the layer with the factors.
    scale: float
    num_experts: int  # 0: a linear layer.
    is_output_first: bool  # Axes of an expert's weight: outputs, inputs.

    def factors(self, state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return A and B of the adapter in a state."""
        a, b = (state[f"{self.layer}.lora_{x}.{ADAPTER}.weight"].detach() for x in "AB")
        return a, b

    def merged(self, weight: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Return the weight with its change, in fp32."""
        return self.added(weight, *self.factors(state))

    def added(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return `weight` + scale * B A in fp32, for each expert."""
        return self.computed(_whole(weight).float(), _whole(a), _whole(b))

    def computed(self, weight: Tensor, a: Tensor, b: Tensor, first: int = 0) -> Tensor:
        """Return the sum that the forward pass computes: by this operation, in the weight's dtype.

        The result is in fp32.

        Args:
            weight: the weight, or adjacent experts or rows of it.
            first: index of the first one of these.
        """
        a = a.to(weight.dtype)
        b = b.to(weight.dtype)
        part = slice(first, first + len(weight))
        if self.num_experts:
            left, right = (each[part] for each in self._of_experts(a, b))
            return torch.baddbmm(weight, left, right, alpha=self.scale).float()
        return summed(weight, a, b[part], scale=self.scale).float()

    def _of_experts(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of each expert's change, in the order of its weight's axes."""
        a = a.reshape(self.num_experts, -1, a.shape[-1])  # [expert, rank, input]
        b = b.reshape(b.shape[0], -1, self.num_experts).permute(2, 0, 1)  # [expert, output, rank]
        return (b, a) if self.is_output_first else (a.mT, b.mT)


Gather = Callable[[Tensor], Tensor]  # Returns the whole of a sharded tensor, on all ranks.


class LastMerged:
    """The merged numbers that were read last, so that a read in parts merges once."""

    def __init__(self) -> None:
        self.key: tuple[object, ...] = ()
        self.factors: tuple[Tensor, Tensor] | None = None  # Whole, of several ranks.
        self.numbers: Tensor | None = None  # Flat, fp32.


class Merged:
    """A live weight with its adapter, merged when it is read.

    Of a sharded weight each rank merges its own numbers. The factors of the adapter are sharded in
    another way, so all ranks call `gather` before one of them reads.
    """

    def __init__(
        self, weight: Tensor, factors: tuple[Tensor, Tensor], change: _Change, last: LastMerged
    ) -> None:
        self.shape = weight.shape
        self.dtype = torch.float32
        self.weight = weight
        self._factors = factors
        self._change = change
        self._last = last

    def numel(self) -> int:
        return self.weight.numel()

    def gather(self, whole: Gather) -> None:
        """Gather the factors of this version."""
        factors = (whole(self._factors[0]), whole(self._factors[1]))
        before = self._last.factors
        is_same = self._last.key[:1] == (id(self),) and before is not None
        is_same = is_same and all(map(torch.equal, factors, before or ()))
        if not is_same:
            self._last.key = ()
            self._last.factors = factors

    def numbers(self) -> Tensor:
        """Return the merged numbers that this rank has, flat."""
        weight, first = _own_rows(self.weight)
        is_sharded = isinstance(self.weight, DTensor)
        factors = self._factors
        key: tuple[object, ...] = (id(self), *(each._version for each in (weight, *factors)))
        if is_sharded:
            assert self._last.factors is not None
            factors = self._last.factors
            key = (id(self), weight._version)
        if self._last.key != key:
            self._last.numbers = None  # Frees the memory before the next merge.
            made = self._change.computed(weight, *factors, first=first)
            self._last.numbers = made.flatten()
            self._last.key = key
        assert self._last.numbers is not None
        return self._last.numbers


def _own_rows(weight: Tensor) -> tuple[Tensor, int]:
    """Return this rank's rows of a weight, and the index of the first one."""
    if not isinstance(weight, DTensor):
        return weight, 0
    _, offset = compute_local_shape_and_global_offset(
        weight.shape, weight.device_mesh, weight.placements
    )
    return weight.to_local(), offset[0]


def merged_tensors(model: nn.Module, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield (transformers name, tensor) of a model's state with merged adapters.

    Merged weights are in fp32: bf16 would round small changes away.
    """
    changes = _changes(model)
    for name, tensor in state.items():
        if ".lora_" in name:
            continue
        plain = ADAPTED.sub(".", name)
        change = changes.get(plain)
        yield plain, tensor if change is None else change.merged(tensor.detach(), state)


def live_merged(model: nn.Module) -> Iterator[tuple[str, Tensor | Merged]]:
    """Yield (transformers name, live weight), tied weights once.

    A weight with an adapter is merged when it is read.
    """
    changes = _changes(model)
    state = model.state_dict(keep_vars=True)
    last = LastMerged()
    seen: set[int] = set()
    for name, tensor in state.items():
        if ".lora_" in name or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        plain = ADAPTED.sub(".", name)
        change = changes.get(plain)
        bare = tensor.detach()
        if change is None:
            yield plain, bare
        else:
            yield plain, Merged(bare, change.factors(state), change, last)


def _changes(model: nn.Module) -> dict[str, _Change]:
    """Return the change of each adapted weight, by its transformers name."""
    changes: dict[str, _Change] = {}
    for name, layer in adapted_layers(model):
        parameter = getattr(layer, "parameter_name", "weight")
        plain = ADAPTED.sub(".", f"{name}.{parameter}")
        num_experts = layer.num_experts if hasattr(layer, "parameter_name") else 0
        is_output_first = bool(getattr(layer, "_did_swap_in_out_features", True))
        changes[plain] = _Change(name, layer.scaling[ADAPTER], num_experts, is_output_first)
    return changes


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
