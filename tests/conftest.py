"""What all tests share: threads, property tests that repeat themselves, and the order."""

import gc
import os
from collections.abc import Generator
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import settings

from common.formats import chat_template

gc.set_threshold(10_000)  # as `run.py` does
gc.disable()  # until all is imported and collected
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile("longstride", deadline=None, derandomize=True, database=None)
settings.load_profile("longstride")

LONG = ("end_to_end/test_", "actor/engine", "envhub/envs/test_miniwob")  # whose tests wait much
SPREAD_OVER = 0.6  # of the others: all workers should end at about the same time


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread long files among the first of the others, so that cores are never idle."""
    here = Path(__file__).parent
    files = {where: [*group] for where, group in groupby(items, key=lambda item: item.path)}
    names = {file: file.relative_to(here).as_posix() for file in files}
    long = [f for folder in LONG for f in reversed(files) if names[f].startswith(folder)]
    others = [f for f in files if f not in long]
    gap = int(SPREAD_OVER * len(others) / max(1, len(long)))
    order: list[Path] = []
    for i, file in enumerate(long):
        order += [file, *others[i * gap : (i + 1) * gap]]
    items[:] = [item for f in [*order, *others[len(long) * gap :]] for item in files[f]]


def pytest_collection_finish() -> None:
    """Leave out of every later search for cycles what stays anyway."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def repository() -> Path:
    """The directory that holds `run.py`."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def fresh_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins without the prompt settings that an earlier test fixed in this process."""
    monkeypatch.setattr(chat_template, "_process", chat_template._Process())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Spell half characters out in what a test has said: workers send their reports as UTF-8."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report
