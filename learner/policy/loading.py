"""Loads networks in shards: made without memory, sharded, then filled by each rank."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from common.errors import ConfigError
from learner.policy.composite import composite_class, decoder_of, reduce_to_text, source_of
from learner.policy.determinism import make_deterministic, zero_dropout_rates
from learner.policy.expert_weights import WeightRead, convert_read, plan_reads, stored_tensors
from learner.policy.lora import ADAPTED
from learner.policy.model_kind import DIFFERENCES
from learner.policy.quantised_base import quantised_layers
from learner.policy.weight_files import LOCAL, WeightFiles

_LONG = "longrope"
_DYNAMIC = "dynamic"
_FIXED = "fixed"


def fix_rotary(model: PreTrainedModel, path: str, *, max_tokens: int | None) -> None:
    """Fix the frequencies of all rotary embeddings of a network, in place.

    Args:
        max_tokens: length of the longest sequence that an engine may produce
            (`actor.max_model_len`). None: the model's own limit, as in vLLM.

    Raises: ConfigError: the frequencies cannot match the engine's.
    """
    for module in model.modules():
        for layer_type, kind in _kinds(module):
            config: Any = getattr(module, "config", model.config)
            most = max_tokens or int(config.max_position_embeddings)
            if kind == _LONG:
                _fix_long(module, config, layer_type, most=most, path=path)
            elif _DYNAMIC in kind:
                _check_dynamic(config, most=most, path=path)
            else:
                continue
            _mark_fixed(module, layer_type)


def _kinds(module: nn.Module) -> Iterator[tuple[str | None, str]]:
    """Yield (layer type, rope type) of a rotary embedding; layer type None means all layers."""
    kind: Any = getattr(module, "rope_type", None)
    if isinstance(kind, str):
        yield None, kind
    elif isinstance(kind, dict):
        yield from list(kind.items())


def _fix_long(
    module: nn.Module, config: Any, layer_type: str | None, *, most: int, path: str
) -> None:
    """Set the long factors if the engine may exceed the original context, else the short ones."""
    rope = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    original = int(rope["original_max_position_embeddings"])
    if "long_mscale" in rope and hasattr(module, "rope_init_fn"):
        raise ConfigError(
            f"model.path={path!r}: {type(module).__name__} scales its rotary embedding by the"
            " longest sequence of a forward pass. This is not supported. Choose another model."
        )
    options = {} if layer_type is None else {"layer_type": layer_type}
    seq_len = original + 1 if most > original else original
    made, _ = ROPE_INIT_FUNCTIONS[_LONG](config, torch.device("cpu"), seq_len=seq_len, **options)
    prefix = "" if layer_type is None else f"{layer_type}_"
    for name in ("inv_freq", "original_inv_freq"):
        buffer = getattr(module, prefix + name)
        setattr(module, prefix + name, made.to(buffer.device, buffer.dtype))


def _check_dynamic(config: Any, *, most: int, path: str) -> None:
    """Check that sequences are too short to change frequencies. Raises: ConfigError."""
    limit = int(config.max_position_embeddings)
    if most > limit:
        raise ConfigError(
            f"model.path={path!r}: rope_type=dynamic changes its frequencies beyond {limit} tokens,"
            f" and actor.max_model_len={most}. Set actor.max_model_len={limit} or lower, or choose"
            " rope_type=yarn."
        )


def _mark_fixed(module: Any, layer_type: str | None) -> None:
    """Set the rope type of a module to one that transformers never recomputes."""
    if layer_type is None:
        module.rope_type = _FIXED
    else:
        module.rope_type = {**module.rope_type, layer_type: _FIXED}


def _register_alias(alias: str, family: str) -> None:
    """Let transformers read a published model_type as that of a family which it has."""
    plain = CONFIG_MAPPING[family]

    class AliasConfig(plain):
        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
            # The names of weights in the files depend on model_type, too.
            return plain.from_dict({**config_dict, "model_type": family}, **options)

    CONFIG_MAPPING.register(alias, AliasConfig, exist_ok=True)


for _alias, _family in DIFFERENCES["aliases"].items():
    _register_alias(_alias, _family)

META = torch.device("meta")
ROWS_AT_A_TIME = 8_192


def is_unloaded(network: nn.Module) -> bool:
    """Return whether some weights have a shape but no memory yet."""
    return any(parameter.is_meta for parameter in network.parameters())


def load_network(
    auto_class: Any,
    path: str,
    *,
    is_skeleton: bool,
    dtype: torch.dtype,
    max_tokens: int | None = None,
) -> PreTrainedModel:
    """Return the network at `path`, whole or without memory for its weights.

    It computes attention by its own formula, "eager", which every family has; `use_attention`
    chooses another. Its passes draw no random numbers. The states of a sequence do not depend on
    the lengths of its neighbours. A checkpoint for images or sound gives its language model alone,
    see `policy/composite.py`.

    Args:
        auto_class: AutoModelForCausalLM or another auto class of transformers.
        is_skeleton: only constant buffers, which are not in the files, have memory.
        max_tokens: length of the longest sequence that an engine may produce; None: the model's own
            limit.

    Raises: ConfigError: its rotary embedding cannot match the engine's, a weight is missing, tied
        weights have different numbers in the files, or a composite has no such part.
    """
    # cuDNN's attention keeps a plan for each new length, so memory would grow without end.
    torch.backends.cuda.enable_cudnn_sdp(False)
    with _refusing(path):
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        zero_dropout_rates(config)
        composite = composite_class(config, path)
        if composite is not None:
            model = _language_model(
                composite, config, dtype, path, is_trunk=auto_class is AutoModel
            )
            if not is_skeleton:
                give_memory(model, torch.device("cpu"))
                model.tie_weights()
                fill(model, path)
        elif is_skeleton:
            model = _skeleton(auto_class, config, dtype)
        else:
            model, report = auto_class.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation="eager",
                local_files_only=True,
                output_loading_info=True,
            )
            _check_complete(report["missing_keys"], path)
            _check_tied(model, path)
    fix_rotary(model, path, max_tokens=max_tokens)
    make_deterministic(model)
    return model


def attention_addition(model: PreTrainedModel) -> str:
    """Return an addition to attention that the configuration or the weights show; "" if none."""
    softcap = getattr(model.config, "attn_logit_softcapping", None)
    if softcap:
        return f"attn_logit_softcapping={softcap}"
    if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        return "attention with sinks"
    kinds = {type(module) for module in model.modules()}
    return "a bias by position" if any(map(_has_position_bias, kinds)) else ""


def _has_position_bias(kind: type[nn.Module]) -> bool:
    """Return whether a class of layers gives a bias by position to its attention."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    if code is None or "ALL_ATTENTION_FUNCTIONS" not in code.co_names:
        return False
    return "position_bias" in code.co_varnames


