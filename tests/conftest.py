"""What all tests share: one thread per process, and property tests that repeat themselves."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "disabled")

settings.register_profile("longstride", deadline=None, derandomize=True, database=None)
settings.load_profile("longstride")


@pytest.fixture
def repository() -> Path:
    """The directory that holds `run.py`."""
    return Path(__file__).resolve().parents[1]
