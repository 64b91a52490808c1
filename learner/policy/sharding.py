"""Sharded networks: every rank keeps a shard of each weight, its gradient and its moments.

Source: FSDP2, `torch.distributed.fsdp.fully_shard`.
"""

from collections.abc import Collection
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from learner.policy.expert_ranks import ExpertRanks, expert_adapters
from learner.policy.loading import give_memory
from learner.policy.precision import exact_names

EXACT = MixedPrecisionPolicy()


class ShardedNetwork(nn.Module):
    """A network and its tensors in fp32, which form one unit of FSDP around all others."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.network(*args, **kwargs)


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the compute device of this rank of a mesh."""
    is_cuda = mesh.device_type == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")


def shard(
    network: nn.Module,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype,
    is_offloaded: bool = False,
    experts: ExpertRanks | None = None,
) -> nn.Module:
    """Shard a network in place, block by block; return the module to call in its place.

    Gradients are summed over the ranks, in fp32. Weights without memory get memory for this rank's
    shard only. The optimizer must be made after this call.

    Args:
        dtype: matrices are gathered in this dtype of the pass. Vectors and other tensors that one
            rank computes in fp32 stay in fp32, see `policy/precision.py`.
        is_offloaded: this rank's shards, gradients and moments are in host memory.
        experts: ranks that each keep a share of the experts whole; None: experts are gathered.

    The layers outside the blocks (embedding, last norm, head) form one more unit. It is whole from
    the network's forward pass to the end of its backward pass, so that the head's weight can be
    used chunk by chunk. The tensors in fp32 are whole for the same time.
    """
    device = torch.device("cpu") if is_offloaded else device_of(mesh)
    memory = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    offload = memory if is_offloaded else OffloadPolicy()

    def make_unit(
        module: nn.Module,
        policy: MixedPrecisionPolicy,
        ignored: Collection[nn.Parameter],
        *,
        reshard_after_forward: bool | None = None,
    ) -> None:
        """Shard the weights of a module that no inner unit has, without the ignored ones."""
        made = fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=policy,
            offload_policy=offload,
            ignored_params={*ignored, *divided},
        )
        sharded = cast(FSDPModule, made)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo supports no other sum.

    outer = network
    is_mixed = dtype is not torch.float32
    names = _exact_parameters(network) if is_mixed else set[str]()
    if is_mixed and experts is not None:
        # Factors are added to the stored weights of experts, in the dtype of these.
        names |= {
            f"{place}.{name}"
            for place, layer in expert_adapters(network)
            for name, _ in layer.named_parameters()
            if name.startswith("lora_")
        }
    divided = set[nn.Parameter]() if experts is None else experts.divide(network, names)
    names = {name for name in names if network.get_parameter(name) not in divided}
    if is_mixed:
        others = [each for name, each in network.named_parameters() if name not in names]
        outer = ShardedNetwork(network)
        # The outer unit comes first: a unit leaves out the units inside it.
        make_unit(outer, EXACT, others)
    exact = [network.get_parameter(name) for name in names]
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    policy = mixed if is_mixed else EXACT
    for block in reversed(_blocks(network)):  # Inner blocks come first.
        make_unit(block, policy, exact)
    make_unit(network, policy, exact, reshard_after_forward=False)
    give_memory(outer, device)
    return outer


def _blocks(network: nn.Module) -> list[nn.Module]:
    """Return the blocks of all networks in a module, outer ones first."""
    modules = list(network.modules())
    names = {name for each in modules for name in getattr(each, "_no_split_modules", None) or ()}
    return [each for each in modules if type(each).__name__ in names]


def _exact_parameters(network: nn.Module) -> set[str]:
    """Return the names of parameters that a pass in 16 bits uses in fp32.

    Adapters are used in products only, so they are computed in 16 bits.
    """
    weights = dict(network.named_parameters())
    shapes = {name: each.shape for name, each in weights.items() if ".lora_" not in name}
    return exact_names(network, shapes)


def reshard(network: nn.Module) -> None:
    """Free the whole weights after a pass without gradient: the next step would not update them.

    Args:
        network: result of `shard`, or a network that is not sharded.
    """
    inner = network.network if isinstance(network, ShardedNetwork) else None
    for module in (network, inner):
        if isinstance(module, FSDPModule):
            module.reshard()
