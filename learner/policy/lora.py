"""Low-rank adapters beside frozen layers: the model computes W x + alpha / rank * B A x.

Source: LoRA, arXiv:2106.09685; the layers are peft's, inserted into the model in place.
"""

import copy
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from common.config.learner import EXPERTS, LoraSection
from common.errors import ConfigError
from learner.policy.expert_weights import expert_weights
from learner.policy.quantised_base import QuantisedWeight

ADAPTER = "default"  # Name of the single adapter in peft.
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_TENSORS = "adapter_model.safetensors"
_COMPARED = ("r", "lora_alpha", "target_modules", "base_model_name_or_path", "target_parameters")
_PREFIX = "base_model.model."  # Prefix of the names in peft's files.
ADAPTED = re.compile(r"(\.base_layer)+\.")  # Part of the names of weights with adapters.


def add_adapters(model: PreTrainedModel, cfg: LoraSection, *, base_path: str) -> None:
    """Freeze a model and add fp32 adapters, initially without effect, to its linear layers.

    There is no dropout: the trained policy must be the function that sampled.

    Args:
        base_path: path of the frozen weights, for the adapter's configuration file.

    Raises: ConfigError: a target is not a linear layer of this model, or is its head.
    """
    from peft import LoraConfig, inject_adapter_in_model  # The import takes seconds.

    settings = LoraConfig(
        r=cfg.rank,
        lora_alpha=cfg.alpha,  # pyright: ignore[reportArgumentType] - any number will do
        target_modules=sorted(check_targets(model, cfg) - {EXPERTS}),
        target_parameters=expert_weights(model) if EXPERTS in cfg.targets else None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_path,
    )
    # A network without memory gets adapters without memory: drawing their values takes seconds.
    is_bare = all(each.is_meta for each in model.parameters())
    try:
        inject_adapter_in_model(settings, model, ADAPTER, low_cpu_mem_usage=is_bare)
    except ValueError as error:  # Such as the inner projections of Mamba, which a kernel reads.
        raise ConfigError(
            f"learner.lora.targets={','.join(cfg.targets)}: peft cannot adapt these layers of"
            f" {type(model).__name__}; remove them from the list: {error}"
        ) from error
    for name, parameter in model.named_parameters():
        is_adapter = ".lora_" in name
        parameter.requires_grad_(is_adapter)
        if is_adapter:
            parameter.data = parameter.data.float()
    for _, layer in adapted_layers(model):
        is_linear = isinstance(layer.base_layer, nn.Linear)
        if cfg.is_merged and is_linear:
            layer.forward = MethodType(_summed_forward, layer)
        elif is_linear:
            layer.forward = MethodType(_added_forward, layer)
        # Autocast casts; otherwise each input would have a copy in fp32.
        layer.cast_input_dtype_enabled = False


class AdaptedProduct(torch.autograd.Function):
    """W x + bias + scale * B A x with frozen W and bias.

    Separate operations read and write the wide results and their gradients several times more,
    which costs a CPU a tenth of a step.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor | QuantisedWeight,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
    ) -> Tensor:
        """Return [tokens, out].

        Args:
            states: [tokens, in] in the dtype of all other tensors.
            weight: [out, in]; a quantised one is dequantised in both passes.
            a: [rank, in].
            b: [out, rank].
        """
        narrow = states @ a.T  # [tokens, rank]
        is_quantised = isinstance(weight, QuantisedWeight)
        ctx.quantised = weight if is_quantised else None
        numbers = weight.numbers(states.dtype) if is_quantised else weight
        ctx.save_for_backward(states, None if is_quantised else numbers, a, b, narrow)
        ctx.scale = scale
        total = F.linear(states, numbers, bias)
        if total.dtype is torch.float32:
            return total.addmm_(narrow, b.T, alpha=scale)
        # An engine of 16 bits rounds both products before it adds them.
        return total.add_((narrow @ b.T).mul_(scale))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of the states and of the adapters."""
        states, weight, a, b, narrow = ctx.saved_tensors
        of_narrow = (gradient @ b).mul_(ctx.scale)  # [tokens, rank]
        of_states = None
        if ctx.needs_input_grad[0]:
            if ctx.quantised is not None:
                weight = ctx.quantised.numbers(gradient.dtype)
            of_states = torch.addmm(gradient @ weight, of_narrow, a)
        of_b = gradient.T @ (narrow * ctx.scale)
        return of_states, None, None, of_narrow.T @ states, of_b, None


def _added_forward(layer: Any, states: Tensor) -> Tensor:
    """Return the results of an adapted linear layer, as peft's own forward pass."""
    base = layer.base_layer
    factors: tuple[Any, ...] = (
        base.weight,
        base.bias,
        layer.lora_A[ADAPTER].weight,
        layer.lora_B[ADAPTER].weight,
    )
    kind = states.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        states = states.to(dtype)
        factors = tuple(each.to(dtype) if isinstance(each, Tensor) else each for each in factors)
    flat = states.reshape(-1, states.shape[-1])
    made: Any = AdaptedProduct.apply(flat, *factors, layer.scaling[ADAPTER])
    return made.view(*states.shape[:-1], -1)


