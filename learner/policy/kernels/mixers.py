"""Layers that mix the tokens of a packed row, computed for one sequence after another.

The kernels of `attention.py` keep the sequences of a row apart. Three kinds of layers have no such
kernel: recurrent layers and convolutions, whose state would pass from one sequence to the next;
attention that numbers the rows itself; and attention with a formula of its own. Their forward pass
runs once for each sequence, on the rows of its keys. The rest of a network, its feed-forward parts
and its head, computes the whole row at once.

On CUDA some recurrent kernels take the bounds of sequences. If their packages are installed, one
call computes all sequences.

Layers are found by their signature: what mixes tokens takes a cache, so that it can generate.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer

from learner.batch.packing import Packing
from learner.policy.kernels.sequence import gather_row
from learner.policy.selfcheck import PackingRefused

# Attention of transformers for one sequence at a time, by the name that a packed network has.
FORMS = {"packed_sequences_eager": "eager", "packed_sequences_sdpa": "sdpa"}
_CACHES = {"past_key_values", "past_key_value", "cache_params", "layer_past"}
_DROPPED = {"packing", "sequence_group"}  # Arguments that describe the row.
# Kernels that take bounds of sequences: a name in the layer's forward pass, the packages that have
# them, and the argument for the bounds. All of them take the number of each token's sequence, too.
_BOUNDED = (
    ("torch_chunk_gated_delta_rule", ("fla", "causal_conv1d"), "cu_seq_lens_q"),
    ("chunk_kimi_delta_attention", ("fla", "causal_conv1d"), "cu_seqlens"),
    ("mamba2_chunk_scan", ("mamba_ssm", "causal_conv1d"), ""),
)
_BOUNDS = {"seq_idx", *(keyword for _, _, keyword in _BOUNDED)}


@dataclass(frozen=True, slots=True)
class PackedRow:
    """The row that a network computes, as its layers need it."""

    packing: Packing
    group: ProcessGroup | None  # Ranks that hold adjacent parts of the row; None: it is whole.


# The row of each layer in the last pass, which the backward pass of checkpointing needs again.
_rows: WeakKeyDictionary[nn.Module, PackedRow] = WeakKeyDictionary()
_hooked: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def row_of(module: nn.Module) -> PackedRow | None:
    """Return the row that a layer computes; None: its rows are whole sequences."""
    return _rows.get(module)


def packed_form(name: str) -> str:
    """Return the name of packed attention whose layers compute one sequence by attention `name`."""
    return next(packed for packed, form in FORMS.items() if form == name)


def kernel_problem(network: nn.Module) -> str:
    """Return why the kernels of attention cannot serve a network's layers; "" if they can."""
    for module in token_mixers(network):
        if _is_dispatching(module):
            if any(_takes_cache(type(each)) for each in module.modules() if each is not module):
                return f"{type(module).__name__} chooses or shortens its keys before it attends"
        elif not is_recurrent(module):
            return f"{type(module).__name__} has its own attention implementation"
    return ""


def state_problem(network: nn.Module) -> str:
    """Return why a network's sequences cannot be kept apart at all; "" if no reason is known."""
    parts = {each for module in token_mixers(network) for each in module.modules()}
    for module in network.modules():
        has_state = any(isinstance(each, nn.Conv1d) for each in module.children())
        if has_state and module not in parts:
            return f"{type(module).__name__} keeps its state in itself"
    return ""


def separate_sequences(network: nn.Module, *, is_whole: bool) -> None:
    """Let the layers of a network that no kernel serves compute one sequence after another.

    Args:
        is_whole: all layers that mix tokens do, attention included.
    """
    for module in token_mixers(network):
        is_wrapped = is_whole or not _is_dispatching(module) or "arange" in _names(type(module))
        if is_wrapped:
            # A bound method, not a closure: copies of the layer bind their own.
            module.forward = MethodType(_one_by_one, module)
        else:
            vars(module).pop("forward", None)
    for model in network.modules():
        if isinstance(model, PreTrainedModel) and model not in _hooked:
            model.register_forward_pre_hook(_enter, with_kwargs=True)
            _hooked[model] = True


