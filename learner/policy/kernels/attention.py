"""Attention over packed sequences: several in one row, isolated from each other.

There are two kernels. *fused*: on CUDA flash attention over sequences of different lengths (in
bf16); elsewhere torch's scaled dot products, one sequence at a time, or products if sequences share
rows. *products*: plain matrix products, which keep the probabilities of every pair. On a CPU in
bf16 they are faster for short sequences. Both compute in the dtype of autocast, since rotary
embeddings return fp32 under it.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, PreTrainedModel

from common.config.learner import Attention, Layout
from common.errors import ConfigError
from learner.batch.batching import TokenBatch
from learner.batch.packing import CHUNK_TOKENS, Packing, first_key, pack, window_mask
from learner.policy.kernels import flash, mixers
from learner.policy.kernels.products import CausalProducts
from learner.policy.kernels.sequence import (
    heads_of_row,
    heads_problem,
    repeated_heads,
    rows_of_heads,
)
from learner.policy.loading import attention_addition, is_unloaded, set_plain_attention
from learner.policy.model import Scoring, flat_hidden, token_logprobs, vocabulary_size
from learner.policy.selfcheck import PackingRefused, make_probe, own_attention, packing_difference

logger = logging.getLogger(__name__)

FUSED = "packed_fused"
PRODUCTS = "packed_products"
_FULL = "full_attention"
_SLIDING = "sliding_attention"
_CHUNKED = "chunked_attention"
# Kinds of layers whose attention the kernels compute, or which have none.
SERVED = {_FULL, _SLIDING, _CHUNKED, "linear_attention", "conv", "hybrid", "mlp", "moe"}
# Additions of other families to attention; both kernels would have to implement each of them.
UNSUPPORTED = ("position_bias", "indices", "block_indices")
# cuDNN is absent: it keeps a plan for each new length, so memory would grow without end.
SDPA_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

_warned: set[str] = set()  # Reasons for a fallback that the log already has.


class Separation(Enum):
    """The part of a network that keeps the sequences of a row apart."""

    KERNELS = auto()  # The kernels of attention; other layers compute one sequence after another.
    LAYERS = auto()  # All layers that mix tokens compute one sequence after another.


@dataclass(frozen=True, slots=True)
class _Packable:
    """The way in which the sequences of a network are packed."""

    separation: Separation
    problem: str = ""  # Reason why they cannot be packed at all.


_measured: WeakKeyDictionary[nn.Module, _Packable] = WeakKeyDictionary()


def packing_problem(network: nn.Module) -> str:
    """Return the reason why a network's sequences cannot be packed; "" if they can.

    A small block is scored packed and padded, once per network. The start check measures weights
    without memory instead.
    """
    return next((each.problem for each in map(_packable, _outermost(network)) if each.problem), "")


def _packable(model: PreTrainedModel) -> _Packable:
    """Return the way in which a transformer's sequences are packed."""
    if problem := mixers.state_problem(model):
        return _Packable(Separation.LAYERS, problem)
    problem = _kernel_problem(model)
    ways = [Separation.LAYERS] if problem else [*Separation]
    if is_unloaded(model):
        return _Packable(ways[0])
    if model not in _measured:
        for way in ways:
            _measured[model] = _Packable(way, _measured_problem(model, way))
            if not _measured[model].problem:
                break
        else:
            logger.warning(
                "learner.layout: sequences are padded, not packed: %s", _measured[model].problem
            )
    return _measured[model]


def _kernel_problem(model: PreTrainedModel) -> str:
    """Return why the kernels cannot keep a transformer's sequences apart; "" if they can."""
    for each in _transformers(model):
        kinds = set(getattr(each.config, "layer_types", None) or [_kind_of_all(each.config)])
        if kinds - SERVED:
            names = ", ".join(sorted(kinds - SERVED))
            return f"{each.config.model_type} has layers of another kind: {names}"
    return mixers.kernel_problem(model)


def _outermost(network: nn.Module) -> Iterator[PreTrainedModel]:
    """Yield the transformers of a network that are not part of another transformer."""
    inner: set[nn.Module] = set()
    for model in _transformers(network):
        if model not in inner:
            yield model
        inner.update(model.modules())


