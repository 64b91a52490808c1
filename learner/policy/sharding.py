"""Sharded networks: every rank keeps a part of each weight, of its gradient and of its moments.

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
    """Return where this rank of a mesh computes."""
    is_cuda = mesh.device_type == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")


def shard(
    network: nn.Module, mesh: DeviceMesh, *, is_bf16: bool, is_offloaded: bool = False
) -> None:
    """Shard a network in place, block by block. Gradients are summed over the ranks, in fp32.

    Weights that had no memory get it now, for this rank's part alone. Call it before the optimizer
    is made.

    Args:
        is_offloaded: this rank's parts, and with them gradients and moments, lie in host memory.

    What lies outside the blocks (embedding, last norm, head) is one more unit: whole from the
    network's forward to the end of its backward pass, so that the head's weight may be used a chunk
    at a time.
    """
    exact = MixedPrecisionPolicy()
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    modules = list(network.modules())
    names = {name for each in modules for name in getattr(each, "_no_split_modules", None) or ()}
    heads = [each.head for each in modules if isinstance(each, Critic)]  # compute in fp32
    blocks = [each for each in modules if type(each).__name__ in names]
    kept = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    for module in [*heads, *blocks, network]:
        policy = mixed if is_bf16 and module not in heads else exact
        made = fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=kept if is_offloaded else OffloadPolicy(),
        )
        sharded = cast(FSDPModule, made)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no other way to sum
    give_memory(network, torch.device("cpu") if is_offloaded else device_of(mesh))


def reshard(network: nn.Module) -> None:
    """Let go of whole weights after a pass without gradient: the next step would not renew them."""
    if isinstance(network, FSDPModule):
        network.reshard()