def looping_layer(network: nn.Module, *, is_whole: bool) -> str:
    """Return the class of a layer that calls its kernels for each sequence; "": none does.

    Args:
        is_whole: as in `separate_sequences`. Otherwise attention has kernels for packed rows.
    """
    for module in token_mixers(network):
        is_looping = is_recurrent(module) and _bounds_keyword(module) is None
        if is_looping or (is_whole and not is_recurrent(module)):
            return type(module).__name__
    return ""


def token_mixers(network: nn.Module) -> list[nn.Module]:
    """Return the layers that mix the tokens of a row, none within another."""
    mixers: list[nn.Module] = []
    inner: set[nn.Module] = set()
    for module in network.modules():
        if module in inner or not _takes_cache(type(module)):
            continue
        parts = [each for each in module.modules() if each is not module]
        if not _is_dispatching(module) and any(map(_is_dispatching, parts)):
            continue  # A block around attention, such as that of Zamba 2.
        mixers.append(module)
        inner.update(parts)
    return mixers


def is_recurrent(module: nn.Module) -> bool:
    """Return whether a layer has a state instead of keys."""
    has_state = "cache_params" in _parameters(type(module))
    return has_state or any(isinstance(each, nn.Conv1d) for each in module.children())


@cache
def _parameters(kind: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of a forward pass's arguments."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]


@cache
def _names(kind: type[nn.Module]) -> frozenset[str]:
    """Return the names that the code of a forward pass uses."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return frozenset(() if code is None else code.co_names)


@cache
def _takes_cache(kind: type[nn.Module]) -> bool:
    """Return whether a class is a layer that mixes tokens, not a block or a network of layers."""
    if issubclass(kind, (GradientCheckpointingLayer, PreTrainedModel)):
        return False
    return not _CACHES.isdisjoint(_parameters(kind))


def _is_dispatching(module: nn.Module) -> bool:
    """Return whether a layer calls the attention that its configuration names."""
    return _takes_cache(type(module)) and "ALL_ATTENTION_FUNCTIONS" in _names(type(module))


def _enter(model: PreTrainedModel, args: Any, kwargs: dict[str, Any]) -> Any:
    """Set the row of all layers before a pass of their network."""
    packing = kwargs.get("packing")
    row = None if packing is None else PackedRow(packing, kwargs.get("sequence_group"))
    for module in model.modules():
        if _takes_cache(type(module)):
            if row is None:
                _rows.pop(module, None)
            else:
                _rows[module] = row
    if packing is None or model.config._attn_implementation not in FORMS:
        return None
    # With a mask transformers does not search the positions for bounds of sequences.
    num_tokens = sum(packing.lengths)
    mask = torch.ones(1, num_tokens, dtype=torch.int64, device=packing.bounds.device)
    return args, {"attention_mask": mask} | kwargs


class SequenceMasks:
    """The mask of a layer for a sequence of any length, made by the network's own rule."""

    def __init__(self, make: Callable[..., Tensor | None]) -> None:
        self._make = make
        self._made: dict[int, Tensor | None] = {}

    def __getattr__(self, name: str) -> Any:
        """Raise: a network changes its mask before its layers get it."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise PackingRefused(f"it changes its mask of attention (by `{name}`) outside its layers")

    def of_length(self, length: int) -> Tensor | None:
        """Return the mask [1, 1, query, key] of one sequence; None if attention is causal."""
        if length not in self._made:
            self._made[length] = self._make(q_length=length, kv_length=length)
        return self._made[length]


def _one_by_one(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the output of a layer for a packed row, from that of each sequence alone."""
    forward = type(self).forward
    row = _rows.get(self)
    if row is None:
        return forward(self, *args, **kwargs)
    arguments = dict(zip(_parameters(type(self)), args, strict=False)) | kwargs
    arguments = {name: each for name, each in arguments.items() if name not in _DROPPED}
    num_tokens = sum(row.packing.lengths)
    width = arguments[_parameters(type(self))[0]].shape[1]  # Positions of this rank.
    begin = 0
    if row.group is not None:
        begin = row.group.rank() * width
        arguments = _cut(arguments, _gathering(row.group, width, num_tokens))
    inside = [each for each in self.modules() if each in _rows]
    for module in inside:  # Attention within this pass computes one sequence.
        del _rows[module]
    config: Any = getattr(self, "config", None)
    name = getattr(config, "_attn_implementation", None)
    try:
        if name in FORMS:
            config._attn_implementation = FORMS[name]
        outputs = _outputs(self, arguments, row.packing, range(begin, begin + width))
    finally:
        if name in FORMS:
            config._attn_implementation = name
        for module in inside:
            _rows[module] = row
    return outputs


Cut = Callable[[str, Any], Any]  # (name, tensor or masks) -> the same for other rows


def _cut(value: Any, cut: Cut, name: str = "") -> Any:
    """Return an argument with `cut` applied to all tensors and masks in it."""
    if isinstance(value, dict):
        return {key: _cut(each, cut, name or key) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(_cut(each, cut, name) for each in value)
    return cut(name, value) if isinstance(value, (Tensor, SequenceMasks)) else value


def _gathering(group: ProcessGroup, width: int, num_tokens: int) -> Cut:
    """Return the cut from the positions of this rank to those of the whole row."""

    def cut(name: str, value: Any) -> Any:
        is_rows = isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (1, width)
        return gather_row(value, group, num_tokens) if is_rows else value

    return cut


def _choosing(module: nn.Module, keys: slice | Tensor, length: int, num_rows: int) -> Cut:
    """Return the cut from a whole row of `num_rows` to the `length` rows of `keys`.

    Raises: PackingRefused: an argument has no rows.
    """

    def cut(name: str, value: Any) -> Any:
        if isinstance(value, SequenceMasks):
            return value.of_length(length)
        if name.endswith("mask"):  # A mask of padding, which packed rows do not have.
            return None
        if name == "alibi":  # A bias for each distance from the first key.
            return value[..., :length]
        if value.ndim < 2 or value.shape[:2] != (1, num_rows):
            raise PackingRefused(
                f"learner.layout=packed: {type(module).__name__} gets {name} of the shape"
                f" {list(value.shape)}, which has no rows. Use learner.layout=padded."
            )
        return value[:, keys] if isinstance(keys, slice) else value.index_select(1, keys)

    return cut


def _outputs(module: nn.Module, arguments: dict[str, Any], packing: Packing, part: range) -> Any:
    """Return the outputs of a layer for the positions of `part`; those after the row are zero."""
    compute = partial(type(module).forward, module)
    bounds = _bounds_arguments(module, packing)
    if bounds is not None:
        outputs = [_all_at_once(compute, module, arguments | bounds, packing, part)]
    else:
        outputs = list(_each_sequence(compute, module, arguments, packing, part))
    if not isinstance(outputs[0], tuple):
        return _filled(outputs, len(part))
    # Floating-point outputs after the first are probabilities of attention.
    return tuple(
        _filled(column, len(part)) if index == 0 or _is_integer(column[0]) else None
        for index, column in enumerate(zip(*outputs, strict=True))
    )


def _is_integer(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point()


def _filled(pieces: Sequence[Tensor], width: int) -> Tensor:
    """Return the rows of pieces [1, rows, ...] side by side, with zeros up to `width`.

    The last axis of chosen keys grows with a sequence. Shorter ones repeat their last key.
    """
    widest = max(each.shape[-1] for each in pieces)
    alike = [
        torch.cat([each, each[..., -1:].expand(*each.shape[:-1], widest - each.shape[-1])], -1)
        if each.shape[-1] < widest
        else each
        for each in pieces
    ]
    whole = torch.cat(alike, 1) if len(alike) > 1 else alike[0]
    missing = width - whole.shape[1]
    return F.pad(whole, (0, 0) * (whole.ndim - 2) + (0, missing)) if missing else whole


def _each_sequence(
    compute: Callable[..., Any],
    module: nn.Module,
    arguments: dict[str, Any],
    packing: Packing,
    part: range,
) -> Iterator[Any]:
    """Yield the outputs of a layer for each sequence with positions in `part`."""
    num_rows = sum(packing.lengths)
    if part.start >= num_rows:  # The pass of a rank without positions joins the collectives.
        cut = _choosing(module, slice(0, 1), 1, num_rows)
        yield _rows_of(compute(**_cut(arguments, cut)), slice(0, 0))
    first = 0  # First query of the sequence.
    first_key = 0
    for length, num_keys in zip(packing.lengths, packing.key_lengths, strict=True):
        begin = max(first, part.start)
        end = min(first + length, part.stop)
        if begin < end:
            num_seen = num_keys - (first + length - end)  # No output depends on later keys.
            if packing.key_rows is None:
                keys: slice | Tensor = slice(first, end)
            else:
                keys = packing.key_rows[first_key : first_key + num_seen]
            output = compute(**_cut(arguments, _choosing(module, keys, num_seen, num_rows)))
            yield _rows_of(output, slice(num_seen - (end - begin), num_seen))
        first += length
        first_key += num_keys


def _rows_of(output: Any, rows: slice | Tensor) -> Any:
    """Return rows of an output, or of each output in a tuple."""
    if isinstance(output, tuple):
        return tuple(_rows_of(each, rows) for each in output)
    return output[:, rows] if isinstance(output, Tensor) else output


@cache
def _has_packages(names: tuple[str, ...]) -> bool:
    return all(find_spec(name) is not None for name in names)


def _bounds_keyword(module: nn.Module) -> str | None:
    """Return the argument for the bounds of sequences, "" without one; None: kernels take none."""
    names = _names(type(module))
    if "seq_idx" in _parameters(type(module)) and _has_packages(("causal_conv1d",)):
        return ""  # A convolution and nothing else.
    keys = (key for name, packages, key in _BOUNDED if name in names and _has_packages(packages))
    return next(keys, None)


def _bounds_arguments(module: nn.Module, packing: Packing) -> dict[str, Any] | None:
    """Return the bounds of sequences as the kernels of a layer take them; None: they cannot."""
    keyword = _bounds_keyword(module)
    if keyword is None:
        return None
    device = packing.key_bounds.device
    num_sequences = len(packing.lengths)
    rows = torch.arange(sum(packing.key_lengths), device=device)
    owners = torch.searchsorted(packing.key_bounds[1 : num_sequences + 1], rows, right=True)
    bounds = packing.key_bounds[: num_sequences + 1].long()
    return {"seq_idx": owners.int()[None]} | ({keyword: bounds} if keyword else {})


def _all_at_once(
    compute: Callable[..., Any],
    module: nn.Module,
    arguments: dict[str, Any],
    packing: Packing,
    part: range,
) -> Any:
    """Return the output for `part` from one call whose kernels get the bounds of sequences."""
    num_rows = sum(packing.lengths)
    num_keys = sum(packing.key_lengths)
    bounds = {name: arguments[name] for name in _BOUNDS if name in arguments}
    rest = {name: each for name, each in arguments.items() if name not in _BOUNDS}
    keys = slice(0, num_rows) if packing.key_rows is None else packing.key_rows
    output = compute(**_cut(rest, _choosing(module, keys, num_keys, num_rows)), **bounds)
    if packing.key_rows is None:
        return _rows_of(output, slice(part.start, min(part.stop, num_rows)))
    # The queries of a sequence are its last keys.
    queries = torch.arange(
        part.start, min(part.stop, num_rows), device=packing.bounds.device, dtype=torch.int32
    )
    owners = torch.searchsorted(packing.bounds[1:], queries, right=True)
    ends = packing.key_bounds[1:][owners] - packing.bounds[1:][owners]
    return _rows_of(output, queries + ends)


def _refuse_call(module: nn.Module, *_: Any, **__: Any) -> Any:
    """Raise: attention outside the layers that are computed for one sequence after another."""
    raise PackingRefused(
        f"learner.layout=packed: {type(module).__name__} attends outside the layers that compute"
        " one sequence after another. Use learner.layout=padded."
    )


def _masks(*, form: str, **settings: Any) -> SequenceMasks:
    """Return the masks of a rule in transformers' format for one form of attention."""
    names = ("mask_function", "allow_is_causal_skip", "dtype", "use_vmap", "device", "config")
    rule = {name: settings[name] for name in names if name in settings}
    return SequenceMasks(partial(ALL_MASK_ATTENTION_FUNCTIONS[form], batch_size=1, **rule))


for _name, _form in FORMS.items():
    AttentionInterface.register(_name, _refuse_call)
    AttentionMaskInterface.register(_name, partial(_masks, form=_form))
