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
from torch.autograd.function import once_differentiable
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

# Bytes of fp32 logits that a CPU turns into scores at once: they stay in its caches.
BLOCK_BYTES = 4 << 20

Logits = Callable[[Tensor], Tensor]  # [tokens, hidden] -> [tokens, vocab]


class TokenScores(torch.autograd.Function):
    """Log-probabilities from logits, in fp32, with one buffer of the size of the logits.

    A CPU reads the logits block by block, so no copy in fp32 of all of them exists. The backward
    pass writes the gradient of the logits over the logits, so it can run once only.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
        support_ids: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities of the targets, entropies, and those of `support_ids`.

        An output that is not requested is empty.

        Args:
            logits: [rows, vocab] of any dtype, used by this function alone.
            targets: [rows] int64.
            support_ids: [rows, k] int64; None: none.

        Returns: [rows], [rows] and [rows, k] float32 nats.
        """
        size = len(logits) if with_entropy else 0
        entropy = torch.empty(size, dtype=torch.float32, device=logits.device)
        totals = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        for rows in _blocks(logits):
            scaled = _scaled(logits[rows], temperature)
            totals[rows] = torch.logsumexp(scaled, -1)
            if with_entropy:
                log_probs = scaled.sub_(totals[rows, None])
                entropy[rows] = -(log_probs.exp() * log_probs).sum(-1)
        logprobs = _scaled(logits.gather(1, targets[:, None]), temperature).squeeze(1) - totals
        support = logprobs.new_empty(0)
        if support_ids is not None:
            chosen = logits.gather(1, support_ids)
            support = _scaled(chosen, temperature) - totals[:, None]
        ctx.save_for_backward(logits, targets, totals, entropy, support_ids)
        ctx.temperature = temperature
        ctx.is_used = False
        return logprobs, entropy, support

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradient of the logits, in their memory. Raises: RuntimeError: called twice.

        Of a token's log-probability it is (its own entry - probabilities) / temperature, of an
        entropy -probability * (log-probability + entropy) / temperature.
        """
        if ctx.is_used:
            raise RuntimeError("the gradient of token scores has replaced their logits")
        ctx.is_used = True
        of_logprobs, of_entropy, of_support = gradients
        logits, targets, totals, entropy, support_ids = ctx.saved_tensors
        shares = of_logprobs if support_ids is None else of_logprobs + of_support.sum(-1)
        for rows in _blocks(logits):
            scaled = _scaled(logits[rows], ctx.temperature).sub_(totals[rows, None])
            factors = -shares[rows, None]
            if len(entropy):
                factors = factors - of_entropy[rows, None] * (scaled + entropy[rows, None])
            made = scaled.exp_().mul_(factors)
            made.scatter_add_(1, targets[rows, None], of_logprobs[rows, None])
            if support_ids is not None:
                made.scatter_add_(1, support_ids[rows], of_support[rows])
            if ctx.temperature != 1.0:
                made.div_(ctx.temperature)
            logits[rows] = made
        return logits, None, None, None, None


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Yield the rows of logits to compute together."""
    num_rows = len(logits)
    size = max(1, BLOCK_BYTES // (4 * logits.shape[1])) if logits.device.type == "cpu" else num_rows
    for start in range(0, num_rows, max(1, size)):
        yield slice(start, start + size)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Return a copy of logits in fp32, divided by the temperature."""
    copy = logits.to(torch.float32, copy=True)
    return copy if temperature == 1.0 else copy.div_(temperature)


def logits_function(
    model: PreTrainedModel, dtype: torch.dtype, *, pass_dtype: torch.dtype
) -> Logits:
    """Return the function from states to logits, which computes in `dtype`.

    Cast weights are kept by the function, so that chunks do not cast them again.

    Args:
        pass_dtype: dtype of the rest of the pass, to whose numbers the weights are rounded first.
    """
    if getattr(model, _OWN, False):
        # `TokenScores` writes to its logits; the network's last operation may have stored them.
        return lambda rows: own_logits(model, rows, dtype, pass_dtype=pass_dtype).clone()
    head: Any = model.get_output_embeddings()
    weight = on_grid(head.weight, pass_dtype).to(dtype)  # [vocab, hidden]
    has_bias = getattr(head, "bias", None) is not None
    bias = on_grid(head.bias, pass_dtype).to(dtype) if has_bias else None
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
    model: PreTrainedModel,
    rows: Tensor,
    dtype: torch.dtype,
    *,
    pass_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the logits [tokens, vocab] of a network whose trunk has returned `rows`."""
    head: Any = model.get_output_embeddings()
    is_cast = dtype is not torch.float32
    is_rounded = pass_dtype is not torch.float32
    states = rows.to(dtype if is_cast else head.weight.dtype)[None]
    ids = torch.zeros(states.shape[:2], dtype=torch.int64, device=states.device)
    with (
        _returning(trunk_of(model), states) as calls,
        torch.autocast(states.device.type, dtype=dtype, enabled=is_cast),
        RoundedFactors(pass_dtype) if is_rounded else nullcontext(),
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
    is_16_bit = any(each.dtype != torch.float32 for each in model.parameters())
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(PROBE_TOKENS, head.weight.shape[1], generator=generator)
    rows = torch.cat([scale * drawn for scale in SCALES]).to(head.weight.device)
    try:
        by_network = own_logits(model, rows, torch.float32).float()
    except _TrunkBypassed:  # The start check compares the head's logits with the network's.
        return torch.zeros(1)
    alone = head(rows.to(head.weight.dtype)).float()
    largest = torch.maximum(by_network.abs(), alone.abs()).amax(-1, keepdim=True)
    limit = BF16_ROUNDING if is_16_bit else FP32_ROUNDING
    return ((by_network - alone).abs() / (limit * largest).clamp_min(1e-30)).amax().reshape(1)


def use_own_logits(model: Any) -> None:
    """Compute the logits of a network by its own code from now on."""
    setattr(model, _OWN, True)
