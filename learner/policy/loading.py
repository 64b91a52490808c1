"""Loads networks in shards: made without memory, sharded, then filled by each rank."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel

from common.errors import ConfigError
from learner.policy.determinism import make_deterministic, zero_dropout_rates
from learner.policy.experts.conversion import WeightRead, convert_read, plan_reads
from learner.policy.lora import ADAPTED
from learner.policy.rotary import fix_rotary

META = torch.device("meta")


def is_unloaded(network: nn.Module) -> bool:
    """Return whether some weights have a shape but no memory yet."""
    return any(parameter.is_meta for parameter in network.parameters())


def load_network(
    auto_class: Any,
    path: str,
    *,
    is_skeleton: bool,
    dtype: torch.dtype,
    attn_implementation: str,
    max_tokens: int | None = None,
) -> PreTrainedModel:
    """Return the network at `path`, whole or without memory for its weights.

    Its passes draw no random numbers. The states of a sequence do not depend on the lengths of its
    neighbours.

    Args:
        auto_class: AutoModelForCausalLM or another auto class of transformers.
        is_skeleton: only constant buffers, which are not in the files, have memory.
        max_tokens: length of the longest sequence that an engine may produce; None: the model's own
            limit.

    Raises: ConfigError: its rotary embedding cannot match the engine's, or a weight is missing.
    """
    # cuDNN's attention keeps a plan for each new length, so memory would grow without end.
    torch.backends.cuda.enable_cudnn_sdp(False)
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    zero_dropout_rates(config)
    how: dict[str, Any] = {"dtype": dtype, "attn_implementation": attn_implementation}
    if is_skeleton:
        model = _skeleton(auto_class, config, how)
    else:
        model, report = auto_class.from_pretrained(
            path, config=config, **how, local_files_only=True, output_loading_info=True
        )
        _check_complete(report["missing_keys"], path)
    fix_rotary(model, path, max_tokens=max_tokens)
    make_deterministic(model)
    return model


def _check_complete(missing: Iterable[str], path: str) -> None:
    """Check that the files have every weight: transformers would draw a missing one at random.

    Raises: ConfigError: names a missing weight.
    """
    lacking = sorted(missing)
    if lacking:
        raise ConfigError(
            f"{path}: no *.safetensors file has the weights of {lacking[0]}"
            f" ({len(lacking)} are missing). Copy all files of this model, or give a checkpoint"
            " whose architectures in config.json are a causal language model"
        )


def _skeleton(auto_class: Any, config: Any, how: dict[str, Any]) -> PreTrainedModel:
    """Return a network whose weights have no memory; its constant buffers have values."""
    with META:
        model = auto_class.from_config(config, **how)
    _compute_constants(model)
    return model


@torch.no_grad()
def _compute_constants(model: PreTrainedModel) -> None:
    """Give values to buffers that are not in the files, such as those of rotary embeddings.

    They are computed by the model's own `_init_weights`, as in `from_pretrained`.
    """
    bare = [
        (owner, name)
        for owner in model.modules()
        for name, each in owner.named_buffers(recurse=False)
        if each.is_meta and name in owner._non_persistent_buffers_set
    ]
    for owner, name in bare:
        empty = torch.zeros_like(getattr(owner, name), device="cpu")
        setattr(owner, name, empty.fill_(torch.nan) if empty.is_floating_point() else empty)
    if bare:
        _initialize(model, model)
    for owner, name in bare:
        if getattr(owner, name).isnan().any():
            raise ConfigError(
                f"learner.num_ranks: the buffer {name} of {type(owner).__name__} cannot be computed"
                " before the weights are loaded. Use learner.num_ranks=1 or another model."
            )


def _initialize(owner: PreTrainedModel, module: nn.Module) -> None:
    """Initialise a module and the modules in it, each by the innermost model that has it."""
    for child in module.children():
        _initialize(child if isinstance(child, PreTrainedModel) else owner, child)
    owner._init_weights(module)


def give_memory(network: nn.Module, device: torch.device) -> None:
    """Allocate memory for weights without it, on each rank for its shard, without values."""
    network._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)


def take_memory(network: nn.Module) -> None:
    """Remove the memory of weights that are not trained; `give_memory` restores it."""
    # Parameters without memory by original; layers may share one.
    taken: dict[int, nn.Parameter] = {}
    for owner in network.modules():
        for name, each in owner.named_parameters(recurse=False):
            if not each.requires_grad:
                bare = nn.Parameter(torch.empty_like(each, device=META), requires_grad=False)
                setattr(owner, name, taken.setdefault(id(each), bare))


def fill(network: PreTrainedModel, path: str) -> None:
    """Read a network's weights, sharded or not, from the safetensors files at `path`.

    Each rank reads only its own rows, so no process ever holds the whole weights. A tensor that
    must be converted may be read whole. Adapters do not change.

    Raises: ConfigError: a weight is missing in the files, or has another shape.
    """
    with ExitStack() as opened:
        files: dict[str, Any] = {}
        for file in sorted(Path(path).glob("*.safetensors")):
            reader = opened.enter_context(safe_open(file, "pt"))
            files |= dict.fromkeys(reader.keys(), reader)
        weights = {name: each for names, each in _tensors(network) for name in names}
        filled: set[str] = set()
        for read in plan_reads(network, files, weights):
            for name, part in _parts(network, read, files, weights, path):
                local = _local(weights[name])
                if local.numel():
                    local.copy_(part)
                filled.add(name)
    for names, _ in _tensors(network):
        if filled.isdisjoint(names):
            raise ConfigError(f"{path}: no *.safetensors file has the weights of {names[0]}")


def _parts(
    network: PreTrainedModel,
    read: WeightRead,
    files: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    path: str,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, this rank's rows) of the weights that a read gives.

    Raises: ConfigError: a weight has another shape.
    """
    if read.converter is None:
        ((name,),) = read.sources.values()
        tensor = weights[read.weight]
        found = files[name].get_slice(name)
        _check_shape(name, found.get_shape(), tensor, path)
        yield read.weight, _rows(found, tensor) if tensor.ndim else files[name].get_tensor(name)
        return
    is_by_row = read.is_by_row and weights[read.weight].ndim
    rows = _range_of(weights[read.weight]) if is_by_row else slice(None)
    if is_by_row and not _local(weights[read.weight]).numel():
        yield read.weight, torch.empty(0)
        return
    made = convert_read(network, read, lambda name: files[name].get_tensor(name), rows)
    for name, each in made.items():
        tensor = weights[name]
        if is_by_row:
            expected = _local(tensor)
            _check_shape(name, each.shape, expected, path)
            yield name, each
        else:
            _check_shape(name, each.shape, tensor, path)
            yield name, _rows(each, tensor) if tensor.ndim else each


