"""Loading shard by shard: networks are made without memory, cut, and each rank reads its part."""

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
    """Return whether some of its weights have a shape and no memory yet."""
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

    Its passes draw no random numbers, and a sequence's states do not depend on its neighbours'
    lengths.

    Args:
        auto_class: AutoModelForCausalLM or another of transformers.
        is_skeleton: only constant buffers, which no file has, are real.
        max_tokens: of the longest sequence that an engine may make; None: the model's own limit.

    Raises: ConfigError: its rotary embedding cannot be that of the engine.
    """
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
    """Return a network whose weights have no memory; its constant buffers are real."""
    with META:
        model = auto_class.from_config(config, **how)
    for owner in model.modules():
        constants = [name for name, each in owner.named_buffers(recurse=False) if each.is_meta]
        fresh = type(owner)(model.config) if constants else None  # rotary embeddings: not saved
        for name in constants:
            setattr(owner, name, getattr(fresh, name))
    return model


def give_memory(network: nn.Module, device: torch.device) -> None:
    """Give weights without memory some, on each rank for its part; they are to be filled."""
    network._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)


def take_memory(network: nn.Module) -> None:
    """Leave weights that are not trained without memory; `give_memory` is the way back."""
    taken: dict[int, nn.Parameter] = {}  # by parameter, of which layers may share one
    for owner in network.modules():
        for name, each in owner.named_parameters(recurse=False):
            if not each.requires_grad:
                bare = nn.Parameter(torch.empty_like(each, device=META), requires_grad=False)
                setattr(owner, name, taken.setdefault(id(each), bare))


def fill(network: PreTrainedModel, path: str) -> None:
    """Read the weights of a network, perhaps a sharded one, from the safetensors files at `path`.

    Each rank reads the rows that it keeps: nobody ever has the whole in memory. Adapters stay.

    Raises: ConfigError: a weight is in none of the files, or of another shape.
    """
    with ExitStack() as opened:
        files: dict[str, Any] = {}
        for file in sorted(Path(path).glob("*.safetensors")):
            reader = opened.enter_context(safe_open(file, "pt"))
            files |= dict.fromkeys(reader.keys(), reader)
        for names, tensor in _tensors(network):
            name = next((name for name in names if name in files), None)
            if name is None:
                raise ConfigError(f"{path}: the weights of {names[0]} are in none of its files")
            found = files[name].get_slice(name)
            if list(found.get_shape()) != list(tensor.shape):
                raise ConfigError(
                    f"{path}: {name} is {found.get_shape()}, config.json says {list(tensor.shape)}"
                )
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.numel():
                local.copy_(_rows(found, tensor) if tensor.ndim else files[name].get_tensor(name))


def _rows(found: Any, tensor: Tensor) -> Tensor:
    """Return what this rank keeps of a tensor on disk: FSDP cuts along the first axis."""
    if not isinstance(tensor, DTensor):
        return found[:]
    size, rank = tensor.device_mesh.size(), tensor.device_mesh.get_local_rank()
    num_rows = -(-tensor.shape[0] // size)  # as torch.chunk
    return found[rank * num_rows : min((rank + 1) * num_rows, tensor.shape[0])]


def _tensors(network: PreTrainedModel) -> Iterator[tuple[list[str], Tensor]]:
    """Yield each weight once with the names that it may have in a file.

    Files of a causal language model name the trunk's weights with its prefix before them.
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
