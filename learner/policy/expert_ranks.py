"""Expert parallelism: each rank has some of the experts whole, and tokens travel to them.

FSDP alone gathers the weights of all experts for each pass. Here a rank sends a token to the ranks
of its chosen experts. They compute their experts and return one sum for each token and rank.
Routers, shared experts and all other layers remain with FSDP.

The weights of experts are tensors that are sharded along their first axis, as FSDP shards them.
Optimizers, checkpoints and versions therefore treat them alike. No gradient is scaled: the rank of
an expert computes the tokens of all ranks, so its gradient is the sum over them.

Source: GShard, arXiv:2006.16668; a token is sent to a rank once, as in arXiv:2412.19437.
"""

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from common.errors import ConfigError
from learner.policy.expert_weights import holds_experts
from learner.policy.lora import ADAPTER, adapted_layers

# Names of the arguments after the states: the numbers of the chosen experts, and their weights.
CHOICES = ("top_k_index", "router_indices")
GATES = ("top_k_weights", "routing_weights")


def check_expert_ranks(networks: Sequence[nn.Module], num_ranks: int) -> None:
    """Check that ranks can divide the experts of these networks, the policy's first.

    Raises: ConfigError: the policy has no experts, their number is no multiple of `num_ranks`, or
        they take other inputs than states, choices and gates.
    """
    key = f"learner.expert_ranks={num_ranks}"
    if not any(map(holds_experts, networks[0].modules())):
        name = type(networks[0]).__name__
        raise ConfigError(
            f"{key}: {name} has no experts in stacked weights. Use learner.expert_ranks=1."
        )
    for module in (each for network in networks for each in network.modules()):
        if not holds_experts(module):
            continue
        num_experts = _num_experts(module)
        name = type(module).__name__
        if problem := _problem(module, num_experts):
            raise ConfigError(f"{key}: {name} {problem}. Use learner.expert_ranks=1.")
        if num_experts % num_ranks:
            raise ConfigError(
                f"{key}: {name} has {num_experts} experts, which is no multiple of it. Use a"
                f" divisor of {num_experts}."
            )


def _num_experts(module: nn.Module) -> int:
    """Return the number of experts in the stacked weights of a module."""
    return next(each.shape[0] for each in module.parameters(recurse=False) if each.ndim == 3)


def _problem(module: nn.Module, num_experts: int) -> str:
    """Return why the experts of a module cannot be computed by several ranks, "" if they can."""
    names = list(inspect.signature(type(module).forward).parameters)[2:4]
    # The class decorator of transformers sets `has_gate`: one gate for each chosen expert.
    is_plain = len(names) == 2 and names[0] in CHOICES and names[1] in GATES
    if not is_plain or not hasattr(module, "has_gate"):
        return "takes other inputs than states, chosen experts and their gates"
    others = [n for n, each in module.named_parameters(recurse=False) if len(each) != num_experts]
    return f"has a weight for all experts together ({others[0]})" if others else ""


def expert_adapters(network: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, layer) of peft's layers of the weights of experts."""
    for name, layer in adapted_layers(network):
        if hasattr(layer, "parameter_name"):
            yield name, layer


@dataclass(frozen=True, slots=True)
class RowCounts:
    """The numbers of rows that this rank exchanges with each rank of its group."""

    sent: list[int]
    received: list[int]

    @property
    def back(self) -> "RowCounts":
        """The exchange in the other direction."""
        return RowCounts(self.received, self.sent)


