"""Our backend of vLLM's weight transfer: loads the staged version layer by layer.

On a CPU a version is prepared during generation, and its load only swaps pointers. A CPU engine
packs its matrices for its kernels. Packing is most of the cost of a reload, and it does not need
the model that samples.
"""

import copy
import logging
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _layerwise_process,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer, to_meta_tensor
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImplBase

from actor.weights.stage import Staging
from common.weights.messages import WeightsOffer
from common.weights.transport import lower_priority
from common.wire.codec import decode

BACKEND = "longstride"
RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"
CAST_LOGGER = "vllm.model_executor.models.utils"
CAST_NOTICE = "Attempted to load weight"
# Layers with these methods keep all their state in parameters, buffers and attributes.
KNOWN_METHODS = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
DIRECT_WRITERS = ("GptOssForCausalLM",)
UNPACKED = "_cpu_unpacked_conv_weight"  # Attribute of vLLM's packed convolutions.
MODULE_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class RepeatFilter(logging.Filter):
    """Passes the first record with a beginning, and counts all of them.

    Example: 311 weights of a checkpoint in fp32 are loaded into an engine in bf16. vLLM warns about
    each. One warning is logged, and `num_seen` is 311.
    """

    def __init__(self, beginning: str) -> None:
        super().__init__()
        self._beginning = beginning
        self.num_seen = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Count a matching record; return False for all but the first."""
        if not str(record.msg).startswith(self._beginning):
            return True
        self.num_seen += 1
        record.msg = f"{record.msg}; the warnings about further weights are left out"
        return self.num_seen == 1


def count_cast_weights() -> RepeatFilter:
    """Log one warning about the dtype of weights; return the filter that counts them."""
    notice = RepeatFilter(CAST_NOTICE)
    logging.getLogger(CAST_LOGGER).addFilter(notice)
    return notice


def begin_reload(model: nn.Module) -> None:
    """Make a model ready to take weights in the format of a checkpoint."""
    _drop_cpu_kernels(model)
    _name_loaders(model)
    initialize_layerwise_reload(model)
    _write_in_place(model)
    for layer in _written_directly(model):
        materialize_layer(layer, get_layerwise_info(layer))


def _name_loaders(model: nn.Module) -> None:
    """Give each partial function that loads a weight a name, which vLLM (0.32) reads.

    The norms of MiniMax-M2 have such loaders.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        loader = getattr(tensor, "weight_loader", None)
        if isinstance(loader, partial):
            loader.__name__ = "weight_loader"  # pyright: ignore[reportAttributeAccessIssue]


def _write_in_place(model: nn.Module) -> None:
    """Let layers without a processing step keep their tensors during the reload.

    vLLM (0.32) gives each layer tensors without memory, and fills them by its weight loaders. Some
    models write a weight without a loader, such as the sinks of attention. Such a weight would
    silently stay old.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        has_step = isinstance(getattr(layer, "quant_method", None), QuantizeMethodBase)
        if info.can_load() and not has_step and not is_deferred_attention_layer(layer):
            _place_kernel_tensors(layer, info)
            info.reset()
            for tensor in (*layer._parameters.values(), *layer._buffers.values()):
                if hasattr(tensor, "weight_loader"):
                    # vLLM wraps the loaders of biases in place; after a reset a wrapper drops all.
                    tensor.weight_loader = _get_original_loader(tensor)  # pyright: ignore


def _written_directly(model: nn.Module) -> list[nn.Module]:
    """Return the experts of models that write them without vLLM's weight loaders (0.32).

    A reload would leave such weights without memory, and keep the old ones.
    """
    if type(model).__name__ not in DIRECT_WRITERS:
        return []
    return [layer for layer in model.modules() if isinstance(layer, RoutedExperts)]


def _drop_cpu_kernels(model: nn.Module) -> None:
    """Drop the kernels of experts on a CPU, so that the reload makes new ones.

    vLLM (0.32) packs the experts for a new kernel only. With an old kernel it would read new,
    unpacked weights as packed ones.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and current_platform.is_cpu():
            method.moe_kernel = None


def end_reload(model: nn.Module, model_config: Any) -> None:
    """Let the layers process the loaded weights."""
    for layer in _written_directly(model):
        info = get_layerwise_info(layer)
        if info.can_load():
            _layerwise_process(layer, info)
    finalize_layerwise_reload(model, model_config)
    for computes, inner in _convolutions(model):
        computes.copy_(getattr(inner, UNPACKED))
    for head in _tied_heads(model):
        # A tied head keeps its own packed copy on CPU, which a reload leaves stale.
        head.quant_method.process_weights_after_loading(head)


