"""Compiled kernels for the norms and gates between a network's matrix products.

Plain torch writes the result of each operation to memory and reads it back. The matrix products
keep their own libraries: on a CPU, compiling whole layers gains less. Torch caches the kernels on
disk (`TORCHINDUCTOR_CACHE_DIR`), so only the first run on a machine compiles them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from common.errors import ConfigError
from common.host.machine import check_compiler

PARTS = ("RMSNorm", "MLP")  # Class name suffixes of these parts, in the families of Llama and Qwen.
MAX_VARIANTS = 64  # Limit of kernels for a part: by shapes, types, with and without gradient.

_compiled: dict[type[nn.Module], Any] = {}  # All modules of a class share their kernels.


def compile_parts(networks: Sequence[nn.Module], *, fit: str) -> int:
    """Compile the networks' norms and feed-forward parts; return the number of parts.

    Kernels are compiled at their first use. Hooks, weights and copies of the parts do not change.

    Args:
        fit: name of the first input sizes, to which kernels are fitted. Cached kernels with another
            name are not used.

    Raises: ConfigError: the machine has no compiler for them, or there is no such part.
    """
    check_compiler("learner.compile=true")
    parts = check_parts(networks)
    torch.compiler.config.cache_key_tag = fit
    torch._dynamo.config.recompile_limit = MAX_VARIANTS  # pyright: ignore[reportAttributeAccessIssue]
    for part in parts:
        kind = type(part)
        if kind not in _compiled:
            _compiled[kind] = torch.compile(kind.forward, dynamic=True)
        # A bound method, not the function: copies of the part bind their own.
        part.forward = MethodType(_compiled[kind], part)
    return len(parts)


def check_parts(networks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the parts of networks that can be compiled. Raises: ConfigError: there are none."""
    parts = [
        part
        for network in networks
        for part in network.modules()
        if type(part).__name__.endswith(PARTS)
    ]
    if not parts:
        names = ", ".join(type(each).__name__ for each in networks)
        raise ConfigError(
            f"learner.compile=true: {names} has no {' and no '.join(PARTS)}, so there is"
            " nothing to compile. Use learner.compile=false."
        )
    return parts


@contextmanager
def naming_compiler() -> Iterator[None]:
    """Convert a compiler failure to a readable error. Raises: ConfigError."""
    try:
        yield
    except TorchDynamoException as error:
        reason, _, _ = str(error).partition("Set TORCHDYNAMO_VERBOSE")
        raise ConfigError(
            "learner.compile=true: the kernels cannot be compiled. Use learner.compile=false, or"
            " check TORCHINDUCTOR_CACHE_DIR, the folder of the kernels. The compiler reports:"
            f" {' '.join(reason[-400:].split())}"
        ) from error