class ExpertRanks:
    """The ranks that have all experts together, each its share; and the counts of their exchange.

    Example (2 ranks, 8 experts): rank 0 has the experts 0 to 3. Its token with the experts 1, 2
    and 6 stays for both of its own experts, and is sent once to rank 1. The token's output is the
    sum of what both ranks return.
    """

    def __init__(self, mesh: DeviceMesh, *, dtype: torch.dtype) -> None:
        """Use a mesh [expert] or [copy, expert] of all ranks. Each row has one copy of all experts.

        Args:
            dtype: dtype of the pass, in which weights and tokens are used and sent. With float32
                tokens are sent in their own dtype.
        """
        self.mesh = mesh
        self.dtype = dtype
        self._group = mesh.get_group(mesh.ndim - 1)
        self._copies = mesh.get_group(0) if mesh.ndim == 2 else None
        self.size = mesh.size(-1)
        self.index = mesh.get_local_rank(mesh.ndim - 1)
        self.num_sent_bytes = 0  # Bytes that this rank has sent to others.
        self.num_computed = 0  # Pairs of a token and an expert that this rank has computed.

    def take_counts(self) -> tuple[int, int]:
        """Return the sent bytes and the computed pairs since the last call."""
        counts = (self.num_sent_bytes, self.num_computed)
        self.num_sent_bytes = 0
        self.num_computed = 0
        return counts

    def divide(self, network: nn.Module, exact: Collection[str]) -> set[nn.Parameter]:
        """Divide the experts of a network in place; return their weights, which FSDP must ignore.

        Args:
            exact: names of the parameters that a pass in 16 bits uses in fp32.
        """
        divided: set[nn.Parameter] = set()
        adapters = [each for _, each in expert_adapters(network)]
        for place, module in list(network.named_modules()):
            if not holds_experts(module):
                continue
            num_experts = _num_experts(module)
            uncast = {
                name
                for name, _ in module.named_parameters(recurse=False)
                if self.dtype is torch.float32 or f"{place}.{name}" in exact
            }
            for name, weight in list(module.named_parameters(recurse=False)):
                setattr(module, name, self._share_of(weight))
                divided.add(getattr(module, name))
            # Linear layers of peft have their own weights; those of experts adapt a weight here.
            layers = [layer for layer in adapters if layer.get_base_layer() is module]
            for layer in layers:
                layer.forward = layer.base_layer.__call__  # The adapters are added below.
            experts = _DividedExperts(
                self, module, num_experts=num_experts, uncast=uncast, adapters=layers
            )
            # The numbers of rows differ in each call.
            module.forward = torch.compiler.disable(experts.forward)
        return divided

    def _share_of(self, weight: nn.Parameter) -> nn.Parameter:
        """Return this rank's experts of a weight [expert, ...], as a shard of it."""
        count = len(weight) // self.size
        rows = slice(self.index * count, (self.index + 1) * count)
        local = weight.detach()[rows].clone(memory_format=torch.contiguous_format)
        placements = [*[Replicate()] * (self.mesh.ndim - 1), Shard(0)]
        shape, stride = weight.shape, weight.stride()
        share = DTensor.from_local(
            local, self.mesh, placements, run_check=False, shape=shape, stride=stride
        )
        return nn.Parameter(share, requires_grad=weight.requires_grad)

    def local_weights(self, module: nn.Module) -> dict[str, Tensor]:
        """Return this rank's weights of a module as plain tensors."""
        names: list[str] = []
        locals_: list[Tensor] = []
        for name, weight in module.named_parameters(recurse=False):
            assert isinstance(weight, DTensor)
            names.append(name)
            locals_.append(weight.to_local())
        if self._copies is not None:
            locals_ = list(_Copied.apply(self._copies, *locals_))  # pyright: ignore
        return dict(zip(names, locals_, strict=True))

    def split_of(self, counts: Tensor) -> RowCounts:
        """Return the split of rows; `counts` [rank] are the numbers that this rank sends."""
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self._group)
        sent, received = torch.stack([counts, received]).tolist()  # One wait for the device.
        return RowCounts(sent, received)

    def exchange(self, rows: Tensor, split: RowCounts) -> Tensor:
        """Return the rows [row, ...] that all ranks send to this one, in the order of ranks."""
        made = rows.new_empty(sum(split.received), *rows.shape[1:])
        sent = rows.contiguous()
        dist.all_to_all_single(made, sent, split.received, split.sent, group=self._group)
        width = rows[:1].numel() * rows.element_size()
        self.num_sent_bytes += width * (sum(split.sent) - split.sent[self.index])
        return made

    def sent_dtype(self, states: Tensor) -> torch.dtype:
        """Return the dtype in which states are sent."""
        return states.dtype if self.dtype is torch.float32 else self.dtype


