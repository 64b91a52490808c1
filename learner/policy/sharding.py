"""Sharded networks: every rank keeps a shard of each weight, its gradient and its moments.

Source: FSDP2, `torch.distributed.fsdp.fully_shard`.
"""

from typing import cast

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

from learner.policy.critic import Critic
from learner.policy.loading import give_memory


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the compute device of this rank of a mesh."""
    is_cuda = mesh.device_type == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")


def shard(
    network: nn.Module, mesh: DeviceMesh, *, is_bf16: bool, is_offloaded: bool = False
) -> None:
    """Shard a network in place, block by block. Gradients are summed over the ranks, in fp32.

    Weights without memory get memory for this rank's shard only. The optimizer must be made after
    this call.

    Args:
        is_offloaded: this rank's shards, gradients and moments are in host memory.

    The layers outside the blocks (embedding, last norm, head) form one more unit. It is whole from
    the network's forward pass to the end of its backward pass, so that the head's weight can be
    used chunk by chunk.
    """
    exact = MixedPrecisionPolicy()
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    modules = list(network.modules())
    names = {name for each in modules for name in getattr(each, "_no_split_modules", None) or ()}
    heads = [each.head for each in modules if isinstance(each, Critic)]  # Heads compute in fp32.
    blocks = [each for each in modules if type(each).__name__ in names]
    kept = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    for module in [*heads, *reversed(blocks), network]:  # Inner blocks come first.
        policy = mixed if is_bf16 and module not in heads else exact
        made = fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=kept if is_offloaded else OffloadPolicy(),
        )
        sharded = cast(FSDPModule, made)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo supports no other sum.
    give_memory(network, torch.device("cpu") if is_offloaded else device_of(mesh))


def reshard(network: nn.Module) -> None:
    """Free the whole weights after a pass without gradient: the next step would not update them."""
    if isinstance(network, FSDPModule):
        network.reshard()
