"""The tensors of a trainer by name, copied aside and written while training goes on, and read back.

Source: torch.distributed.checkpoint; each rank writes its parts, any number of ranks reads them.
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from common.errors import ConfigError
from learner.policy.lora import trained_state
from learner.training.optimizers.optimizer import BLOCK
from learner.training.ranks import Ranks

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # on purpose

MOMENTS = "optimizer."  # before the name of a parameter and of what an optimizer keeps of it


class StateWriter(AsyncStager):
    """Copies a state to the host, then writes it in a thread. One at a time.

    The copies stay allocated for the next one: on GPUs in pinned memory, at full speed.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._group = ranks.saving
        self._copies: dict[str, Tensor] = {}
        self._last: Future[Any] | None = None

    def start(self, state: Mapping[str, Tensor], folder: Path) -> Future[Any]:
        """Return when training may change the state; the future tells when all ranks wrote it."""
        if self._last is not None:
            wait([self._last])  # how it went is told to who started it
        found = async_save(
            dict(state),
            checkpoint_id=folder,
            process_group=self._group,
            async_stager=self,
            no_dist=self._group is None,
        )
        self._last = cast(Future[Any], found)
        return self._last

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return copies of tensors on the host; a part of a tensor stays a part."""
        with torch.no_grad():
            for name, value in state_dict.items():
                plain = value.detach()
                copy = self._copies.get(name)
                if copy is None or copy.shape != plain.shape:
                    self._copies[name] = copy = _host_copy(plain)
                local_part(copy).copy_(local_part(plain), non_blocking=True)
        self._copies = {name: self._copies[name] for name in state_dict}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return dict(self._copies)

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: `stage` has copied all when it returns."""
        return False

    def close(self) -> None:
        self._copies = {}


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, all of one that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _host_copy(tensor: Tensor) -> Tensor:
    """Return memory of the host for a tensor, or for this rank's part of one."""
    local = local_part(tensor)
    empty = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
    return _like(tensor, empty)


def _like(pattern: Tensor, local: Tensor, shape: torch.Size | None = None) -> Tensor:
    """Return a local tensor as the part of a whole one, as large and cut like `pattern`.

    Args:
        shape: of the whole one, if another; contiguous.
    """
    if not isinstance(pattern, DTensor):
        return local
    stride = (shape[1], 1) if shape else pattern.stride()
    meta = TensorMeta(shape or pattern.shape, stride, local.dtype)
    spec = DTensorSpec(pattern.device_mesh, pattern.placements, tensor_meta=meta)
    # Not `from_local`, which would copy what is offloaded to where the mesh computes.
    return DTensor(local, spec, requires_grad=False)


def _stored(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield what a tensor is in memory: itself, or codes of 8 bits and the scales of their blocks.

    As numbers the codes would not come back the same: a block whose largest number is negative
    is rounded below its scale.
    """
    local: Any = local_part(tensor.detach())
    if not hasattr(local, "codes"):
        yield name, tensor
        return
    yield f"{name}.codes", _like(tensor, local.codes)
    row = tensor.numel() // len(tensor)
    per_row = math.lcm(row, BLOCK) // BLOCK  # the scales are cut as the codes: by whole rows
    scale = local.scale.view(-1, per_row)
    shape = torch.Size((tensor.numel() // BLOCK // per_row, per_row))
    yield f"{name}.scale", _like(tensor, scale, shape)


def live_tensors(
    modules: Mapping[str, nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> dict[str, Tensor]:
    """Return all tensors that training changes, by name: weights first, then moments.

    Args:
        modules: by the name that goes before those of its weights.
    """
    weights = _weights(modules)
    names = {id(tensor): name for name, tensor in weights.items()}
    moments = {
        name: part
        for optimizer in optimizers
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
        for name, part in _stored(f"{MOMENTS}{names[id(parameter)]}.{key}", value)
    }
    return weights | moments


def _weights(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return what is trained by name; of tied weights the first name alone."""
    found = {
        f"{prefix}.{name}": tensor
        for prefix, module in modules.items()
        for name, tensor in trained_state(module).items()
    }
    first = {id(tensor): name for name, tensor in reversed(found.items())}
    return {name: tensor for name, tensor in found.items() if first[id(tensor)] == name}


@torch.no_grad()
def restore(
    folder: Path, modules: Mapping[str, nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> None:
    """Set weights and moments to what any number of ranks wrote; each rank reads its own parts.

    Raises: ConfigError: they are those of another model or optimizer.
    """
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    weights = _weights(modules)
    others = {name for name in saved if not name.startswith(MOMENTS)}
    if others != weights.keys() or any(
        list(saved[name].size) != list(each.shape)  # pyright: ignore - of a tensor
        for name, each in weights.items()
    ):
        raise ConfigError(f"{folder}: the saved weights are those of another model")
    owners = {id(tensor): name for name, tensor in weights.items()}
    optimizers = list(optimizers)
    for optimizer in optimizers:
        _make_moments(optimizer, owners, set(saved))
    live = live_tensors(modules, optimizers)
    if live.keys() != saved.keys():
        kinds = sorted({name.rpartition(".")[2] for name in live.keys() ^ saved.keys()})
        raise ConfigError(
            f"{folder}: the saved moments are those of another optimizer ({', '.join(kinds)});"
            " go on with the learner.optimizer and learner.moments it was trained with (8bit: and"
            " its learner.num_ranks)"
        )
    load({n: each.detach() for n, each in live.items()}, checkpoint_id=folder, no_dist=True)


def _make_moments(
    optimizer: torch.optim.Optimizer, owners: Mapping[int, str], saved: set[str]
) -> None:
    """Let an optimizer make its moments as it does, with a step of rate 0 on no gradient."""
    begun = {n.removeprefix(MOMENTS).rpartition(".")[0] for n in saved if n.startswith(MOMENTS)}
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        for parameter in group["params"]:
            if owners[id(parameter)] in begun:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def read_weights(folder: Path, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield (name without prefix, whole tensor on the host) of what was written, one by one."""
    for name, entry in FileSystemReader(folder).read_metadata().state_dict_metadata.items():
        if name.startswith(f"{prefix}."):
            whole = torch.empty(entry.size, dtype=entry.properties.dtype)  # pyright: ignore
            load({name: whole}, checkpoint_id=folder, no_dist=True)  # in place
            yield name.removeprefix(f"{prefix}."), whole
