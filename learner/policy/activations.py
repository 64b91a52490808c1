"""Activations of a network's layers: stored, computed again, or with inputs in host memory.

A layer that recomputes keeps its input only. `torch.utils.checkpoint` computes the rest again in
the backward pass. The feed-forward part of such a layer is computed in chunks of the row, so the
wide vectors of its units never exist for the whole row.
"""

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from common.config.learner import Activations
from common.errors import ConfigError
from learner.policy.activation_plan import StoredLayers
from learner.policy.expert_weights import holds_experts

_WHOLE = "forward_of_whole_rows"  # Attribute of a part: its forward pass without chunks.
Kind = TypeVar("Kind", bound=nn.Module)
GATED = "MLP"  # End of the class names of feed-forward parts, which treat tokens one by one.


def use_activations(
    network: nn.Module, mode: Activations, stored: StoredLayers, mlp_chunk_tokens: int
) -> None:
    """Let the layers of all transformers in a network treat their activations as configured.

    Args:
        stored: the number of last layers that store their activations.
        mlp_chunk_tokens: tokens of a chunk of the feed-forward parts; 0: no chunks.

    Raises: ConfigError: a network has no layers that can recompute.
    """
    for model in _outermost(network, PreTrainedModel):
        layers: list[Any] = list(_outermost(model, GradientCheckpointingLayer))
        num_again = max(0, len(layers) - stored.num_stored)
        if layers and not num_again:
            continue
        if not (layers and model.supports_gradient_checkpointing):
            raise ConfigError(
                f"learner.activations={mode.value}: {type(model).__name__} does not support"
                " gradient checkpointing. Use keep for this model"
            )
        inputs = HostCopies() if stored.is_offloaded else None
        for layer in layers[:num_again]:
            layer.gradient_checkpointing = True
            layer.training = True  # The layer recomputes only in this mode. It has no dropout.
            layer._gradient_checkpointing_func = partial(_recomputed, inputs)
            if mlp_chunk_tokens:
                for part in _feed_forward_parts(layer):
                    run = getattr(part, _WHOLE, part.forward)
                    setattr(part, _WHOLE, run)
                    part.forward = partial(_by_chunks, part, run, mlp_chunk_tokens)


def _outermost(network: nn.Module, kind: type[Kind]) -> Iterator[Kind]:
    """Yield the modules of a kind that are not part of another module of this kind."""
    inner: set[nn.Module] = set()
    for module in network.modules():
        if isinstance(module, kind) and module not in inner:
            inner.update(module.modules())
            yield module


def _feed_forward_parts(layer: nn.Module) -> Iterator[Any]:
    """Yield the parts to divide. Those with experts are whole: ranks may compute them together."""
    for part in layer.modules():
        if type(part).__name__.endswith(GATED) and not any(map(holds_experts, part.modules())):
            yield part


def _recomputed(inputs: "HostCopies | None", run: Callable[..., Any], *args: Any) -> Any:
    """Return the results of a layer, of which the graph keeps the input only."""
    if not torch.is_grad_enabled():
        return run(*args)
    if inputs is None:
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)
    with saved_tensors_hooks(inputs.store, inputs.fetch):
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)


def _by_chunks(
    part: nn.Module, run: Callable[..., Any], size: int, *args: Any, **keywords: Any
) -> Any:
    """Return the results of a feed-forward part for states [batch, seq, hidden], chunk by chunk.

    Args:
        run: the forward pass of the part.
        size: tokens of a chunk.
    """
    if len(args) != 1 or keywords or not isinstance(args[0], Tensor):
        return run(*args, **keywords)
    (states,) = args
    if states.shape[:-1].numel() <= size:
        return run(states)
    trained = [each for each in part.parameters() if each.requires_grad]
    flat = states.flatten(0, -2)
    # Frozen layers below the first adapter have no gradient.
    is_needed = torch.is_grad_enabled() and (states.requires_grad or bool(trained))
    anchor = torch.empty(0, device=states.device, requires_grad=is_needed)
    # The graph keeps the input before the chunks are computed. A layer that is computed again
    # therefore ends here: `torch.utils.checkpoint` stops at the last tensor that is kept.
    anchored: Any = _Kept.apply(anchor, flat) if is_needed else anchor
    made: Any = _Chunks.apply(anchored, anchored.grad_fn, run, size, flat, *trained)
    return made.view(*states.shape[:-1], -1)


