"""A synchronous run whose engine sleeps while the learner steps: every role is a real process.

vLLM's CPU worker accepts the calls of its sleep mode and keeps its memory. Two checks refuse the
mode without a GPU: the project's, which asks NVIDIA's driver, and that of vLLM's platform. Both get
another answer here.
"""

import os
import re
from datetime import datetime
from pathlib import Path

import pytest

from common.repository import ROOT
from tests.end_to_end.runs import Run, balances

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

NUM_STEPS = 3
GPUS = '[["GPU-0", "NVIDIA H100", 81559, []]]'
# Python imports this module at the start of each process.
CUSTOMIZED = """
import importlib.util
import sys


class Finder:
    def find_spec(self, name, path, target=None):
        if name != "vllm.platforms.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_allow(module):
            load(module)
            module.CpuPlatform.is_sleep_mode_available = lambda self: True

        spec.loader.exec_module = load_and_allow
        return spec


sys.meta_path.insert(0, Finder())
"""


def variables_with_a_gpu(folder: Path) -> dict[str, str]:
    """Return variables with which the driver lists a GPU, and vLLM's platform has a sleep mode."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(CUSTOMIZED, encoding="utf-8")
    path = f"{folder / 'site'}:{ROOT / 'tests/fake_driver'}:{os.environ.get('PYTHONPATH', '')}"
    return {"PYTHONPATH": path, "GPUS": GPUS}


def times_of(log: Path, pattern: str) -> list[datetime]:
    """Return the times of the lines of a log that contain a pattern."""
    lines = [
        line for line in log.read_text(encoding="utf-8").splitlines() if re.search(pattern, line)
    ]
    return [datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f") for line in lines]


def test_engine_sleeps_during_each_step_and_no_lease_expires(tmp_path: Path) -> None:
    overrides = ("train.mode=sync", "actor.placement=colocated", "actor.sleep=1")
    more = (f"train.num_steps={NUM_STEPS}", "learner.batch_timeout_s=400")
    with Run(tmp_path, *overrides, *more, env=variables_with_a_gpu(tmp_path)) as run:
        assert run.wait(timeout_s=800) == 0, run.output
        assert run.left_over() == []
    logs = run.root / "logs"
    asleep = times_of(logs / "actor-0.log", "engine sleeps level=1")
    stepped = times_of(logs / "learner.log", r" step=\d+ success=")
    awake = times_of(logs / "actor-0.log", r"engine is awake version=\d+")
    assert len(asleep) == len(stepped) == len(awake) == NUM_STEPS
    turns = [time for each in zip(asleep, stepped, awake, strict=True) for time in each]
    assert turns == sorted(turns)  # Asleep, a step, awake, and again.
    metrics = run.metrics()
    assert [line["offpolicy/lag_max"] for line in metrics] == [0.0] * NUM_STEPS
    ledger = run.read("ledger.json")
    assert balances(ledger)
    assert (ledger["failed"], ledger["stale"]) == (0, 0)
