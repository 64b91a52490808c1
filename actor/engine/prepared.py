"""A version made ready beside generation, on a CPU: what pauses generation is a swap of pointers.

A CPU engine packs its matrices for its kernels. To pack is most of the price of a reload, and
needs nothing of the model that samples meanwhile.
"""

import copy
import threading
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.v1.attention.backend import AttentionImplBase

from common.wire.weight_group import lower_priority

# What of a layer they make lies in the layer alone: parameters, buffers and attributes.
KNOWN_METHODS = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
MODULE_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def begin_reload(model: nn.Module) -> None:
    """Make a model ready to take weights in the format of a checkpoint."""
    initialize_layerwise_reload(model)


def end_reload(model: nn.Module, model_config: Any) -> None:
    """Let the layers process what they have loaded."""
    finalize_layerwise_reload(model, model_config)
    head: Any = getattr(model, "lm_head", None)
    is_tied = getattr(model.config, "tie_word_embeddings", False)
    if head is not None and is_tied and hasattr(head, "quant_method"):
        # A tied head keeps its own packed copy on CPU, which a reload leaves stale.
        head.quant_method.process_weights_after_loading(head)


def can_prepare(model: nn.Module, config: VllmConfig, device: torch.device) -> bool:
    """Return whether every layer of a model is known to be as good when it is made beside it.

    Compiled graphs know addresses, adapters wrap layers, quantized layers keep state elsewhere:
    for all these vLLM's reload of the model itself is right.
    """
    is_plain = device.type == "cpu" and config.lora_config is None and config.quant_config is None
    return is_plain and config.model_config.enforce_eager and all(map(_is_known, model.modules()))


def _is_known(layer: nn.Module) -> bool:
    if is_deferred_attention_layer(layer):
        process = getattr(type(getattr(layer, "impl", None)), "process_weights_after_loading", None)
        return process is AttentionImplBase.process_weights_after_loading
    return type(getattr(layer, "quant_method", None)) in KNOWN_METHODS


class Prepared:
    """The layers of a model once more, with the weights of another version.

    Example: prepared = Prepared(model, config); prepared.load(tensors) in any thread, while the
    model samples; prepared.swap() between two steps: the model has the version.
    """

    def __init__(self, model: nn.Module, config: VllmConfig) -> None:
        """Copy the tree of modules, and of the tensors what loading writes to.

        The model itself must never have been reloaded, which would change what vLLM noted of it.
        """
        self._config = config
        copies: dict[nn.Module, nn.Module] = {}
        tensors: dict[Tensor, Tensor] = {}  # a tied parameter stays one
        self._layers: list[tuple[nn.Module, nn.Module, dict[str, Any]]] = []
        for layer in model.modules():
            twin = copies[layer] = object.__new__(type(layer))
            twin.__dict__.update(layer.__dict__)
            for table in MODULE_TABLES:
                twin.__dict__[table] = copy.copy(layer.__dict__[table])
            _copy_tensors(twin, tensors)
            _copy_metadata(layer, twin)
            self._layers.append((layer, twin, dict(twin.__dict__)))
        for twin in copies.values():
            for name, child in twin._modules.items():
                twin._modules[name] = None if child is None else copies[child]
        self._model = copies[model]

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load and pack (transformers name, tensor) of a whole version."""
        with set_current_vllm_config(self._config):
            begin_reload(self._model)
            cast(Any, self._model).load_weights(tensors)
            end_reload(self._model, self._config.model_config)

    def swap(self) -> None:
        """Give the model what was loaded, and let go in a thread of what it had."""
        pairs: dict[Tensor, Tensor] = {}  # a tied parameter is there twice
        for layer, twin, before in self._layers:
            for table in ("_parameters", "_buffers"):
                made = cast(dict[str, Tensor | None], twin.__dict__[table])
                pairs |= {
                    each: layer.__dict__[table][name]
                    for name, each in made.items()
                    if each is not None and each is not layer.__dict__[table][name]
                }
            for name, value in twin.__dict__.items():
                if name not in MODULE_TABLES and before.get(name, before) is not value:
                    twin.__dict__[name] = layer.__dict__.get(name)
                    layer.__dict__[name] = value
        for ours, theirs in pairs.items():
            ours.data, theirs.data = theirs.data, ours.data
        threading.Thread(target=self.release, daemon=True).start()

    def release(self) -> None:
        """Let go of the layers; vLLM's notes of them would keep them for ever."""
        lower_priority()
        while self._layers:
            _, twin, before = self._layers.pop()
            info = get_layerwise_info(twin)
            info.restore_metadata = ({}, {})
            info.reset()
            before.clear()
            twin.__dict__.clear()


def _copy_tensors(twin: nn.Module, copies: dict[Tensor, Tensor]) -> None:
    for name, tensor in [*twin._parameters.items(), *twin._buffers.items()]:
        if tensor is None or name in twin._non_persistent_buffers_set:  # nothing loads the latter
            continue
        if tensor not in copies:
            copied = copies[tensor] = tensor.data.clone()
            copied.__class__ = tensor.__class__
            copied.__dict__ = tensor.__dict__.copy()
        table = twin._parameters if name in twin._parameters else twin._buffers
        cast(dict[str, Any], table)[name] = copies[tensor]


def _copy_metadata(layer: nn.Module, twin: nn.Module) -> None:
    """Note of the twin what vLLM noted of the layer before it loaded anything."""
    noted, own = get_layerwise_info(layer), get_layerwise_info(twin)
    parameters, buffers = noted.restore_metadata
    own.restore_metadata = (
        {name: to_meta_tensor(tensor) for name, tensor in parameters.items()},
        {name: to_meta_tensor(tensor) for name, tensor in buffers.items()},
    )
    own.restore_device = noted.restore_device