def _tied_heads(model: nn.Module) -> Iterator[Any]:
    """Yield the tied head of a model, or of the language model in it."""
    for owner in model.modules():
        head: Any = owner._modules.get("lm_head")
        is_tied = getattr(getattr(owner, "config", None), "tie_word_embeddings", False)
        if head is not None and is_tied and hasattr(head, "quant_method"):
            yield head


def can_prepare(model: nn.Module, config: VllmConfig, device: torch.device) -> bool:
    """Return whether a copy of every layer of the model can be prepared safely.

    Compiled graphs hold addresses, adapters wrap layers, and quantized layers keep state elsewhere.
    A view of a weight, such as that of Mamba's convolution, would keep the old numbers. Such models
    are reloaded in place by vLLM.
    """
    is_plain = device.type == "cpu" and config.lora_config is None and config.quant_config is None
    is_eager = is_plain and config.model_config.enforce_eager
    return is_eager and all(map(_is_known, model.modules())) and not _has_views(model)


def _has_views(model: nn.Module) -> bool:
    """Return whether a buffer is a view of a weight, or was one before vLLM packed the weight."""
    weights = {_storage_address(tensor) for tensor in model.parameters() if tensor.numel()}
    return any(
        _storage_address(tensor) in weights for tensor in model.buffers() if tensor.numel()
    ) or any(True for _ in _convolutions(model))


def _storage_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _convolutions(model: nn.Module) -> Iterator[tuple[Tensor, nn.Module]]:
    """Yield Mamba's convolutions that vLLM (0.32) packs in bf16, with the weight that computes.

    This weight was a view before the packing, so that a reload would leave it old.
    """
    for layer in model.modules():
        computes = layer._buffers.get("conv_weights")
        inner = layer._modules.get("conv1d")
        if computes is not None and inner is not None and hasattr(inner, UNPACKED):
            yield computes, inner


def _is_known(layer: nn.Module) -> bool:
    """Return whether a copy of this layer can be loaded as the layer itself."""
    if is_deferred_attention_layer(layer):
        process = getattr(type(getattr(layer, "impl", None)), "process_weights_after_loading", None)
        return process is AttentionImplBase.process_weights_after_loading
    return type(getattr(layer, "quant_method", None)) in KNOWN_METHODS


class Prepared:
    """A second set of the model's layers, with the weights of another version.

    Example: prepared = Prepared(model, config); prepared.load(tensors) in any thread, while the
    model samples; prepared.swap() between two steps gives the model the version.
    """

    def __init__(self, model: nn.Module, config: VllmConfig) -> None:
        """Copy the tree of modules, and the tensors that loading writes to.

        The model must never have been reloaded, because a reload changes vLLM's record of it.
        """
        self._config = config
        copies: dict[nn.Module, nn.Module] = {}
        tensors: dict[Tensor, Tensor] = {}  # A tied parameter is copied once.
        self._layers: list[tuple[nn.Module, nn.Module, dict[str, Any]]] = []
        for layer in model.modules():
            layer_copy = copies[layer] = object.__new__(type(layer))
            layer_copy.__dict__.update(layer.__dict__)
            for table in MODULE_TABLES:
                layer_copy.__dict__[table] = copy.copy(layer.__dict__[table])
            _copy_tensors(layer_copy, tensors)
            _copy_metadata(layer, layer_copy)
            self._layers.append((layer, layer_copy, dict(layer_copy.__dict__)))
        for layer_copy in copies.values():
            for name, child in layer_copy._modules.items():
                layer_copy._modules[name] = None if child is None else copies[child]
        self._model = copies[model]

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load and pack all tensors of a version, given as (transformers name, tensor)."""
        with set_current_vllm_config(self._config):
            begin_reload(self._model)
            cast(Any, self._model).load_weights(tensors)
            end_reload(self._model, self._config.model_config)

    def swap(self) -> None:
        """Move the loaded weights into the model, and release the old ones in a thread."""
        pairs: dict[Tensor, Tensor] = {}  # A tied parameter appears twice.
        for layer, layer_copy, before in self._layers:
            for table in ("_parameters", "_buffers"):
                made = cast(dict[str, Tensor | None], layer_copy.__dict__[table])
                pairs |= {
                    tensor: layer.__dict__[table][name]
                    for name, tensor in made.items()
                    if tensor is not None and tensor is not layer.__dict__[table][name]
                }
            for name, value in layer_copy.__dict__.items():
                if name not in MODULE_TABLES and before.get(name, before) is not value:
                    layer_copy.__dict__[name] = layer.__dict__.get(name)
                    layer.__dict__[name] = value
        for ours, theirs in pairs.items():
            ours.data, theirs.data = theirs.data, ours.data
        threading.Thread(target=self.release, daemon=True).start()

    def release(self) -> None:
        """Release the layers, which vLLM's record of them would otherwise keep alive."""
        lower_priority()
        while self._layers:
            _, layer_copy, before = self._layers.pop()
            info = get_layerwise_info(layer_copy)
            info.restore_metadata = ({}, {})
            info.reset()
            before.clear()
            layer_copy.__dict__.clear()