class _DividedExperts:
    """Computes the experts of one module together with the other ranks."""

    def __init__(
        self,
        ranks: ExpertRanks,
        module: nn.Module,
        *,
        num_experts: int,
        uncast: Collection[str],
        adapters: Sequence[Any],
    ) -> None:
        """Wrap the module's own forward pass.

        Args:
            uncast: names of the weights that are not cast to the dtype of the pass.
            adapters: peft's layers of these weights.
        """
        self._ranks = ranks
        self._module = module
        self._uncast = uncast
        self._adapters = adapters
        self._num_local = num_experts // ranks.size
        self._compute = module.forward

    def forward(self, states: Tensor, choices: Tensor, gates: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, in the shape of `states`.

        Args:
            states: [..., hidden].
            choices: [..., chosen] numbers of experts.
            gates: [..., chosen] weights of these experts.
        """
        ranks = self._ranks
        weights = self._weights()
        flat = states.reshape(-1, states.shape[-1]).to(ranks.sent_dtype(states))
        ids = choices.reshape(-1, choices.shape[-1])
        owners = ids // self._num_local  # [token, chosen] ranks
        is_sent = torch.zeros(len(ids), ranks.size, dtype=torch.bool, device=ids.device)
        is_sent.scatter_(1, owners, True)  # [token, rank]
        rank, row = is_sent.T.nonzero(as_tuple=True)  # Sorted by rank, then by token.
        split = ranks.split_of(is_sent.sum(0))
        is_there = owners[row] == rank[:, None]  # [sent, chosen]: the expert is of that rank.
        there = torch.where(is_there, ids[row] % self._num_local, -1).int()
        shares = torch.where(is_there, gates.reshape(ids.shape)[row], 0)

        rows, shares = _Sent.apply(flat.index_select(0, row), shares, ranks, split)  # pyright: ignore
        made = self._computed(weights, rows, ranks.exchange(there, split), shares)
        returned: Any = _Returned.apply(made, ranks, split)
        total = torch.zeros(flat.shape, dtype=torch.float32, device=flat.device)
        total = total.index_add(0, row, returned.float())
        return total.to(states.dtype).view(states.shape)

    def _weights(self) -> dict[str, Tensor]:
        """Return this rank's weights with their adapters, in the dtype of the pass."""
        weights = self._ranks.local_weights(self._module)
        first = self._ranks.index * self._num_local
        experts = slice(first, first + self._num_local)
        for layer in self._adapters:
            left, right, scale = layer.get_delta_factors(ADAPTER)
            weight = weights[layer.parameter_name]
            with torch.autocast(weight.device.type, enabled=False):  # As in peft's own layer.
                factors = (left[experts], right[experts])
                weights[layer.parameter_name] = torch.baddbmm(weight, *factors, alpha=scale)
        return {
            name: each if name in self._uncast else each.to(self._ranks.dtype)
            for name, each in weights.items()
        }

    def _computed(
        self, weights: Mapping[str, Tensor], rows: Tensor, ids: Tensor, gates: Tensor
    ) -> Tensor:
        """Return the sum of this rank's experts for each row [row, hidden].

        Args:
            ids: [row, chosen] numbers among this rank's experts; -1: an expert of another rank.
            gates: [row, chosen].
        """
        at, slot = (ids >= 0).nonzero(as_tuple=True)
        self._ranks.num_computed += len(at)
        inputs = rows.index_select(0, at)
        chosen = ids[at, slot].long()[:, None]
        shares = gates[at, slot][:, None]
        if not len(at):  # The kernel of grouped products has no gradient of no rows.
            inputs = inputs.new_zeros(1, inputs.shape[1]) + inputs.sum()
            chosen = chosen.new_zeros(1, 1)
            shares = shares.new_zeros(1, 1) + shares.sum()
        with _replaced(self._module, weights, self._num_local):
            made = self._compute(inputs, chosen, shares)[: len(at)]
        total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        return total.index_add(0, at, made.float()).to(rows.dtype)


@contextmanager
def _replaced(module: nn.Module, weights: Mapping[str, Tensor], num_experts: int) -> Iterator[None]:
    """Let a module have other weights and another number of experts within the context."""
    stored: Any = dict(module._parameters)
    whole = module.num_experts
    try:
        module._parameters.update(weights)  # pyright: ignore
        module.num_experts = num_experts  # pyright: ignore
        yield
    finally:
        module._parameters.update(stored)
        module.num_experts = whole


class _Sent(torch.autograd.Function):
    """Sends rows and their gates to other ranks. Their gradients return to the sender."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, gates: Tensor, ranks: ExpertRanks, split: RowCounts
    ) -> tuple[Tensor, Tensor]:
        ctx.ranks = ranks
        ctx.split = split
        return ranks.exchange(rows, split), ranks.exchange(gates, split)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        back = ctx.split.back
        made = [
            ctx.ranks.exchange(each, back) if is_needed else None
            for each, is_needed in zip(gradients, ctx.needs_input_grad, strict=False)
        ]
        return *made, None, None


class _Returned(torch.autograd.Function):
    """Returns computed rows to the ranks of their tokens."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: ExpertRanks, split: RowCounts) -> Tensor:
        ctx.ranks = ranks
        ctx.split = split
        return ranks.exchange(rows, split.back)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.ranks.exchange(gradient, ctx.split), None, None


class _Copied(torch.autograd.Function):
    """The weights of a copy of the experts. Their gradients are summed over all copies."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(each.view_as(each) for each in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        summed: list[Tensor | None] = []
        for each, is_needed in zip(gradients, ctx.needs_input_grad[1:], strict=True):
            total = each.clone(memory_format=torch.contiguous_format) if is_needed else None
            if total is not None:
                dist.all_reduce(total, group=ctx.group)
            summed.append(total)
        return None, *summed
