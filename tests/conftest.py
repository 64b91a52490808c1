"""What all tests share: threads, property tests that repeat themselves, and who runs alone."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "disabled")

settings.register_profile("longstride", deadline=None, derandomize=True, database=None)
settings.load_profile("longstride")

ALONE = ("end_to_end", "actor/engine")  # whole runs and engines want the machine for themselves


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the folders of `ALONE`."""
    here = Path(__file__).parent
    for item in items:
        if item.path.relative_to(here).as_posix().startswith(ALONE):
            item.add_marker("alone")


@pytest.fixture
def repository() -> Path:
    """The directory that holds `run.py`."""
    return Path(__file__).resolve().parents[1]
