"""What all tests share: threads, property tests that repeat themselves, and the order."""

import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings

gc.set_threshold(10_000)  # as `run.py` does
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "disabled")

settings.register_profile("longstride", deadline=None, derandomize=True, database=None)
settings.load_profile("longstride")

FIRST = ("end_to_end", "actor/engine", "envhub/envs/miniwob")  # what takes longest, dearest first


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the folders of `FIRST` first: all workers then end at about the same time."""
    here = Path(__file__).parent

    def rank(item: pytest.Item) -> int:
        where = item.path.relative_to(here).as_posix()
        return next((i for i, folder in enumerate(FIRST) if where.startswith(folder)), len(FIRST))

    items.sort(key=rank)


def pytest_collection_finish() -> None:
    """Leave out of every later search for cycles what stays anyway."""
    gc.freeze()


@pytest.fixture
def repository() -> Path:
    """The directory that holds `run.py`."""
    return Path(__file__).resolve().parents[1]
