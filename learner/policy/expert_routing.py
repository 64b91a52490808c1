"""Routing replay: a training pass uses the experts that the engine chose while it sampled.

The engine rounds in another way than the learner, and its weights may be older. A router near a tie
then chooses other experts, and the log-probability of the token jumps. With recorded choices the
routers still compute the gates: from their own logits, at the recorded experts.

Routers are found by their computation, not by their names: each chooses experts by one `topk`. A
forward pass in a block of experts runs with a function mode that replaces the result of this call.
Source: arXiv:2510.11370 and arXiv:2510.23027 (routing replay).
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from common.errors import ConfigError
from common.segments import RoutingShape
from learner.batch.batching import TokenBatch
from learner.batch.packing import Routes
from learner.policy.composite import text_config
from learner.policy.expert_weights import holds_experts
from learner.policy.kernels.head import trunk_of

KEY = "algorithm.routing_replay=true"
_TOPK = (torch.topk, torch.Tensor.topk)
_replays: "WeakKeyDictionary[nn.Module, Replay]" = WeakKeyDictionary()


@dataclass(slots=True)
class Block:
    """The part of a layer that chooses experts and computes them."""

    layer: int  # 0-based number of the layer in the network.
    module: nn.Module
    num_experts: int
    num_chosen: int = 0  # 0: not measured yet.
    num_calls: int = 0  # Calls of topk over all experts in a pass; the last one chooses.


class _Choosing(TorchFunctionMode):
    """Counts the calls of topk over all experts of a block, and replaces the last one's result."""

    def __init__(self, block: Block, ids: Tensor | None, mask: Tensor | None) -> None:
        """Set the recorded ids [position, chosen] and their mask [position]; None: only count."""
        super().__init__()
        self._block = block
        self._ids = ids
        self._mask = mask
        self.sizes: list[int] = []  # Number of chosen entries of each call.

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _TOPK or args[0].shape[-1] != self._block.num_experts:
            return result
        scores: Tensor = args[0]
        self.sizes.append(result.indices.shape[-1])
        if self._ids is None or self._mask is None or len(self.sizes) != self._block.num_calls:
            return result
        shape = result.indices.shape
        drawn = result.indices.reshape(-1, shape[-1])
        chosen = torch.where(self._mask[:, None], self._ids.long(), drawn).view(shape)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


class Replay:
    """The blocks of experts of one network, and the routes of its next pass.

    Example: replay = install(body); replay.measure(run one pass); replay.routes = routes; a pass
    uses them. The backward pass of gradient checkpointing uses them again, so they stay set until
    the next pass.
    """

    def __init__(self, body: nn.Module) -> None:
        """Add hooks to the blocks of experts. Raises: ConfigError: there are none."""
        self.routes: Routes | None = None
        self.blocks = list(_blocks_of(body))
        self.name = type(body).__name__
        config: Any = body.config
        self._num_layers = int(getattr(config, "num_hidden_layers", 0))
        self._is_measuring = False
        self._entered: list[_Choosing] = []
        if not self.blocks:
            raise ConfigError(
                f"{KEY}: {self.name} has no experts. Set algorithm.routing_replay=false."
            )
        for block in self.blocks:
            block.module.register_forward_pre_hook(self._enter_with(block))
            block.module.register_forward_hook(self._leave_with(block), always_call=True)

    @property
    def is_measured(self) -> bool:
        """Whether the calls of topk are known; before that no choice is replaced."""
        return all(block.num_calls for block in self.blocks)

    @property
    def shape(self) -> RoutingShape:
        """The sizes that records must have, once they are measured."""
        first = self.blocks[0]
        return RoutingShape(self._num_layers, first.num_chosen, first.num_experts)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the calls of topk in one pass within the context.

        Raises: ConfigError: a block chooses its experts in another way.
        """
        for block in self.blocks:
            block.num_chosen = 0
            block.num_calls = 0
        self._is_measuring = True
        try:
            yield
        finally:
            self._is_measuring = False
        sizes = {block.num_chosen for block in self.blocks}
        if 0 in sizes or len(sizes) > 1 or len({b.layer for b in self.blocks}) < len(self.blocks):
            raise ConfigError(
                f"{KEY}: the routers of {self.name} do not choose their experts by one topk in each"
                " layer, so recorded experts cannot replace their choice. Set"
                " algorithm.routing_replay=false."
            )

    def _enter_with(self, block: Block) -> Any:
        """Return the hook that begins a block's replay, or its measurement."""

        def enter(module: nn.Module, args: Any) -> None:
            routes = self.routes
            ids = None if routes is None else routes.ids[:, block.layer]
            if ids is None and not self._is_measuring:
                return
            mode = _Choosing(block, ids, None if routes is None else routes.mask)
            mode.__enter__()
            self._entered.append(mode)

        return enter

    def _leave_with(self, block: Block) -> Any:
        """Return the hook that ends a block's replay, and keeps the result of a measurement."""

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if not self._entered or self._entered[-1]._block is not block:
                return
            mode = self._entered.pop()
            mode.__exit__(None, None, None)
            if self._is_measuring and mode.sizes:
                block.num_chosen = mode.sizes[-1]
                block.num_calls = len(mode.sizes)

        return leave


