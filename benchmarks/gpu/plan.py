"""The checks of the suite `gpu`, in order of how much their result is worth, with time limits.

This module imports no library of the checks. The process that runs the checks imports them.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

from common.errors import ConfigError

_TRAINING = "benchmarks.learner.checks.training"
_WEIGHTS = "benchmarks.learner.checks.weights"
_AGREEMENT = "benchmarks.learner.checks.agreement"
_DEVICE = "benchmarks.gpu.checks"
_ENGINE = "benchmarks.gpu.engine_checks"
_EXPERTS = "benchmarks.gpu.expert_checks"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCheck:
    """One check: the function that measures, and its times on one H200, or an estimate."""

    name: str
    function: str  # The format is module:name. The function takes a DeviceBench.
    usual_s: float  # Expected duration; a check that does not fit into the budget is left out.
    limit_s: float  # The check is ended after this time.
    needs: tuple[str, ...] = ()  # Packages without which the check is left out.
    options: Mapping[str, Any] = field(default_factory=lambda: {})  # More arguments.

    def load(self) -> Callable[..., None]:
        """Return the function with its options. Raises: ImportError: a library is missing."""
        module, _, name = self.function.partition(":")
        return partial(getattr(import_module(module), name), **self.options)


CHECKS = (
    GpuCheck(
        name="packed-4b",
        function=f"{_TRAINING}:check_packed",
        options={"number": 0},
        usual_s=20,
        limit_s=150,
    ),
    GpuCheck(name="flash", function=f"{_DEVICE}:check_flash_calls", usual_s=5, limit_s=60),
    GpuCheck(name="layers", function=f"{_DEVICE}:check_packed_layers", usual_s=10, limit_s=120),
    GpuCheck(
        name="prefix-trees", function=f"{_DEVICE}:check_prefix_trees", usual_s=25, limit_s=150
    ),
    GpuCheck(name="step", function=f"{_TRAINING}:check_step", usual_s=25, limit_s=120),
    GpuCheck(name="fp16", function=f"{_TRAINING}:check_fp16", usual_s=5, limit_s=90),
    GpuCheck(name="growth", function=f"{_DEVICE}:check_growth", usual_s=60, limit_s=180),
    GpuCheck(
        name="engine",
        function=f"{_WEIGHTS}:check_engine",
        usual_s=160,
        limit_s=300,
        needs=("vllm",),
    ),
    GpuCheck(
        name="packed-7b-lora",
        function=f"{_TRAINING}:check_packed",
        options={"number": 1},
        usual_s=20,
        limit_s=150,
    ),
    GpuCheck(
        name="packed-0.6b",
        function=f"{_TRAINING}:check_packed",
        options={"number": 2},
        usual_s=10,
        limit_s=90,
    ),
    GpuCheck(
        name="engine-lora",
        function=f"{_WEIGHTS}:check_engine",
        options={"is_lora": True},
        usual_s=130,
        limit_s=300,
        needs=("vllm",),
    ),
    GpuCheck(
        name="graphs", function=f"{_ENGINE}:check_graphs", usual_s=90, limit_s=300, needs=("vllm",)
    ),
    GpuCheck(
        name="sleep", function=f"{_ENGINE}:check_sleep", usual_s=45, limit_s=180, needs=("vllm",)
    ),
    GpuCheck(name="gloo", function=f"{_WEIGHTS}:check_gloo", usual_s=10, limit_s=90),
    GpuCheck(name="weights", function=f"{_WEIGHTS}:check_transfers", usual_s=10, limit_s=120),
    GpuCheck(name="shards", function=f"{_TRAINING}:check_shards", usual_s=105, limit_s=240),
    GpuCheck(name="experts", function=f"{_EXPERTS}:check_experts", usual_s=50, limit_s=150),
    GpuCheck(name="adapters", function=f"{_TRAINING}:check_adapters", usual_s=5, limit_s=90),
    GpuCheck(name="compiled", function=f"{_TRAINING}:check_compiled", usual_s=60, limit_s=240),
    GpuCheck(name="canary", function=f"{_AGREEMENT}:check_canary", usual_s=5, limit_s=60),
    GpuCheck(name="memory", function=f"{_TRAINING}:check_memory", usual_s=5, limit_s=60),
    GpuCheck(name="long-row", function=f"{_TRAINING}:check_long_row", usual_s=25, limit_s=120),
    GpuCheck(
        name="adapters-sent", function=f"{_WEIGHTS}:check_adapter_transfer", usual_s=10, limit_s=90
    ),
    GpuCheck(name="repetition", function=f"{_AGREEMENT}:check_repetition", usual_s=5, limit_s=90),
    GpuCheck(name="chunks", function=f"{_AGREEMENT}:check_chunks", usual_s=5, limit_s=90),
)


def choose(only: str | None) -> tuple[GpuCheck, ...]:
    """Return the checks of `--only`, names with commas between them; all checks for None.

    Raises: ConfigError: there is no such check.
    """
    if only is None:
        return CHECKS
    wanted = [name.strip() for name in only.split(",")]
    names = [check.name for check in CHECKS]
    for name in wanted:
        if name not in names:
            raise ConfigError(f"--only={name}: one of {', '.join(names)}")
    return tuple(check for check in CHECKS if check.name in wanted)


def why_left_out(check: GpuCheck, *, left_s: float) -> str:
    """Return why a check cannot run: a missing package, or too little time; "" if it can.

    Args:
        left_s: seconds until the end of the budget; infinite without one.
    """
    missing = [name for name in check.needs if importlib.util.find_spec(name) is None]
    if missing:
        return f"left out: {', '.join(missing)} is not installed"
    if check.usual_s > left_s:
        return f"left out: it takes about {check.usual_s:g} s, and {max(0, left_s):.0f} s are left"
    return ""
