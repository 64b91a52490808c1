"""The laws of the code's shape: who imports whom, and how long things get."""

import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("actor", "common", "envhub", "learner")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
SOURCES = [
    *sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")),
    ROOT / "run.py",
]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{_name(path)} line {node.lineno}: relative import"
            yield (node.module or "").split(".")[0]


def _importers(module: str) -> set[str]:
    return {_name(path) for path in SOURCES if module in _imports(path)}


@pytest.mark.parametrize("package", PACKAGES)
def test_package_imports_only_itself_and_common(package: str) -> None:
    forbidden = {*PACKAGES, "run", "tests"} - {package, "common"}
    wrong = {
        _name(path): sorted(forbidden & set(_imports(path)))
        for path in SOURCES
        if path.is_relative_to(ROOT / package) and forbidden & set(_imports(path))
    }
    assert wrong == {}


def test_vllm_is_imported_only_in_the_engine_folder() -> None:
    assert {name for name in _importers("vllm") if not name.startswith("actor/engine/")} == set()


def test_msgpack_is_imported_only_by_the_wire() -> None:
    assert _importers("msgpack") == {"common/wire/codec.py"}


def test_pickle_is_imported_nowhere() -> None:
    assert _importers("pickle") | _importers("cloudpickle") | _importers("dill") == set()


def test_file_is_at_most_400_lines_long() -> None:
    lengths = {_name(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: n for name, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_function_is_at_most_60_lines_long() -> None:
    too_long = {
        f"{_name(path)}:{node.name}": node.end_lineno - node.lineno + 1
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    }
    assert too_long == {}


def test_package_marker_is_empty() -> None:
    markers = [path for path in SOURCES if path.name == "__init__.py"]
    assert [_name(path) for path in markers if path.read_text().strip()] == []


def test_module_begins_with_a_docstring() -> None:
    modules = [path for path in SOURCES if path.name != "__init__.py"]
    assert [_name(p) for p in modules if not ast.get_docstring(ast.parse(p.read_text()))] == []


def test_help_imports_no_heavy_library_and_answers_within_a_second() -> None:
    code = (
        "import sys, run\n"
        "try:\n    run.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'vllm', 'transformers', 'numpy', 'fastapi', 'zmq'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 1.0
