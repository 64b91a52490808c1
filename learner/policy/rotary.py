"""Rotary embeddings whose frequencies do not depend on the other sequences of a block.

Transformers chooses the frequencies of `longrope` and `dynamic` by the longest position of a block.
The score of a sequence would therefore change beside a longer one. vLLM chooses them once, by
`max_model_len`. This module fixes them by the same rule.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from common.errors import ConfigError

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
    found: Any = getattr(module, "rope_type", None)
    if isinstance(found, str):
        yield None, found
    elif isinstance(found, dict):
        yield from list(found.items())


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
    own = {} if layer_type is None else {"layer_type": layer_type}
    seq_len = original + 1 if most > original else original
    made, _ = ROPE_INIT_FUNCTIONS[_LONG](config, torch.device("cpu"), seq_len=seq_len, **own)
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
