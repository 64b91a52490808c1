"""An intake with its neighbours, for several files."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.learner.ingest.intake_rig import Setup


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    """An intake that is not started yet."""
    setup = Setup(tmp_path)
    yield setup
    setup.close()


@pytest.fixture
def running(setup: Setup) -> Setup:
    """A running intake."""
    setup.intake.start()
    return setup
