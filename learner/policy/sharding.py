"""Sharded networks: every rank keeps a part of each weight, of its gradient and of its moments.

Source: FSDP2, `torch.distributed.fsdp.fully_shard`.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

from learner.policy.critic import Critic
from learner.policy.lora import trained_state
from learner.policy.model import whole


def shard(network: nn.Module, mesh: DeviceMesh, *, is_bf16: bool) -> None:
    """Shard a network in place, block by block. Gradients are summed over the ranks, in fp32.

    Call it before the optimizer is made. What lies outside the blocks (embedding, last norm, head)
    is one more unit: whole from the network's forward to the end of its backward pass, so that the
    head's weight may be used a chunk at a time.
    """
    exact = MixedPrecisionPolicy()
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    modules = list(network.modules())
    names = {name for each in modules for name in getattr(each, "_no_split_modules", None) or ()}
    heads = [each.head for each in modules if isinstance(each, Critic)]  # compute in fp32
    blocks = [each for each in modules if type(each).__name__ in names]
    for module in [*heads, *blocks, network]:
        policy = mixed if is_bf16 and module not in heads else exact
        sharded = cast(FSDPModule, fully_shard(module, mesh=mesh, mp_policy=policy))
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no other way to sum


def reshard(network: nn.Module) -> None:
    """Let go of whole weights after a pass without gradient: the next step would not renew them."""
    if isinstance(network, FSDPModule):
        network.reshard()


def whole_state(state: dict[str, Any], *, is_kept: bool) -> dict[str, Any]:
    """Return a state without parts or gradients; what was one tensor in it stays one.

    Tensors of parts are put together one by one, on the host, and let go unless `is_kept`.
    """
    found: dict[int, Tensor] = {}

    def gather(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in found:
            full = whole(leaf.detach())
            if isinstance(leaf, DTensor):
                full = full.cpu() if is_kept else full.new_empty(0)
            found[id(leaf)] = full
        return found[id(leaf)]

    return tree_map(gather, state)


def load_module(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Set what is trained of a module, perhaps a sharded one, to whole tensors.

    Raises: ValueError: it has other names or shapes.
    """
    own = {name: tensor.detach() for name, tensor in trained_state(module).items()}
    if own.keys() != state.keys() or any(own[n].shape != state[n].shape for n in own):
        raise ValueError("the saved weights are those of another model")
    for name, tensor in own.items():
        tensor.copy_(_alike(tensor, state[name]))


def shard_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Cut the whole tensors of a restored optimizer as its parameters are cut."""
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                values[name] = _alike(parameter, value)


def _alike(pattern: Tensor, tensor: Tensor) -> Tensor:
    """Return a whole tensor, which every rank has, cut and placed like another one."""
    if not isinstance(pattern, DTensor):
        return tensor
    placed = tensor.to(pattern.device)
    return distribute_tensor(placed, pattern.device_mesh, pattern.placements, src_data_rank=None)