def _measured_problem(model: PreTrainedModel, way: Separation) -> str:
    """Return the scores that differ between packed and padded sequences; "" if all agree."""
    narrow = (each.dtype for each in model.parameters() if each.dtype != torch.float32)
    dtype = next(narrow, torch.float32)
    vocab_size = vocabulary_size(model)
    probe = make_probe(model, model.device, vocab_size=vocab_size, is_packed=True, dtype=dtype)
    scoring = Scoring(chunk_tokens=sum(map(len, probe.sequences)), dtype=dtype)

    def padded(tokens: TokenBatch) -> Tensor:
        with own_attention(model):
            return _scores(model, tokens, scoring)

    def packed(tokens: TokenBatch) -> Tensor:
        """Return the scores of packed sequences."""
        with own_attention(model):
            _set_packed(model, way, attention_by_rule(model.device.type))
            return _scores(model, tokens, scoring)

    try:
        difference = packing_difference(probe, packed, padded)
    except torch.OutOfMemoryError:
        raise
    except (ConfigError, AttributeError, TypeError, RuntimeError) as error:
        # The kernel lacks these shapes, or the network computes with its masks.
        problem = f"{probe.name} cannot compute packed sequences: {error}"
    else:
        problem = (
            f"packed sequences of {probe.name} attend to each other: a token scores {difference}"
            " (packed, and alone)"
        )
        problem = problem if difference else ""
    return problem


def _scores(model: PreTrainedModel, tokens: TokenBatch, scoring: Scoring) -> Tensor:
    """Return log-probabilities, or the states that predict tokens if there is no head."""
    if model.get_output_embeddings() is None:
        states = flat_hidden(model, tokens, dtype=scoring.dtype)[tokens.source_rows]
        scored = tokens.per_token(states)
        assert scored is not None
        return scored
    return token_logprobs(model, tokens, scoring)


def _set_packed(network: nn.Module, way: Separation, attention: Attention) -> None:
    """Set the attention of packed sequences for all transformers in a network."""
    for model in _transformers(network):
        if way is Separation.KERNELS:
            name = FUSED if attention is Attention.FUSED else PRODUCTS
        else:
            set_plain_attention(model, is_fused=attention is Attention.FUSED)
            name = mixers.packed_form(model.config._attn_implementation or "eager")
        model.config._attn_implementation = name
    mixers.separate_sequences(network, is_whole=way is Separation.LAYERS)


def _kind_of_all(config: Any) -> str:
    """Return the kind of all layers if a config has no list of kinds, as in Mistral or Phi-3."""
    is_sliding = getattr(config, "use_sliding_window", True)
    return _SLIDING if is_sliding and getattr(config, "sliding_window", None) else _FULL


def attention_by_rule(device_type: str) -> Attention:
    """Return the default kernel without a timing, the same on every start."""
    return Attention.FUSED if device_type == "cuda" else Attention.PRODUCTS


def layout_by_rule(networks: Sequence[nn.Module], device_type: str) -> Layout:
    """Return the default layout without a timing, the same on every start.

    A GPU computes a padded block at once. Layers that compute a row's sequences one by one leave it
    idle, so rows are packed there only if kernels separate the sequences.
    """
    if problem := _first_problem(networks):
        logger.info("learner.layout=auto: sequences are padded: %s", problem)
        return Layout.PADDED
    models = [model for network in networks for model in _outermost(network)]
    looping = next((name for name in map(_looping_layer, models) if name), "")
    if device_type == "cuda" and looping:
        logger.info(
            "learner.layout=auto: sequences are padded: %s has no kernel for packed rows here and"
            " would compute one sequence after another",
            looping,
        )
        return Layout.PADDED
    return Layout.PACKED


def _looping_layer(model: PreTrainedModel) -> str:
    """Return the class of a layer that computes a row's sequences one by one; "": none does."""
    is_whole = _packable(model).separation is Separation.LAYERS
    return mixers.looping_layer(model, is_whole=is_whole)


