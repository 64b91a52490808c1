"""Logits behind a network's trunk, by the head alone or by the network's own code.

Some families scale or cap their logits, or their states before the head. Such a network is found
by measurement. Its logits are then computed by its own forward pass, whose trunk returns the given
states.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from common.errors import ConfigError
from learner.policy.composite import decoder_of
from learner.policy.precision import RoundedFactors, on_grid

PROBE_TOKENS = 8
SCALES = (1.0, 100.0)  # Factors of the probed states: a cap of logits changes only large ones.
# Limits of the difference of two logits, as fractions of the largest logit.
FP32_ROUNDING = 1e-4
BF16_ROUNDING = 3e-2
_OWN = "has_own_logits"

Logits = Callable[[Tensor], Tensor]  # [tokens, hidden] -> [tokens, vocab]


def logits_function(model: PreTrainedModel, dtype: torch.dtype, *, is_rounded: bool) -> Logits:
    """Return the function from states to logits, which computes in `dtype`.

    Cast weights are kept by the function, so that chunks do not cast them again.

    Args:
        is_rounded: round the weights to bf16 in any case, as the rest of a pass in bf16.
    """
    if getattr(model, _OWN, False):
        return lambda rows: own_logits(model, rows, dtype, is_rounded=is_rounded)
    head: Any = model.get_output_embeddings()
    cast = on_grid if is_rounded else lambda value: value
    weight = cast(head.weight).to(dtype)  # [vocab, hidden]
    bias = None if getattr(head, "bias", None) is None else cast(head.bias).to(dtype)
    return lambda rows: F.linear(rows.to(dtype), weight, bias)


def trunk_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the network below the head. Raises: ConfigError: the network has no such part."""
    decoder = decoder_of(model)
    if decoder is not model:  # Some composites, such as Llama 4, have the head in this part.
        return decoder if decoder.get_output_embeddings() is None else trunk_of(decoder)
    parts = [each for each in model.children() if isinstance(each, PreTrainedModel)]
    # A network whose prefix names no part of it, such as Llama 4, is its own base_model.
    trunk: Any = model.base_model if model.base_model is not model else next(iter(parts), None)
    if trunk is None:
        raise ConfigError(
            f"{type(model).__name__} has no network below its head. Choose another model.path"
        )
    return trunk


def own_logits(
    model: PreTrainedModel, rows: Tensor, dtype: torch.dtype, *, is_rounded: bool = False
) -> Tensor:
    """Return the logits [tokens, vocab] of a network whose trunk has returned `rows`."""
    head: Any = model.get_output_embeddings()
    is_bf16 = dtype is torch.bfloat16
    states = rows.to(dtype if is_bf16 else head.weight.dtype)[None]
    ids = torch.zeros(states.shape[:2], dtype=torch.int64, device=states.device)
    with (
        _returning(trunk_of(model), states) as calls,
        torch.autocast(states.device.type, dtype=torch.bfloat16, enabled=is_bf16),
        RoundedFactors() if is_rounded else nullcontext(),
    ):
        logits = model(input_ids=ids, use_cache=False).logits[0]
    if not calls:
        raise _TrunkBypassed
    return logits


class _TrunkOutput:
    """The output of a trunk of any family: states, and nothing in the other fields."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def keys(self) -> tuple[str, ...]:
        """Return the names of the fields, for networks that pass them on as arguments."""
        return ("last_hidden_state",)

    def __getitem__(self, index: object) -> Any:
        if index in (0, "last_hidden_state"):
            return self.last_hidden_state
        return () if isinstance(index, slice) else None


class _TrunkBypassed(RuntimeError):
    """The forward pass of a network uses a part of its trunk, as that of OPT."""


@contextmanager
def _returning(trunk: Any, states: Tensor) -> Iterator[list[_TrunkOutput]]:
    """Replace the forward pass of a trunk within the context; yield its outputs."""
    original = vars(trunk).get("forward")
    outputs: list[_TrunkOutput] = []

    def forward(*_: object, **__: object) -> _TrunkOutput:
        outputs.append(_TrunkOutput(states))
        return outputs[-1]

    trunk.forward = forward
    try:
        yield outputs
    finally:
        if original is None:
            del trunk.forward
        else:
            trunk.forward = original


@torch.no_grad()
def own_logits_gap(model: PreTrainedModel) -> Tensor:
    """Return the difference of own logits to the head's alone, as a multiple of rounding, [1].

    It is 0 if the network does not call its trunk as a whole.
    """
    head: Any = model.get_output_embeddings()
    is_bf16 = any(each.dtype != torch.float32 for each in model.parameters())
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(PROBE_TOKENS, head.weight.shape[1], generator=generator)
    rows = torch.cat([scale * drawn for scale in SCALES]).to(head.weight.device)
    try:
        by_network = own_logits(model, rows, torch.float32).float()
    except _TrunkBypassed:  # The start check compares the head's logits with the network's.
        return torch.zeros(1)
    alone = head(rows.to(head.weight.dtype)).float()
    largest = torch.maximum(by_network.abs(), alone.abs()).amax(-1, keepdim=True)
    limit = BF16_ROUNDING if is_bf16 else FP32_ROUNDING
    return ((by_network - alone).abs() / (limit * largest).clamp_min(1e-30)).amax().reshape(1)


def use_own_logits(model: Any) -> None:
    """Compute the logits of a network by its own code from now on."""
    setattr(model, _OWN, True)
