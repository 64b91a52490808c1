"""Weights under their names in checkpoint files.

Some families have other tensors in memory than in their files: all experts of a layer are one
weight in memory and several tensors in a file. Transformers converts them when it loads and saves a
model. This module applies the same conversions to shards, and to tensors that engines receive.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from common.errors import ConfigError


def expert_weights(model: nn.Module) -> list[str]:
    """Return the names of the weights of all experts in each layer, [] without experts.

    Example: ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"].
    """
    names: set[str] = set()
    for name, module in model.named_modules():
        if holds_experts(module):
            place = ".".join(name.split(".")[-2:])
            weights = module.named_parameters(recurse=False)
            names |= {f"{place}.{key}" for key, each in weights if each.ndim == 3}
    return sorted(names)


def holds_experts(module: nn.Module) -> bool:
    """Return whether a module holds the fused weights of several experts."""
    is_convolution = isinstance(module, nn.modules.conv._ConvNd)
    weights = module.parameters(recurse=False)
    is_fused = any(each.ndim == 3 for each in weights) and not is_convolution
    return is_fused and hasattr(module, "num_experts")


# A tensor of a file is read from at most this many places of the weights.
MAX_RUNS = 64
PROXY_WIDTH = 2  # Last axis of the small stand-in of a weight with three axes.


class FlatWeight(Protocol):
    """A weight in memory: a tensor, or one that is merged with its adapter when it is read."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def numel(self) -> int: ...


Weight = TypeVar("Weight", bound=FlatWeight)


@dataclass(frozen=True, slots=True)
class WeightRead:
    """Tensors of the files that give one weight, or several."""

    weight: str  # Name of the weight, or of the first one.
    converter: WeightConverter | None  # None: the tensor is the weight.
    # Names in the files, by the pattern that they match.
    sources: dict[str, list[str]] = field(default_factory=dict)

    @property
    def is_by_row(self) -> bool:
        """Whether each row of the weight is made of one tensor for each pattern."""
        if self.converter is None:
            return False
        first, *others = self.converter.operations
        merges = isinstance(first, MergeModulelist) and first.dim == 0
        return merges and all(getattr(each, "dim", 0) != 0 for each in others)


def plan_reads(
    network: PreTrainedModel, names: Iterable[str], weights: Mapping[str, Tensor]
) -> list[WeightRead]:
    """Return how the tensors of files give a network's weights; other tensors are left out.

    Args:
        names: names in the files.
        weights: weights of the network by name.
    """
    transforms = get_model_conversion_mapping(network)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix = network.base_model_prefix
    targets = dict(weights)
    reads: dict[str, WeightRead] = {}
    for name in sorted(names, key=dot_natural_key):
        weight, pattern = rename_source_key(name, renamings, converters, prefix, targets)
        if weight not in targets:
            weight, pattern = rename_source_key(name, [], [], prefix, targets)
        if weight in targets:
            converter = None if pattern is None else by_pattern[pattern]
            read = reads.setdefault(weight, WeightRead(weight, converter))
            read.sources.setdefault(pattern or name, []).append(name)
    # Saved and published tensors get the names of these files.
    network._weight_conversions = [each for each in transforms if each.was_used()]  # pyright: ignore
    return list(reads.values())


def convert_read(
    network: PreTrainedModel,
    read: WeightRead,
    load: Callable[[str], Tensor],
    rows: slice = slice(None),
) -> dict[str, Tensor]:
    """Return weights by name, made of the tensors of a file.

    Args:
        load: returns the tensor of a name in the files.
        rows: rows of the weight to make, for a read that is by row.
    """
    assert read.converter is not None
    converter = deepcopy(read.converter)
    for pattern, names in read.sources.items():
        for name in names[rows] if read.is_by_row else names:
            converter.add_tensor(read.weight, name, pattern, load(name))  # pyright: ignore
    made = converter.convert(read.weight, model=network, config=network.config)
    return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a checkpoint file, as ranges of flat weights in memory, one after another."""

    shape: tuple[int, ...]
    runs: tuple[tuple[Any, int, int], ...]  # (weight or shard, first number, count)

    @property
    def dtype(self) -> torch.dtype:
        return self.runs[0][0].dtype


def stored_tensors(
    network: PreTrainedModel, weights: Mapping[str, Weight]
) -> dict[str, Weight | Stored]:
    """Return weights under their names in a checkpoint; a weight that is stored as it is, as it is.

    Args:
        weights: live tensors of the network, or this rank's shards.

    Raises: ConfigError: a tensor of the file is no range of the weights.
    """
    bare = {name: torch.empty(each.shape, device="meta") for name, each in weights.items()}
    origins = {id(each): name for name, each in bare.items()}
    named = revert_weight_conversion(network, bare)
    unchanged = {name: origins[id(each)] for name, each in named.items() if id(each) in origins}
    others = {name: weights[name] for name in weights.keys() - set(unchanged.values())}
    made = _converted(network, {name: others[name] for name in weights if name in others})
    return {name: weights[unchanged[name]] if name in unchanged else made[name] for name in named}


def _converted(network: PreTrainedModel, weights: Mapping[str, FlatWeight]) -> dict[str, Stored]:
    """Return the tensors of the file by converting the indices of the weights' numbers."""
    proxies: dict[str, Tensor] = {}
    starts: list[int] = []
    total = 0
    for name, weight in weights.items():
        shape = _proxy_shape(weight.shape)
        count = shape.numel()
        proxies[name] = torch.arange(total, total + count).view(shape)
        starts.append(total)
        total += count
    bases = list(weights.values())
    tensors = revert_weight_conversion(network, proxies) if proxies else {}
    return {name: _stored(name, each, bases, starts) for name, each in tensors.items()}


def _proxy_shape(shape: torch.Size) -> torch.Size:
    """Return a smaller shape of the same layout: conversions leave the last of three axes whole."""
    is_reducible = len(shape) == 3 and shape[-1] % PROXY_WIDTH == 0
    return torch.Size([*shape[:-1], PROXY_WIDTH]) if is_reducible else shape


def _stored(
    name: str, indices: Tensor, bases: Sequence[FlatWeight], starts: Sequence[int]
) -> Stored:
    """Return a stored tensor as ranges of flat weights, from the index of each number."""
    flat = indices.flatten()
    limits = torch.tensor(starts)
    owners = torch.searchsorted(limits, flat, right=True) - 1
    is_new = (flat.diff() != 1) | (owners.diff() != 0)
    cuts = [0, *(is_new.nonzero().flatten() + 1).tolist(), len(flat)]
    runs: list[tuple[Any, int, int]] = []
    width = 1
    for begin, end in pairwise(cuts):
        owner = int(owners[begin])
        base = bases[owner]
        width = base.numel() // max(_proxy_shape(base.shape).numel(), 1)
        runs.append((base, (int(flat[begin]) - starts[owner]) * width, (end - begin) * width))
        if len(runs) > MAX_RUNS:
            raise ConfigError(
                f"{name}: the learner cannot publish this tensor, because a checkpoint stores it"
                " in another order of numbers than the network. Choose another model.path."
            )
    shape = (*indices.shape[:-1], indices.shape[-1] * width)
    return Stored(tuple(shape), tuple(runs))