def set_plain_attention(model: PreTrainedModel, *, is_fused: bool) -> None:
    """Set the attention of transformers for padded sequences, "sdpa" or "eager".

    Torch's fused attention ("sdpa") serves only families that support it and whose formula has no
    addition: transformers ignores a cap or sinks there.
    """
    can_fuse = model._supports_sdpa and not attention_addition(model)
    model.config._attn_implementation = "sdpa" if is_fused and can_fuse else "eager"


@contextmanager
def _refusing(path: str) -> Iterator[None]:
    """Refuse a checkpoint for which transformers raises an error. Raises: ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except (KeyError, ValueError, OSError) as error:  # A key of config.json, or a missing file.
        raise ConfigError(
            f"{path}: transformers cannot load this checkpoint ({type(error).__name__}: {error})."
            " Correct its config.json, copy all of its files, or choose another model"
        ) from error


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


def _check_tied(model: PreTrainedModel, path: str) -> None:
    """Check that weights which the configuration ties are tied after loading.

    Transformers leaves them apart if the files have both with different numbers, but engines tie
    them.

    Raises: ConfigError: names both weights.
    """
    for name, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter(name) is not model.get_parameter(source):
            raise _not_tied(name, source, path)


def _check_equal(names: Sequence[str], files: Mapping[str, Any], path: str) -> None:
    """Check that the names of one weight have the same numbers in the files. Raises: ConfigError.

    A part of the rows is in memory at a time.
    """
    stored = [name for name in names if name in files]
    for name in stored[1:]:
        first = files[stored[0]].get_slice(stored[0])
        other = files[name].get_slice(name)
        num_rows = first.get_shape()[0] if first.get_shape() else 0
        for start in range(0, num_rows, ROWS_AT_A_TIME):
            rows = slice(start, start + ROWS_AT_A_TIME)
            if not torch.equal(first[rows], other[rows]):
                raise _not_tied(name, stored[0], path)


def _not_tied(name: str, source: str, path: str) -> ConfigError:
    """Return the error for tied weights with different numbers in the files."""
    return ConfigError(
        f"{path}: config.json ties {name} to {source} (tie_word_embeddings=true), but the"
        " files have other numbers for each. Set tie_word_embeddings=false in config.json, or"
        f" remove {name} from the files"
    )


def _skeleton(auto_class: Any, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """Return a network whose weights have no memory; its constant buffers have values."""
    with META:
        model = auto_class.from_config(config, dtype=dtype, attn_implementation="eager")
    _compute_constants(model)
    return model


def _language_model(
    composite: Any, config: Any, dtype: torch.dtype, path: str, *, is_trunk: bool
) -> PreTrainedModel:
    """Return the language model of a composite without memory for its weights.

    Raises: ConfigError: it has none, or a trunk without a head is requested.
    """
    if is_trunk:
        raise ConfigError(
            f"learner.critic.kind=model: {path} is a checkpoint for more than text, whose language"
            " model is loaded with its head only. Use learner.critic.kind=head, or give the folder"
            " of a model for text as learner.critic.path"
        )
    with META:
        model = composite._from_config(config, dtype=dtype, attn_implementation="eager")
    reduce_to_text(model, path)
    _compute_constants(decoder_of(model))
    return model


@torch.no_grad()
def _compute_constants(model: PreTrainedModel) -> None:
    """Give values to buffers that are not in the files, such as those of rotary embeddings.

    They are computed by the model's own `_init_weights`, as in `from_pretrained`.
    """
    bare = [
        (owner, name)
        for owner in model.modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if buffer.is_meta and name in owner._non_persistent_buffers_set
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
    """Allocate memory for weights without it, on each rank for its shard, without values.

    Tied weights remain tied: torch makes a new parameter for each name.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    network._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
    for first, *others in names.values():
        for name in others:
            owner, _, last = name.rpartition(".")
            if network.get_parameter(name) is not network.get_parameter(first):
                setattr(network.get_submodule(owner), last, network.get_parameter(first))


