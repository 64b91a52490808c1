"""Compiles the test files once. In a fresh clone, each worker would rewrite all their asserts."""

import os
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

DEADLINE_S = 120.0  # Afterwards the workers compile the rest.


def compile_tests(config: pytest.Config, folder: Path) -> None:
    """Write pytest's compiled form of all test files below a folder, with one process per core."""
    if sys.dont_write_bytecode or config.getoption("assertmode") != "rewrite":
        return
    files = sorted([*folder.rglob("test_*.py"), *folder.rglob("conftest.py")])
    num_cores = os.cpu_count() or 1
    processes = [
        get_context("fork").Process(
            target=_compile, args=(config, files[i::num_cores]), daemon=True
        )
        for i in range(num_cores)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE_S)


def _compile(config: pytest.Config, files: list[Path]) -> None:
    """Compile the files that have changed. A worker repeats a failed one and reports its error."""
    for source in files:
        compiled = rewrite.get_cache_dir(source) / f"{source.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(source, compiled) is None and rewrite.try_makedirs(compiled.parent):
            source_hash, code = rewrite._rewrite_test(source, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, compiled)