def _copy_tensors(layer_copy: nn.Module, copies: dict[Tensor, Tensor]) -> None:
    """Give a copied layer its own tensors. Layers that share a tensor share the copy."""
    for name, tensor in [*layer_copy._parameters.items(), *layer_copy._buffers.items()]:
        # Non-persistent buffers are never loaded.
        if tensor is None or name in layer_copy._non_persistent_buffers_set:
            continue
        if tensor not in copies:
            copied = copies[tensor] = tensor.data.clone()
            copied.__class__ = tensor.__class__
            copied.__dict__ = tensor.__dict__.copy()
        table = layer_copy._parameters if name in layer_copy._parameters else layer_copy._buffers
        cast(dict[str, Any], table)[name] = copies[tensor]


def _copy_metadata(layer: nn.Module, layer_copy: nn.Module) -> None:
    """Copy vLLM's record of a layer before its first load to its copy."""
    record = get_layerwise_info(layer)
    copied = get_layerwise_info(layer_copy)
    parameters, buffers = record.restore_metadata
    copied.restore_metadata = (
        {name: to_meta_tensor(tensor) for name, tensor in parameters.items()},
        {name: to_meta_tensor(tensor) for name, tensor in buffers.items()},
    )
    copied.restore_device = record.restore_device


@dataclass
class OfferInfo(WeightTransferInitInfo):
    """The version to stage."""

    offer: list[bytes]  # An encoded WeightsOffer. Its rank is that of the engine's first worker.


@dataclass
class LoadInfo(WeightTransferUpdateInfo):
    """The version to load; it must be the staged one."""

    version: int


class StagedTransferEngine(WeightTransferEngine[OfferInfo, LoadInfo]):
    """Stages a version while the engine generates, and loads it while the engine is paused.

    `init_transfer_engine` joins the receivers of a version and returns at once. If the model
    supports it, the version is prepared during generation, and the load only swaps pointers.
    """

    init_info_cls: ClassVar[type[OfferInfo]] = OfferInfo  # pyright: ignore
    update_info_cls: ClassVar[type[LoadInfo]] = LoadInfo  # pyright: ignore

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # vLLM warns at every reload about layers without weights in the checkpoint (rotary tables).
        logging.getLogger(RELOAD_LOGGER).setLevel(logging.ERROR)
        # It also warns about vectors, which versions have in fp32 for every engine.
        logging.getLogger(CAST_LOGGER).setLevel(logging.ERROR)
        self._prepares = can_prepare(self.model, self.vllm_config, self.device)
        self._prepared: Prepared | None = None
        self._is_half = False  # An update began and did not end.
        self.staging = Staging(self.device, self._prepare if self._prepares else None)

    def init_transfer_engine(self, init_info: OfferInfo) -> None:
        """Begin to receive an offered version, of which several workers may share one copy."""
        offer: WeightsOffer = decode(init_info.offer)
        self.staging.begin(offer.of_worker(get_tp_group().rank_in_group))

    def _prepare(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Prepare a staged version, in the staging thread."""
        if self._prepared is not None:
            self._prepared.release()  # The previous version was never loaded.
        self._prepared = Prepared(self.model, self.vllm_config)
        self._prepared.load(tensors)

    def start_weight_update(self) -> None:
        """Make the model ready to take weights in the format of a checkpoint."""
        if self._prepares:
            return
        if self._is_half:  # Some layers may hold new weights. All layers are loaded again.
            end_reload(self.model, self.model_config)
        self._is_half = True
        begin_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the staged version. vLLM's own method needs an accelerator and fails on a CPU."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: LoadInfo) -> None:
        """Load the staged version. Raises: WeightSyncError: another one is staged."""
        if self._prepares:
            self.staging.check(update_info.version)
        else:
            cast(Any, self.model).load_weights(self.staging.tensors(update_info.version))

    def finish_weight_update(self) -> None:
        """Let the layers process the loaded weights, or swap in the prepared version."""
        if self._prepares:
            assert self._prepared is not None, "a version is staged"
            self._prepared.swap()
            self._prepared = None
        else:
            end_reload(self.model, self.model_config)
            self._is_half = False
        self.staging.memory.release()

    def shutdown(self) -> None:
        """Leave the weight group."""
        self.staging.leave()


def register() -> None:
    """Register the backend with vLLM; once per process."""
    WeightTransferEngineFactory.register_engine(BACKEND, StagedTransferEngine)
