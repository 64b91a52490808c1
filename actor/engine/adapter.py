"""The policy's adapter in the engine: vLLM's own LoRA layers, filled from memory.

It is not merged into the weights. LoRA's changes are far below the resolution of bf16 and would be
rounded away.
"""

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any, cast, get_args

import torch
from vllm.config import VllmConfig
from vllm.config.lora import MaxLoRARanks
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name

from common.config.learner import LoraSection
from common.errors import EngineError

# The only adapter. Its path does not exist: the engine must never load it from disk.
REQUEST = LoRARequest(lora_name="policy", lora_int_id=1, lora_path="/published/in/memory")

# Method of vLLM's models that changes the order of the rows of a weight, by its name.
REORDER = "permute_qk_weight_for_rotary"

Pair = tuple[torch.Tensor, torch.Tensor]  # A [rank, inputs] and B [outputs, rank] of a module.


def adapter_at(folder: Path) -> LoRARequest:
    """Return the request for the adapter in a folder, for an engine without a learner."""
    return LoRARequest(lora_name="kept", lora_int_id=2, lora_path=str(folder.resolve()))


def engine_options(cfg: LoraSection) -> dict[str, Any]:
    """Return the engine's arguments for adapters; {} if full weights are trained."""
    if not cfg.rank:
        return {}
    sizes = sorted(get_args(MaxLoRARanks))
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(size for size in sizes if size >= cfg.rank),
        # Other target modules cost time, and an adapter on the head breaks scores on CPU (0.32.0).
        "lora_target_modules": list(cfg.targets),
        "additional_config": {"lora_alpha": cfg.alpha},
    }


def load_adapter(
    model_runner: Any, tensors: Iterable[tuple[str, torch.Tensor]], config: VllmConfig
) -> None:
    """Replace the engine's adapter by `tensors` (peft's names). Runs in a worker, while paused.

    The tensors are copied from the staging buffer into the layers' slots, which stay assigned.
    vLLM's own way removes the adapter and copies it several times, through pinned host memory.

    Raises: EngineError: the engine has no LoRA layer for one of the tensors.
    """
    alpha = cast(dict[str, Any], config.additional_config)["lora_alpha"]
    model = model_runner.get_model()
    renamed = getattr(model, "hf_to_vllm_mapper", None)
    weights = _by_module(tensors, None if renamed is None else renamed.get_rename_mapper())
    weights = _in_order_of_base(model, weights)
    manager = model.lora_manager
    places = {*manager.modules, *chain.from_iterable(manager.packed_modules.values())}
    strangers = sorted(weights.keys() - places)
    if strangers:
        raise EngineError(
            f"learner.lora.targets: the engine (vLLM) cannot adapt {strangers[0]}; remove it"
        )
    rank = _rank_of(weights)
    dtype = model_runner.lora_config.lora_dtype
    if all(isinstance(layer, BaseLinearLayerWithLoRA) for layer in manager.modules.values()):
        _fill_slots(manager, weights, scaling=alpha / rank, dtype=dtype)
    else:  # Layers of experts pack their adapters in a form of their own.
        _reload_adapter(manager, weights, scaling=alpha / rank, dtype=dtype)


def _by_module(tensors: Iterable[tuple[str, torch.Tensor]], mapper: Any) -> dict[str, Pair]:
    """Return the two matrices, A and B, of each module."""
    halves: dict[str, dict[bool, torch.Tensor]] = {}
    for name, tensor in tensors:
        module, is_first = parse_fine_tuned_lora_name(name, mapper)
        halves.setdefault(module, {})[is_first] = tensor
    return {module: (both[True], both[False]) for module, both in halves.items()}


def _in_order_of_base(model: torch.nn.Module, weights: dict[str, Pair]) -> dict[str, Pair]:
    """Return matrices whose B has its rows in the order of the weights in the engine.

    vLLM (0.32) changes the order of the rows of Llama 4's queries and keys when it loads them, and
    not that of their adapters.
    """
    owner: Any = next((each for each in model.modules() if hasattr(each, REORDER)), None)
    if owner is None:
        return weights
    reorder = getattr(owner, REORDER)
    return {
        name: (first, reorder(f"{name}.weight", second)[1])
        for name, (first, second) in weights.items()
    }


def _fill_slots(
    manager: Any, weights: dict[str, Pair], *, scaling: float, dtype: torch.dtype
) -> None:
    """Copy the matrices into the adapter's slot of each layer; assign the slot if there is none."""
    if REQUEST.lora_int_id not in manager.lora_index_to_id:
        name = next(iter(weights))  # vLLM keeps what it is given, so it is given one module only.
        _reload_adapter(manager, {name: weights[name]}, scaling=1.0, dtype=dtype)
    slot = manager.lora_index_to_id.index(REQUEST.lora_int_id)
    for name, layer in manager.modules.items():
        parts = [weights.get(part) for part in manager.packed_modules.get(name, [name])]
        if not any(parts):
            continue
        firsts = [part and part[0] for part in parts]
        seconds = [part and part[1] for part in parts]
        is_packed = name in manager.packed_modules
        layer.set_lora(
            slot, firsts if is_packed else firsts[0], seconds if is_packed else seconds[0]
        )
        if scaling != 1:
            for stacked in layer.lora_b_stacked:
                stacked[slot].mul_(scaling)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # The next version is staged into the same buffer.


def _rank_of(weights: dict[str, Pair]) -> int:
    """Return the rank of an adapter: the number of rows of A."""
    return next(iter(weights.values()))[0].shape[0]


def _reload_adapter(
    manager: Any, weights: dict[str, Pair], *, scaling: float, dtype: torch.dtype
) -> None:
    """Replace the adapter by vLLM's own way, from copies of the tensors in host memory."""
    rank = _rank_of(weights)
    layers = {
        name: LoRALayerWeights(name, rank, rank, *_copies(pair, dtype), scaling=scaling)
        for name, pair in weights.items()
    }
    manager.remove_adapter(REQUEST.lora_int_id)
    manager.add_adapter(LoRAModel(REQUEST.lora_int_id, rank, layers))
    manager.activate_adapter(REQUEST.lora_int_id)


def _copies(pair: Pair, dtype: torch.dtype) -> Pair:
    """Return copies of A and B in host memory."""
    first, second = (each.to(device="cpu", dtype=dtype, copy=True) for each in pair)
    return first, second