def install(body: nn.Module) -> Replay:
    """Return the replay of a network without its head. Raises: ConfigError: it has no experts."""
    if body not in _replays:
        _replays[body] = Replay(body)
    return _replays[body]


def set_routes(body: nn.Module, routes: Routes | None) -> None:
    """Set the routes of the next pass of a network; without effect if it replays none."""
    replay = _replays.get(body)
    if replay is not None:
        replay.routes = routes


def _blocks_of(body: nn.Module) -> Iterator[Block]:
    """Yield the blocks of experts of a network, in order."""
    modules = dict(body.named_modules())
    seen: set[str] = set()
    for name, module in modules.items():
        number = re.search(r"\d+", name)
        if not holds_experts(module) or number is None:
            continue
        weights = module.parameters(recurse=False)
        num_experts = next(each.shape[0] for each in weights if each.ndim == 3)
        parent = name.rpartition(".")[0]
        while type(modules[parent]).__module__.startswith("peft."):
            parent = parent.rpartition(".")[0]
        if parent not in seen:
            seen.add(parent)
            yield Block(int(number[0]), modules[parent], num_experts)


FUNCTION = "load_balancing_loss_func"
# Names of the number of chosen experts in configurations.
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k")

BalanceLoss = Callable[[tuple[Tensor, ...], TokenBatch], Tensor]


def balance_loss_of(model: PreTrainedModel) -> BalanceLoss:
    """Return a function of (logits [batch * seq, expert] of each layer, block) -> scalar loss.

    Padding and filling do not count. The loss is at least the number of chosen experts, which it
    has if all experts get equally many tokens.

    Raises: ConfigError: transformers has no such loss for this family.
    """
    compute: Any = getattr(sys.modules[type(model).__module__], FUNCTION, None)
    config = text_config(model.config)
    chosen = next((getattr(config, each) for each in CHOSEN if hasattr(config, each)), None)
    recorded = getattr(trunk_of(model), "_can_record_outputs", None) or {}
    if compute is None or chosen is None or "router_logits" not in recorded:
        raise ConfigError(
            f"algorithm.router_aux_coef: transformers has no load-balancing loss for"
            f" {type(model).__name__}. Set algorithm.router_aux_coef=0."
        )

    def balance_loss(logits: tuple[Tensor, ...], tokens: TokenBatch) -> Tensor:
        assert tokens.is_real is not None
        mask = tokens.is_real.view(tokens.token_ids.shape)
        return compute(logits, logits[0].shape[-1], chosen, mask)

    return balance_loss
