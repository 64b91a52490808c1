"""Removes random numbers from forward passes: the trained policy is the function that sampled.

Dropout, layer dropout and router noise all depend on `Module.training`, so every module is in eval
mode. Gradient checkpointing requires training mode in the layers that it recomputes. Their dropout
rates are zero since the network was built, so these passes use no random numbers either.
"""

import re
from typing import Any

from torch import nn
from transformers import PretrainedConfig

# Names of dropout rates in transformers' configurations, such as attn_pdrop and drop_path_rate.
_RATE = re.compile(r"dropout|pdrop|layerdrop|drop_prob|drop_path|drop_rate")


def zero_dropout_rates(config: PretrainedConfig) -> None:
    """Set every dropout rate of a configuration and of its sections to zero, whatever its name.

    Call this function before the network is built: layers copy the rates to their own attributes.
    """
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            zero_dropout_rates(value)
        elif _RATE.search(name) and isinstance(value, float | int) and not isinstance(value, bool):
            setattr(config, name, type(value)(0))


def make_deterministic(network: nn.Module) -> None:
    """Put a network in eval mode, and set its dropout rates to zero."""
    network.eval()
    for module in network.modules():
        _zero_rates_of(module)


def _zero_rates_of(module: Any) -> None:
    """Set the dropout rates that a module stores as numbers to zero."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        module.p = 0.0
    for name, value in list(vars(module).items()):
        if _RATE.search(name) and isinstance(value, float):
            setattr(module, name, 0.0)