def take_memory(network: nn.Module) -> None:
    """Remove the memory of weights that are not trained; `give_memory` restores it."""
    # Parameters without memory by original; layers may share one.
    taken: dict[int, nn.Parameter] = {}
    for owner in network.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if not parameter.requires_grad:
                bare = nn.Parameter(torch.empty_like(parameter, device=META), requires_grad=False)
                setattr(owner, name, taken.setdefault(id(parameter), bare))


def fill(network: PreTrainedModel, path: str, files: WeightFiles = LOCAL) -> None:
    """Read a network's weights, sharded or not, from the safetensors files at `path`.

    Each rank reads only its own rows, so no process ever holds the whole weights. A tensor that
    must be converted may be read whole. Adapters do not change.

    Raises: ConfigError: a weight is missing in the files, has another shape, or is tied to one with
        other numbers.
    """
    with ExitStack() as opened:
        readers: dict[str, Any] = {}
        for file in files.weights_in(Path(path)):
            reader = opened.enter_context(files.open_weights(file))
            readers |= dict.fromkeys(reader.keys(), reader)
        for names, _ in _tensors(network):
            _check_equal(names, readers, path)
        weights = {name: each for names, each in _tensors(network) for name in names}
        filled: set[str] = set()
        for read in plan_reads(network, readers, weights):
            for name, part in _parts(network, read, readers, weights, path):
                local = _local(weights[name])
                if local.numel():
                    local.copy_(part)
                filled.add(name)
    for names, _ in _tensors(network):
        if filled.isdisjoint(names):
            raise ConfigError(f"{path}: no *.safetensors file has the weights of {names[0]}")
    if source_of(network) is not None:
        _check_names(network, weights, readers, path)