def _check_shape(name: str, found: Sequence[int], tensor: Tensor, path: str) -> None:
    if list(found) != list(tensor.shape):
        raise ConfigError(
            f"{path}: {name} has shape {list(found)}, but config.json requires {list(tensor.shape)}"
        )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _rows(found: Any, tensor: Tensor) -> Tensor:
    """Return this rank's rows of a tensor on disk: FSDP shards along the first axis."""
    return found[_range_of(tensor)]


def _range_of(tensor: Tensor) -> slice:
    """Return this rank's rows of a weight; all rows of a weight that is not sharded."""
    if not isinstance(tensor, DTensor):
        return slice(None)
    size = tensor.device_mesh.size()
    rank = tensor.device_mesh.get_local_rank()
    num_rows = -(-tensor.shape[0] // size)  # As in torch.chunk.
    return slice(rank * num_rows, min((rank + 1) * num_rows, tensor.shape[0]))


def _tensors(network: PreTrainedModel) -> Iterator[tuple[list[str], Tensor]]:
    """Yield each weight once with its names; tied weights have several."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for key, tensor in network.state_dict(keep_vars=True).items():
        if ".lora_" in key:
            continue
        names.setdefault(id(tensor), []).append(ADAPTED.sub(".", key))
        tensors[id(tensor)] = tensor
    for key, tensor in tensors.items():
        yield names[key], tensor.detach()
