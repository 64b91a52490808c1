"""Compiled kernels of what lies between a network's matrix products: norms and gates.

Plain torch writes each of their steps to memory and reads it back. The products stay with their own
libraries: compiled whole layers gain less on a CPU. Torch keeps the kernels on disk
(`TORCHINDUCTOR_CACHE_DIR`), so only the first run on a machine makes them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from common.checks.machine import check_compiler
from common.errors import ConfigError

PARTS = ("RMSNorm", "MLP")  # how the names of their classes end, in the families of Llama and Qwen
MAX_VARIANTS = 64  # of a part: by shapes, types, with and without gradient

_compiled: dict[type[nn.Module], Any] = {}  # all modules of a class share their kernels


def compile_parts(networks: Sequence[nn.Module], *, fit: str) -> int:
    """Let the networks' norms and feed-forward parts compute by compiled kernels, which are made
    when they are first needed; return how many parts there are.

    Their hooks and weights, and copies of them, are as before.

    Args:
        fit: names the sizes that come first, to which kernels are fitted: those on disk of another
            name are not taken.

    Raises: ConfigError: this machine lacks what compiles them, or there are none.
    """
    check_compiler("learner.compile=true")
    found = check_parts(networks)
    torch.compiler.config.cache_key_tag = fit
    torch._dynamo.config.recompile_limit = MAX_VARIANTS  # pyright: ignore[reportAttributeAccessIssue]
    for part in found:
        kind = type(part)
        if kind not in _compiled:
            _compiled[kind] = torch.compile(kind.forward, dynamic=True)
        part.forward = MethodType(_compiled[kind], part)  # not the function: copies bind their own
    return len(found)


def check_parts(networks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the parts of networks that can be compiled. Raises: ConfigError: there are none."""
    found = [part for network in networks for part in network.modules() if _is_part(part)]
    if not found:
        names = ", ".join(type(each).__name__ for each in networks)
        raise ConfigError(
            f"learner.compile=true: {names} has no {' and no '.join(PARTS)}, so that there is"
            " nothing to compile; give learner.compile=false"
        )
    return found


@contextmanager
def naming_compiler() -> Iterator[None]:
    """Say in words that kernels cannot be made. Raises: ConfigError."""
    try:
        yield
    except TorchDynamoException as error:
        said, _, _ = str(error).partition("Set TORCHDYNAMO_VERBOSE")
        raise ConfigError(
            f"learner.compile=true: no kernels can be made (TORCHINDUCTOR_CACHE_DIR is where they"
            f" are kept; learner.compile=false does without): {' '.join(said[-400:].split())}"
        ) from error


def _is_part(module: nn.Module) -> bool:
    return type(module).__name__.endswith(PARTS)