class _Kept(torch.autograd.Function):
    """Keeps a tensor in the graph, for `_Chunks`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, states: Tensor) -> Tensor:
        """Return an empty tensor, whose node has the states [tokens, hidden]."""
        ctx.save_for_backward(states)
        return torch.empty_like(anchor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None


class _Chunks(torch.autograd.Function):
    """A function of single tokens, computed chunk by chunk in both passes."""

    @staticmethod
    def forward(
        ctx: Any,
        anchored: Tensor,
        node: Any,
        run: Callable[[Tensor], Tensor],
        size: int,
        flat: Tensor,
        *trained: Tensor,
    ) -> Tensor:
        """Return [tokens, out].

        Args:
            node: node of `_Kept` with the states; None without a gradient.
            flat: states [tokens, in].
            trained: the weights that `run` uses and that get gradients.
        """
        ctx.node = node
        ctx.run = run
        ctx.size = size
        ctx.trained = trained
        kind = flat.device.type
        ctx.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        made: Tensor | None = None
        for start in range(0, len(flat), size):
            out = run(flat[start : start + size])
            if made is None:
                made = out.new_empty(len(flat), out.shape[-1])
            made[start : start + size] = out
        assert made is not None
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of the states and of the weights, each summed over the chunks."""
        (flat,) = ctx.node.saved_tensors
        ctx.node = None
        kind, dtype, is_cast = ctx.autocast
        of_states = torch.empty_like(flat) if ctx.needs_input_grad[4] else None
        sums: list[Tensor | None] = [None] * len(ctx.trained)
        for start in range(0, len(flat), ctx.size):
            rows = slice(start, start + ctx.size)
            states = flat[rows].detach().requires_grad_(of_states is not None)
            with torch.enable_grad(), torch.autocast(kind, dtype=dtype, enabled=is_cast):
                out = ctx.run(states)
            sources = [*([] if of_states is None else [states]), *ctx.trained]
            made = list(torch.autograd.grad(out, sources, gradient[rows], allow_unused=True))
            if of_states is not None:
                of_states[rows] = made.pop(0)
            for index, part in enumerate(made):
                before = sums[index]
                if part is not None:
                    sums[index] = part if before is None else before.add_(part)
        return None, None, None, None, of_states, *sums


class _Copy:
    """A tensor in host memory, on its way there, or on its way back."""

    def __init__(self, on_host: Tensor, device: torch.device, before: "_Copy | None") -> None:
        self.on_host = on_host
        self.device = device
        # The copy that was stored before this one. The graph owns the copies.
        self.before = None if before is None else weakref.ref(before)
        self.fetched: Tensor | None = None  # On the device.
        self.is_done: Any = None  # Event at the end of the transfer back; None on a CPU.


class HostCopies:
    """Keeps the inputs of layers in host memory between the forward and the backward pass.

    On CUDA the copies run on a stream of their own, from and to pinned memory. The copy to the host
    overlaps with the layer. The backward pass reads the inputs in reverse order, so a fetch also
    begins the transfer of the input that was stored before: it overlaps with this layer.

    Example: the forward pass stores a, b, c. The backward pass fetches c, which also begins the
    transfer of b. The fetch of b waits for this transfer, and begins that of a.
    """

    def __init__(self) -> None:
        self._last: weakref.ref[_Copy] | None = None
        self._stream: torch.cuda.Stream | None = None

    def store(self, tensor: Tensor) -> "Tensor | _Copy":
        """Begin the copy of a floating-point tensor and return it; others stay as they are."""
        if not tensor.is_floating_point():
            return tensor
        source = tensor.detach()
        on_host = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        before = None if self._last is None else self._last()
        copy = _Copy(on_host, source.device, before)
        self._last = weakref.ref(copy)
        if not source.is_cuda:
            on_host.copy_(source)
            return copy
        stream = self._side_stream(source.device)
        stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(stream):
            on_host.copy_(source, non_blocking=True)
        source.record_stream(stream)  # Its memory is not used again before the copy ends.
        return copy

    def fetch(self, copy: "Tensor | _Copy") -> Tensor:
        """Return a stored tensor on its device, and begin the transfer of the one before."""
        if isinstance(copy, Tensor):
            return copy
        self._begin(copy)
        fetched = copy.fetched
        assert fetched is not None
        copy.fetched = None
        if copy.is_done is not None:
            current = torch.cuda.current_stream(copy.device)
            current.wait_event(copy.is_done)
            fetched.record_stream(current)
        before = None if copy.before is None else copy.before()
        if before is not None:
            self._begin(before)
        return fetched

    def _begin(self, copy: _Copy) -> None:
        """Begin the transfer of a copy to its device, unless it has begun."""
        if copy.fetched is not None:
            return
        if copy.device.type != "cuda":
            copy.fetched = copy.on_host
            return
        stream = self._side_stream(copy.device)  # It has the copy to the host in its order.
        with torch.cuda.stream(stream):
            copy.fetched = copy.on_host.to(copy.device, non_blocking=True)
            copy.is_done = stream.record_event()

    def _side_stream(self, device: torch.device) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream
