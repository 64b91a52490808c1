"""Extensions of the hub: `extensions.yaml` lists their functions."""

import importlib.util
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from envhub.tables import read_table


@cache
def load_extensions(kind: str) -> tuple[Callable[..., Any], ...]:
    """Return the functions that are registered under `kind`, in the order of the table."""
    names: list[str] = read_table(__file__, "extensions.yaml")[kind]
    pairs = (name.split(":") for name in names)
    return tuple(
        getattr(import_module(module), function)
        for module, function in pairs
        if importlib.util.find_spec(module.rpartition(".")[0]) is not None
    )
