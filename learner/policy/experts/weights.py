"""The fused weights of experts in a network."""

from torch import nn


def expert_weights(model: nn.Module) -> list[str]:
    """Return the names of the weights of all experts in each layer, [] without experts.

    Example: ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"].
    """
    found: set[str] = set()
    for name, module in model.named_modules():
        if holds_experts(module):
            place = ".".join(name.split(".")[-2:])
            weights = module.named_parameters(recurse=False)
            found |= {f"{place}.{key}" for key, each in weights if each.ndim == 3}
    return sorted(found)


def holds_experts(module: nn.Module) -> bool:
    """Return whether a module holds the fused weights of several experts."""
    is_convolution = isinstance(module, nn.modules.conv._ConvNd)
    weights = module.parameters(recurse=False)
    is_fused = any(each.ndim == 3 for each in weights) and not is_convolution
    return is_fused and hasattr(module, "num_experts")
