"""What all tests share: threads, property tests that repeat themselves, and the order."""

import gc
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from xdist.scheduler import LoadFileScheduling

from common.formats import chat_template
from tests.rewriting import compile_tests

gc.set_threshold(10_000)  # as `run.py` does
gc.disable()  # until all is imported and collected
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Java machines of tests are short-lived: the second compiler costs more than it saves.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1")

# Constants of the imported modules do not enter the examples. With them, the examples would depend
# on the order of imports, and each worker of a fresh clone would parse all modules.
providers._get_local_constants = lambda: providers._local_constants

settings.register_profile("longstride", deadline=None, derandomize=True, database=None)
settings.load_profile("longstride")

# Files and folders with long tests, the longest first. They start first.
FIRST = (
    "tests/actor/engine",
    "tests/end_to_end/test_run.py",
    "tests/end_to_end/test_",
    "tests/envhub/envs/test_sciworld.py",
    "tests/tools/launch/ray/test_starter.py",
    "tests/learner/weights/test_faults.py",
    "tests/tools/checks/test_presets.py",
    "tests/learner/training/test_",
    "tests/envhub/envs/test_miniwob",
    "tests/test_",
)
# Files whose tests share one costly import or process, by the begin of their path. One worker runs
# all of them.
TOGETHER = ("tests/actor/engine/", "tests/test_")
ENDS_THE_ENGINE = "test_engine_death.py"
SPREAD_OVER = 0.6  # of the others: all workers should end at about the same time


def scope_of(nodeid: str) -> str:
    """Return the file of a test, or the begin of its path if it is one of TOGETHER."""
    file = nodeid.partition("::")[0]
    return next((begin for begin in TOGETHER if file.startswith(begin)), file)


def turn_of(scope: str) -> int:
    """Return the position of a scope among the long ones, or their number for another one."""
    return next((i for i, part in enumerate(FIRST) if scope.startswith(part)), len(FIRST))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread long files among the first of the others, so that cores are never idle."""
    items.sort(key=lambda item: ENDS_THE_ENGINE in item.nodeid)
    scopes: dict[str, list[pytest.Item]] = {}
    for item in items:
        scopes.setdefault(scope_of(item.nodeid), []).append(item)
    long = sorted((each for each in scopes if turn_of(each) < len(FIRST)), key=turn_of)
    others = [each for each in scopes if turn_of(each) == len(FIRST)]
    gap = int(SPREAD_OVER * len(others) / max(1, len(long)))
    order: list[str] = []
    for i, scope in enumerate(long):
        order += [scope, *others[i * gap : (i + 1) * gap]]
    order += others[len(long) * gap :]
    items[:] = [item for scope in order for item in scopes[scope]]


class FilesTogether(LoadFileScheduling):
    """Sends each file to one worker, and all files of an entry of TOGETHER to the same one."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    compile_tests(config, Path(__file__).parent)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesTogether | None:
    return FilesTogether(config, log) if config.getvalue("dist") == "loadfile" else None


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
