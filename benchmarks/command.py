"""The command `bench`: run one suite, print its table, and write the figures as JSON."""

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

from benchmarks.suite import Suite
from common.errors import ConfigError
from common.log import configure_logging
from common.repository import ROOT
from tools.cli.command_line import STUDIES, ParsedCommand, version_text

Measure = Callable[[Suite], None]  # It runs the checks of a suite.
CONFORMANCE = "conformance"
LAYOUTS = "conformance-layouts"
SAVED = "saved-states"
PRETRAINED = "pretrained"
ACTOR_PRETRAINED = "actor-pretrained"
WITH_OVERRIDES = (PRETRAINED, ACTOR_PRETRAINED)  # Suites of a pretrained model accept key=value.
SUITES = {  # Name on the command line: module and function.
    "learner": "learner.suite:run_suite",
    PRETRAINED: "learner.pretrained:run_suite",
    "prefix-trees": "learner.prefix_trees:run_suite",
    "partial-episodes": "learner.partial_episodes:run_suite",
    "virtual-horizon": "learner.virtual_horizon:run_suite",
    "weights": "weights.suite:run_suite",
    "delta": "weights.delta:run_suite",
    "actor": "actor.suite:run_suite",
    ACTOR_PRETRAINED: "actor.suite:run_pretrained",
    "scheduler": "scheduler:run_suite",
    "transport": "transport:run_suite",
    "engines": "engines.suite:run_suite",
    "envhub": "envhub.suite:run_suite",
    SAVED: "envhub.saved:run_suite",
    "long-episodes": "long_episodes:run_suite",
    "end2end": "end_to_end:run_suite",
    "tail": "end_to_end:run_tail",
    "chaos": "chaos.suite:run_suite",
    "chaos-delta": "chaos.suite:run_delta",
    "chaos-adapters": "chaos.suite:run_adapters",
    "chaos-short": "chaos.suite:run_short",
    "hostile": "hostile.suite:run_suite",
    CONFORMANCE: "conformance.suite:run_suite",
    LAYOUTS: "conformance.suite:run_layouts",
}
GPU_SUITES = {"gpu": "gpu", "gpu-small": "small"}  # Suite of the device checks: their sizes.
WITH_ONLY = (*GPU_SUITES, CONFORMANCE, LAYOUTS, SAVED)  # Suites that accept --only.


def bench(request: ParsedCommand) -> int:
    """Run the suite of a request, write its figures, and return 0 if every bound holds.

    Raises: ConfigError: the suite, its overrides or the path of the figures are wrong.
    """
    path = Path(request.json or ROOT / "runs" / "bench" / f"{request.suite}.json")
    measure = _find_suite(request, path)
    _check_writable(path)
    configure_logging("bench", "INFO")
    suite = Suite(out=sys.stdout)
    measure(suite)
    if request.is_dry:
        return 0
    code = suite.finish()
    suite.save(path, name=request.suite or "", product=version_text())
    print(f"as JSON: {path}")
    return code


def _find_suite(request: ParsedCommand, path: Path) -> Measure:
    """Return the function of the suite of a request. Raises: ConfigError: there is no such one."""
    name = request.suite or ""
    if request.only is not None and name not in WITH_ONLY:
        raise ConfigError(f"--only={request.only}: only --suite={'|'.join(WITH_ONLY)} accepts it")
    if request.minutes is not None and name not in GPU_SUITES:
        asked = f"--minutes={request.minutes:g}"
        raise ConfigError(f"{asked}: only --suite={'|'.join(GPU_SUITES)} accepts it")
    if name in STUDIES:
        return _find_study(name, request)
    if name not in {**SUITES, **GPU_SUITES}:
        raise ConfigError(f"--suite={name}: one of {', '.join([*SUITES, *GPU_SUITES, *STUDIES])}")
    if request.is_dry or (request.overrides and name not in WITH_OVERRIDES):
        asked = " ".join([*request.overrides, *["--dry-run"] * request.is_dry])
        raise ConfigError(f"{asked}: only studies take it ({', '.join(STUDIES)})")
    if name in GPU_SUITES:
        return _find_gpu_suite(request, path)
    module, _, function = SUITES[name].partition(":")
    measure = getattr(import_module(f"benchmarks.{module}"), function)
    if name in WITH_OVERRIDES:
        return partial(measure, overrides=request.overrides)
    return partial(measure, only=request.only.split(",")) if request.only else measure


def _find_gpu_suite(request: ParsedCommand, path: Path) -> Measure:
    """Return the function of the GPU checks with the options of the request."""
    from benchmarks.gpu.suite import SuiteRequest, run_suite

    asked = SuiteRequest(
        only=request.only,
        minutes=request.minutes,
        lines=path.with_suffix(".jsonl"),
        sizes=GPU_SUITES[request.suite or ""],
    )
    return partial(run_suite, request=asked)


def _find_study(name: str, request: ParsedCommand) -> Measure:
    """Return the function of a study. Raises: ConfigError: a package is missing."""
    is_peer = name in ("peer", "peer-pretrained")
    module = "benchmarks.study.peer" if is_peer else "benchmarks.study.command"
    try:
        measure = import_module(module).measure
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--suite={name} needs the package {error.name}: pip install it"
        ) from error
    return partial(measure, name, request)


def _check_writable(path: Path) -> None:
    """Raise ConfigError if no file can be written at `path`."""
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir() or not (above.is_dir() and os.access(above, os.W_OK)):
        raise ConfigError(f"--json={path}: no file can be written there")
