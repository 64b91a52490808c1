"""Loads networks in shards: made without memory, sharded, then filled by each rank."""

from collections.abc import Iterator
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

    Raises: ConfigError: its rotary embedding cannot match the engine's.
    """
    # cuDNN's attention keeps a plan for each new length, so memory would grow without end.
    torch.backends.cuda.enable_cudnn_sdp(False)
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    zero_dropout_rates(config)
    how: dict[str, Any] = {"dtype": dtype, "attn_implementation": attn_implementation}
    if is_skeleton:
        model = _skeleton(auto_class, config, how)
    else:
        model = auto_class.from_pretrained(path, config=config, **how, local_files_only=True)
    fix_rotary(model, path, max_tokens=max_tokens)
    make_deterministic(model)
    return model


def _skeleton(auto_class: Any, config: Any, how: dict[str, Any]) -> PreTrainedModel:
    """Return a network whose weights have no memory; its constant buffers have values."""
    with META:
        model = auto_class.from_config(config, **how)
    for owner in model.modules():
        constants = [name for name, each in owner.named_buffers(recurse=False) if each.is_meta]
        fresh = type(owner)(model.config) if constants else None  # Rotary embeddings are not saved.
        for name in constants:
            setattr(owner, name, getattr(fresh, name))
    return model


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

    Each rank reads only its own rows, so no process ever holds the whole weights. Adapters do not
    change.

    Raises: ConfigError: a weight is missing in the files, or has another shape.
    """
    with ExitStack() as opened:
        files: dict[str, Any] = {}
        for file in sorted(Path(path).glob("*.safetensors")):
            reader = opened.enter_context(safe_open(file, "pt"))
            files |= dict.fromkeys(reader.keys(), reader)
        for names, tensor in _tensors(network):
            name = next((name for name in names if name in files), None)
            if name is None:
                raise ConfigError(f"{path}: no *.safetensors file has the weights of {names[0]}")
            found = files[name].get_slice(name)
            if list(found.get_shape()) != list(tensor.shape):
                raise ConfigError(
                    f"{path}: {name} has shape {found.get_shape()}, but config.json requires"
                    f" {list(tensor.shape)}"
                )
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.numel():
                local.copy_(_rows(found, tensor) if tensor.ndim else files[name].get_tensor(name))


def _rows(found: Any, tensor: Tensor) -> Tensor:
    """Return this rank's rows of a tensor on disk: FSDP shards along the first axis."""
    if not isinstance(tensor, DTensor):
        return found[:]
    size = tensor.device_mesh.size()
    rank = tensor.device_mesh.get_local_rank()
    num_rows = -(-tensor.shape[0] // size)  # As in torch.chunk.
    return found[rank * num_rows : min((rank + 1) * num_rows, tensor.shape[0])]


def _tensors(network: PreTrainedModel) -> Iterator[tuple[list[str], Tensor]]:
    """Yield each weight once with its possible names in a file.

    Files of a causal language model add a prefix to the names of the trunk's weights.
    """
    prefix = network.base_model_prefix
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for key, tensor in network.state_dict(keep_vars=True).items():
        if ".lora_" in key:
            continue
        name = key.replace(".base_layer.", ".")
        names.setdefault(id(tensor), []).extend([name, f"{prefix}.{name}"])
        tensors[id(tensor)] = tensor
    for key, tensor in tensors.items():
        yield names[key], tensor.detach()
