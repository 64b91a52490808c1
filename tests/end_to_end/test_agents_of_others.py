"""Agents that were not written for this project train: real runs with packages of the index.

Each agent has an environment of its own, which the test makes with pip. The variables
LONGSTRIDE_MINI_SWE_AGENT and LONGSTRIDE_OPENAI_AGENTS may name the interpreter of a ready one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.wire.messages import EndReason, Trajectory
from learner.journal.journal import read_journal
from tests.end_to_end.runs import Run

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]
INSTALL_S = 900.0
FEW = ("train.num_steps=1", "eval.before=false", "eval.baselines=false")


def python_of(variable: str, requirement: str, folder: Path) -> str:
    """Return the interpreter that a variable names, or one with a new installation."""
    if named := os.environ.get(variable):
        return named
    python = folder / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    done = subprocess.run(
        [str(python), "-m", "pip", "install", "-q", requirement],
        capture_output=True,
        encoding="utf-8",
        timeout=INSTALL_S,
    )
    assert done.returncode == 0, f"pip cannot install {requirement}: {done.stderr[-2000:]}"
    return str(python)


def trained(folder: Path, example: str, python: str, *how: str) -> list[Trajectory]:
    """Return the episodes of a finished run in which none has failed."""
    config = f"docs/examples/{example}/train.yaml"
    with Run(folder, *FEW, *how, config=config, env={"AGENT_PYTHON": python}) as run:
        assert run.wait(timeout_s=900.0) == 0, run.output[-3_000:]
        episodes = [each for _, each in read_journal(run.root / "journal")]
        ledger = json.loads((run.root / "ledger.json").read_text(encoding="utf-8"))
    assert ledger["failed"] == 0
    assert ledger["trained"] > 0
    return [each for each in episodes if not each.end_reason.is_infrastructure_failure]


def test_mini_swe_agent_trains_in_the_sandbox(tmp_path: Path) -> None:
    """The small policy cannot write the agent's format: the tests of the task give 0."""
    python = python_of("LONGSTRIDE_MINI_SWE_AGENT", "mini-swe-agent==2.4.6", tmp_path)
    groups = ("groups.per_step=1", "groups.size=4", "algorithm.filter_zero_variance=false")
    for each in trained(tmp_path, "mini-swe-agent", python, *groups):
        assert each.end_reason is EndReason.DONE
        assert each.reward == 0.0
        assert each.loss_mask.any()


def test_openai_agents_train_on_a_dataset(tmp_path: Path) -> None:
    python = python_of("LONGSTRIDE_OPENAI_AGENTS", "openai-agents==0.24.0", tmp_path)
    groups = ("groups.per_step=4", "groups.size=4", "eval.num_items=8")
    episodes = trained(tmp_path, "openai-agents", python, *groups)
    assert {each.end_reason for each in episodes} == {EndReason.DONE}
    assert {each.reward for each in episodes} == {0.0, 1.0}
