"""The command `bench`: run one suite, print its table, and write the figures as JSON."""

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

from benchmarks.table import BenchTable
from common.config.command_line import STUDIES, ParsedCommand, version_text
from common.errors import ConfigError
from common.log import configure_logging

Suite = Callable[[BenchTable], None]  # It adds its figures to the table.
SUITES = {  # Name on the command line: module and function.
    "envhub": "envhub.suite:run_suite",
    "soak": "envhub.soak:run_suite",
    "solve": "envhub.solve:run_suite",
    "learner": "learner.suite:run_suite",
    "scheduler": "scheduler.suite:run_suite",
    "transport": "transport.suite:run_suite",
    "weights": "weights.suite:run_suite",
    "tail": "learner.tail:run_suite",
    "actor": "actor.suite:run_suite",
    "agents": "actor.agents:run_suite",
    "routing": "actor.routing:run_suite",
    "end2end": "runs.end_to_end:run_suite",
    "chaos": "chaos.suite:run_suite",
    "chaos-short": "chaos.suite:run_short",
    "chaos-long": "chaos.suite:run_long",
    "hostile": "hostile.suite:run_suite",
    "soak-run": "runs.soak:run_suite",
    "soak-run-long": "runs.soak:run_long",
    "verdict": "learner.verdict:run_suite",
    "dashboard": "runs.dashboard:run_suite",
    "gpu": "learner.gpu:run_suite",
}


def bench(request: ParsedCommand, *, root: Path) -> int:
    """Run the suite of a request, write its figures, and return 0 if every bound holds.

    Raises: ConfigError: the suite, its overrides or the path of the figures are wrong.
    """
    suite = _find_suite(request, root)
    path = Path(request.json or root / "runs" / "bench" / f"{request.suite}.json")
    _check_writable(path)
    configure_logging("bench", "INFO")
    table = BenchTable(out=sys.stdout)
    suite(table)
    if request.is_dry:
        return 0
    code = table.finish()
    table.save(path, suite=request.suite or "", product=version_text(root))
    print(f"as JSON: {path}")
    return code


def _find_suite(request: ParsedCommand, root: Path) -> Suite:
    """Return the suite that a request names. Raises: ConfigError: there is no such suite."""
    name = request.suite or ""
    if name in STUDIES:
        return _find_study(name, request, root)
    if name not in SUITES:
        raise ConfigError(f"--suite={name}: one of {', '.join([*SUITES, *STUDIES])}")
    if request.overrides or request.is_dry:
        asked = " ".join([*request.overrides, *["--dry-run"] * request.is_dry])
        raise ConfigError(f"{asked}: only studies take it ({', '.join(STUDIES)})")
    module, _, function = SUITES[name].partition(":")
    suite: Suite = getattr(import_module(f"benchmarks.{module}"), function)
    return suite


def _find_study(name: str, request: ParsedCommand, root: Path) -> Suite:
    """Return a study. Raises: ConfigError: a package of the extra `benchmarks` is missing."""
    module = "benchmarks.study.peer" if name == "peer" else "benchmarks.study.command"
    try:
        measure = import_module(module).measure
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--suite={name} needs the package {error.name}: pip install it"
        ) from error
    return partial(measure, name, request, root=root)


def _check_writable(path: Path) -> None:
    """Raise ConfigError if no file can be written at `path`."""
    above = next(each for each in path.absolute().parents if each.exists())
    if path.is_dir() or not (above.is_dir() and os.access(above, os.W_OK)):
        raise ConfigError(f"--json={path}: no file can be written there")