def check_attention(networks: Sequence[nn.Module], layout: Layout, attention: Attention) -> None:
    """Check that these networks support a layout and kernels that the configuration sets.

    Raises: ConfigError: they do not; names the key and the remedy.
    """
    problem = "" if layout is Layout.PADDED else _first_problem(networks)
    if problem and layout is Layout.PACKED:
        raise ConfigError(f"learner.layout=packed: {problem}. Use learner.layout=padded.")
    if attention is not Attention.FUSED or not (problem or layout is Layout.PADDED):
        return
    for model in (each for network in networks for each in _transformers(network)):
        if not model._supports_sdpa:
            raise ConfigError(
                f"learner.attention=fused: {type(model).__name__} has its own attention"
                " implementation. Use learner.attention=auto."
            )


def check_sequence_ranks(networks: Sequence[nn.Module], num_ranks: int) -> None:
    """Check that the ranks of a sequence group can divide the rows of these networks.

    Raises: ConfigError: a network mixes tokens outside attention, or has too few heads.
    """
    if problem := _first_problem(networks):
        raise ConfigError(
            f"learner.sequence_ranks={num_ranks} divides packed rows: {problem}."
            " Use learner.sequence_ranks=1."
        )
    for model in (each for network in networks for each in _transformers(network)):
        heads = getattr(model.config, "num_attention_heads", None)
        if isinstance(heads, int) and heads % num_ranks:
            raise ConfigError(heads_problem(heads, num_ranks))


def _first_problem(networks: Sequence[nn.Module]) -> str:
    return next((text for text in map(packing_problem, networks) if text), "")


def use_attention(
    networks: Sequence[nn.Module], device_type: str, layout: Layout, attention: Attention
) -> bool:
    """Set the attention of all transformers in the networks; auto follows the rules.

    Padded sequences of a family that torch's fused attention cannot serve use the network's own
    formula.

    Returns: whether sequences are to be packed.

    Raises: ConfigError: as `check_attention`.
    """
    check_attention(networks, layout, attention)
    if layout is Layout.AUTO:
        layout = layout_by_rule(networks, device_type)
    is_packed = layout is Layout.PACKED
    if attention is Attention.AUTO:
        attention = attention_by_rule(device_type)
    for model in (each for network in networks for each in _outermost(network)):
        if is_packed:
            _set_packed(model, _packable(model).separation, attention)
            continue
        for part in _transformers(model):
            set_plain_attention(part, is_fused=attention is Attention.FUSED)
            _warn_eager(part, attention)
    return is_packed


def _warn_eager(model: PreTrainedModel, attention: Attention) -> None:
    """Log once for a family that torch's fused attention cannot serve."""
    name = type(model).__name__
    if attention is Attention.FUSED and model.config._attn_implementation == "eager":
        if name not in _warned:
            reason = attention_addition(model) or "an attention implementation of its own"
            logger.warning(
                "learner.attention=fused: %s has %s, which torch's fused attention lacks. Padded"
                " sequences use the network's own formula, whose memory grows with the square of"
                " their length",
                name,
                reason,
            )
        _warned.add(name)


def _transformers(network: nn.Module) -> Iterator[PreTrainedModel]:
    return (each for each in network.modules() if isinstance(each, PreTrainedModel))


@lru_cache(maxsize=64)
def _whole_row(num_tokens: int, device: torch.device) -> Packing:
    """Return the packing of a row that is one sequence."""
    return pack([(num_tokens, np.arange(num_tokens))], device)


@dataclass(frozen=True, slots=True)
class _Pattern:
    """The pairs and the formula of a layer's attention."""

    packing: Packing
    window: int | None  # Keys up to its own that a query attends to; None: all.
    cap: float | None  # Bound of scores; None: no bound.
    sinks: Tensor | None = field(repr=False)  # [head] score of a key without a value; None: none.