def summed(weight: Tensor, a: Tensor, b: Tensor, *, scale: float) -> Tensor:
    """Return W + scale * B A of a linear layer, in the dtype of its tensors."""
    return torch.addmm(weight, b, a, alpha=scale)


def _summed_forward(layer: Any, states: Tensor) -> Tensor:
    """Return the results of an adapted linear layer by one product with the sum of its weights.

    Engines with merged weights have only this sum. The results of peft's three products would hide
    other changes than the rounding of the sum.
    """
    weight = layer.base_layer.weight
    factors = (layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight)
    with torch.autocast(weight.device.type, enabled=False):
        a, b = (each.to(weight.dtype) for each in factors)
        total = summed(weight, a, b, scale=layer.scaling[ADAPTER])
    return F.linear(states, total, layer.base_layer.bias)


def check_targets(model: PreTrainedModel, cfg: LoraSection) -> set[str]:
    """Return the last part of the names of the layers that get adapters.

    Raises: ConfigError: the model has no such layer.
    """
    head = model.get_output_embeddings()
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    if expert_weights(model):
        linear.add(EXPERTS)
    unknown = sorted(set(cfg.targets) - linear)
    if unknown:
        raise ConfigError(
            f"learner.lora.targets={','.join(unknown)}: {model.name_or_path} has no such linear"
            f" layer below its head. It has {', '.join(sorted(linear))}."
        )
    return set(cfg.targets)


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, layer) of peft's layers."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            yield name, module


def has_adapters(model: object) -> bool:
    """Return whether this model trains only adapters."""
    return bool(getattr(model, "peft_config", None))


def adapts_experts(model: object) -> bool:
    """Return whether adapters change the weights of experts."""
    configs = getattr(model, "peft_config", None) or {}
    return any(each.target_parameters for each in configs.values())


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the live state of a module without the weights that are frozen beside adapters."""
    state = model.state_dict(keep_vars=True)
    is_adapted = has_adapters(model)
    return {name: each for name, each in state.items() if each.requires_grad or not is_adapted}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable the adapters within the context, exactly: their share is multiplied by 0."""
    layers = [layer for _, layer in adapted_layers(model)]
    try:
        for layer in layers:
            layer.set_scale(ADAPTER, 0.0)
        yield
    finally:
        for layer in layers:
            layer.set_scale(ADAPTER, 1.0)


def adapter_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in peft's files, live tensor or this rank's shard) of the adapters."""
    for name, tensor in trained_state(model).items():
        yield _PREFIX + name.replace(f".{ADAPTER}.", "."), tensor.detach()


def load_adapter(model: nn.Module, folder: Path) -> None:
    """Load the adapters that `save_adapter` wrote."""
    saved = load_file(folder / ADAPTER_TENSORS)
    for name, tensor in adapter_tensors(model):
        tensor.copy_(saved[name])


def check_resumable(folder: Path, model: PreTrainedModel, cfg: LoraSection) -> None:
    """Check that a checkpoint fits this model: both have the same adapters, or none.

    Raises: ConfigError: names the difference.
    """
    file = folder / ADAPTER_CONFIG
    saved: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if has_adapters(model) != bool(saved):
        kind = "adapters" if saved else "whole weights"
        raise ConfigError(
            f"learner.lora.rank={cfg.rank}: {folder} holds {kind}. Continue with the setting of"
            " this checkpoint, or start another run.name."
        )
    for name in _COMPARED if saved else ():
        ours = getattr(_config_of(model), name) or []
        theirs: Any = saved.get(name) or []
        if isinstance(ours, set):
            ours = sorted(ours)
            theirs = sorted(theirs)
        if ours != theirs:
            raise ConfigError(
                f"{folder}: its adapters have {name}={theirs}, but this run has {name}={ours}."
                " Continue with the setting of this checkpoint, or start another run.name."
            )


def _config_of(model: PreTrainedModel) -> Any:
    """Return peft's configuration of the model's adapters."""
    return model.peft_config[ADAPTER]  # pyright: ignore


def save_adapter_config(folder: Path, model: PreTrainedModel) -> None:
    """Write peft's configuration of the model's adapters."""
    config = copy.copy(_config_of(model))
    config.inference_mode = True
    config.save_pretrained(str(folder))


def save_adapter(folder: Path, model: PreTrainedModel, state: Mapping[str, Tensor]) -> None:
    """Write peft's two files; `state` has the whole adapters by their names in the model."""
    save_adapter_config(folder, model)
    tensors = {
        _PREFIX + name.replace(f".{ADAPTER}.", "."): tensor.detach().cpu().contiguous()
        for name, tensor in state.items()
    }
    save_file(tensors, folder / ADAPTER_TENSORS, metadata={"format": "pt"})