def _check_names(
    network: PreTrainedModel, weights: Mapping[str, Tensor], files: Mapping[str, Any], path: str
) -> None:
    """Check that the weights of a composite can be written under the names that they came from.

    Raises: ConfigError: transformers would write another name.
    """
    tied = network.get_expanded_tied_weights_keys(all_submodels=True)
    once = {name: each for name, each in weights.items() if name not in tied}
    strangers = sorted(stored_tensors(network, once).keys() - files.keys())
    if strangers:
        raise ConfigError(
            f"{path}: transformers would write {strangers[0]}, a name that these files lack"
            f" (names: {len(strangers)}), so a checkpoint would not be complete. Choose another"
            " model"
        )


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
        entry = files[name].get_slice(name)
        _check_shape(name, entry.get_shape(), tensor, path)
        yield read.weight, _rows(entry, tensor) if tensor.ndim else files[name].get_tensor(name)
        return
    is_by_row = read.is_by_row and weights[read.weight].ndim
    rows = _range_of(weights[read.weight]) if is_by_row else slice(None)
    if is_by_row and not _local(weights[read.weight]).numel():
        yield read.weight, torch.empty(0)
        return
    made = convert_read(network, read, lambda name: files[name].get_tensor(name), rows)
    for name, part in made.items():
        tensor = weights[name]
        if is_by_row:
            expected = _local(tensor)
            _check_shape(name, part.shape, expected, path)
            yield name, part
        else:
            _check_shape(name, part.shape, tensor, path)
            yield name, _rows(part, tensor) if tensor.ndim else part


def _check_shape(name: str, shape: Sequence[int], tensor: Tensor, path: str) -> None:
    """Raise ConfigError if a tensor in the files has another shape than the configuration."""
    if list(shape) != list(tensor.shape):
        raise ConfigError(
            f"{path}: {name} has shape {list(shape)}, but config.json requires {list(tensor.shape)}"
        )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _rows(entry: Any, tensor: Tensor) -> Tensor:
    """Return this rank's rows of a tensor on disk: FSDP shards along the first axis."""
    return entry[_range_of(tensor)]


def _range_of(tensor: Tensor) -> slice:
    """Return this rank's rows of a weight; all rows of a weight that is not sharded."""
    if not isinstance(tensor, DTensor):
        return slice(None)
    mesh = tensor.device_mesh  # Weights are sharded over its last dimension.
    size = mesh.size(-1)
    rank = mesh.get_local_rank(mesh.ndim - 1)
    num_rows = -(-tensor.shape[0] // size)  # As in torch.chunk.
    return slice(rank * num_rows, min((rank + 1) * num_rows, tensor.shape[0]))


def _tensors(network: PreTrainedModel) -> Iterator[tuple[list[str], Any]]:
    """Yield each weight once with its names; tied weights have several, quantised ones are last."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for key, tensor in network.state_dict(keep_vars=True).items():
        if ".lora_" in key:
            continue
        names.setdefault(id(tensor), []).append(ADAPTED.sub(".", key))
        tensors[id(tensor)] = tensor
    for key, tensor in tensors.items():
        yield names[key], tensor.detach()
    for name, layer in quantised_layers(network):
        yield [ADAPTED.sub(".", f"{name}.weight")], layer.weight