def _pattern(
    module: nn.Module,
    query: Tensor,
    packing: Packing | None,
    window: int | None,
    others: dict[str, Any],
) -> _Pattern:
    """Return the pattern of a layer. Raises: PackingRefused: packing does not support it."""
    cap = others.get("softcap")
    sinks = others.get("s_aux")
    _refuse(module, others, window=window, cap=cap, sinks=sinks)
    packing = packing or _whole_row(query.shape[2], query.device)
    chunk = _chunk_of(module)
    if chunk is not None and chunk < max(packing.key_lengths):
        packing = packing.chunked(chunk)
    if window is not None and packing.key_rows is not None:
        packing = packing.windowed(window)
    return _Pattern(packing, _shorter(window, packing.max_key_length), cap, sinks)


def _fused(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    packing: Packing | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return attention [1, seq, head, size]; without `packing`, the row is one sequence.

    Args:
        query: [1, head, seq, size].
        key: [1, kv_head, seq, size], as is `value`, whose size may differ.
        sliding_window: number of keys up to its own that a query attends to; None: all.
    """
    pattern = _pattern(module, query, packing, sliding_window, others)
    query, key, value = _as_computed(query, key, value)
    problem = flash.flash_problem(query, value)
    if pattern.cap is not None:
        problem = problem or "scores have a bound, which flash attention lacks"
    if problem and problem != flash.NO_CUDA:
        _warn_slow(module, problem)
    packed = pattern.packing
    is_plain = pattern.cap is None and pattern.sinks is None and packed.key_rows is None
    if problem and not is_plain:
        return _by_products(query, key, value, pattern, scaling, is_lean=True), None
    if not problem:
        # [seq, head, size] each
        queries, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))
        call = flash.FlashCall(packed, scaling=scaling, window=pattern.window)
        return flash.flash(queries, keys, values, call, sinks=pattern.sinks)[None], None
    return _one_by_one(query, key, value, list(packed.lengths), scaling, sliding_window), None


def _shorter(window: int | None, num_keys: int) -> int | None:
    """Return the window if it hides any of so many keys, else None."""
    return None if window is None or window >= num_keys else window


def _as_computed(*tensors: Tensor) -> Iterator[Tensor]:
    """Yield the tensors in the dtype of autocast, or unchanged without it."""
    device_type = tensors[0].device.type
    is_cast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if is_cast else tensors[0].dtype
    return (each.to(dtype) for each in tensors)


def _warn_slow(module: nn.Module, problem: str) -> None:
    """Log once for each reason that sequences are computed one by one."""
    if problem not in _warned:
        _warned.add(problem)
        logger.warning(
            "learner.attention=fused: %s computes packed sequences one by one, which is slow: %s",
            type(module).__name__,
            problem,
        )


def _one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    scaling: float,
    window: int | None,
) -> Tensor:
    """Return attention [1, seq, head, size] of sequences that share no rows."""
    parts = zip(*(each.split(lengths, 2) for each in (query, key, value)), strict=True)
    with sdpa_kernel(SDPA_BACKENDS):
        outputs = [out for q, k, v in parts for out in _one_fused(q, k, v, scaling, window)]
    return torch.cat(outputs, 2).transpose(1, 2).contiguous()  # Some families view the result.


def _one_fused(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
) -> Iterator[Tensor]:
    """Yield the attention of one sequence: in one piece, with a window in pieces of its length."""
    num_tokens = query.shape[2]
    window = _shorter(window, num_tokens)
    if window is None:
        yield _scaled_products(query, key, value, None, scaling)
        return
    piece = max(window, CHUNK_TOKENS)
    for start in range(0, num_tokens, piece):
        end = min(start + piece, num_tokens)
        seen = slice(first_key(end, end - start, window), end)
        mask = window_mask(end - start, end - seen.start, window, query.device)
        asked = query[:, :, start:end]
        yield _scaled_products(asked, key[:, :, seen], value[:, :, seen], mask, scaling)


def _scaled_products(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """Return attention by torch's function; without a mask it is causal."""
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _products(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    packing: Packing | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return attention in the format of `_fused`."""
    pattern = _pattern(module, query, packing, sliding_window, others)
    return _by_products(query, key, value, pattern, scaling, is_lean=False), None


def _by_products(
    query: Tensor, key: Tensor, value: Tensor, pattern: _Pattern, scaling: float, *, is_lean: bool
) -> Tensor:
    """Return attention by plain matrix products, [1, seq, head, size].

    Args:
        is_lean: compute the probabilities again in the backward pass instead of saving them.
    """
    tensors = _as_computed(query * scaling, key, value)
    rows = [each[0].transpose(0, 1) for each in tensors]
    blocks = pattern.packing.blocks(pattern.window)
    out = CausalProducts.apply(*rows, pattern.sinks, blocks, pattern.cap, is_lean)
    assert isinstance(out, Tensor)
    return out[None]


def _refuse(
    module: nn.Module,
    others: dict[str, Any],
    *,
    window: int | None,
    cap: float | None,
    sinks: Tensor | None,
) -> None:
    """Check the arguments of a layer. Raises: PackingRefused: packing does not support them."""
    name = type(module).__name__
    config = getattr(module, "config", None)
    configured_cap = getattr(config, "attn_logit_softcapping", None) or None
    present = [each for each in UNSUPPORTED if others.get(each) is not None]
    if present:
        problem = f"{name} uses {', '.join(present)}, which packing does not support"
    elif not _has_window(module, window):
        problem = f"{name} gives its kernel sliding_window={window}, unlike its config.json"
    elif cap != configured_cap:
        problem = f"{name} gives its kernel softcap={cap}, unlike its config.json"
    elif sinks is None and getattr(module, "sinks", None) is not None:
        problem = f"{name} has sinks that it does not give to its kernel"
    else:
        return
    raise PackingRefused(f"learner.layout=packed: {problem}. Use learner.layout=padded.")


def _kind_of(module: nn.Module) -> str:
    """Return the kind of a layer by its configuration, which it must have."""
    config: Any = module.config
    kinds = getattr(config, "layer_types", None)
    index: Any = getattr(module, "layer_idx", None)
    return _kind_of_all(config) if not kinds or index is None else kinds[index]


def _has_window(module: nn.Module, window: int | None) -> bool:
    """Return whether the configuration of a layer has this window.

    The start check cannot notice a missing window: its sequences are shorter than most windows.
    """
    config: Any = getattr(module, "config", None)
    if config is None:
        return True
    is_sliding = _kind_of(module) == _SLIDING
    return window == (getattr(config, "sliding_window", None) if is_sliding else None)


def _chunk_of(module: nn.Module) -> int | None:
    """Return the number of positions at whose multiples attention ends; None: it never does."""
    config: Any = getattr(module, "config", None)
    if config is None or _kind_of(module) != _CHUNKED:
        return None
    return int(config.attention_chunk_size)


def _divisible(kernel: Callable[..., tuple[Tensor, None]]) -> Callable[..., tuple[Tensor, None]]:
    """Return a kernel that computes a share of the heads if the row is divided over ranks."""

    def divided(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        sequence_group: ProcessGroup | None = None,
        packing: Packing | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Return attention as `kernel`; each tensor has the tokens of this rank."""
        group = sequence_group
        sinks: Tensor | None = others.get("s_aux")
        row = mixers.row_of(module)
        if packing is None and row is not None:  # The block around this layer dropped it.
            packing, group = row.packing, row.group
        tensors = (query, key, value)
        if group is None or packing is None:
            return kernel(module, *tensors, attention_mask, packing=packing, **others)
        query, key, value = _as_computed(*tensors)  # Fewer bytes under autocast.
        rows = (query, repeated_heads(key, group.size()), repeated_heads(value, group.size()))
        num_tokens = sum(packing.lengths)
        heads = [heads_of_row(each, group, num_tokens) for each in rows]
        if sinks is not None:
            others["s_aux"] = sinks.view(group.size(), -1)[group.rank()]
        attended, _ = kernel(module, *heads, attention_mask, packing=packing, **others)
        return rows_of_heads(attended, group), None

    return divided


AttentionInterface.register(FUSED, _divisible(_fused))
AttentionInterface.register(PRODUCTS, _divisible(_products))
