"""What the tests of a running hub share: which environments, how much, and its processes."""

import importlib.util
import os
from collections.abc import Coroutine
from typing import Any, TypeVar

import psutil
import uvloop

from benchmarks.envhub.hub import ServiceProcess
from envhub.catalogue.registry import LOADERS, missing_requirements

OUTSIDE = "tests/end_to_end/outside_env.py:make_spec"

T = TypeVar("T")


def amount(variable: str, *, default: int) -> int:
    """Return how much of something to do: an environment variable, for the whole of it."""
    return int(os.environ.get(variable, default))


def offline_envs() -> list[str]:
    """Return the environments that this machine can serve."""
    present = [name for name, module in LOADERS.items() if _is_there(module)]
    return [name for name in present if not missing_requirements([name])]


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def worker_pids(hub: ServiceProcess) -> set[int]:
    """Return the hub's worker processes."""
    children = psutil.Process(hub.process.pid).children()
    return {each.pid for each in children if "envhub.hosting.worker_main" in each.cmdline()}


def run(work: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns, in a loop of its own."""
    return uvloop.run(work)
