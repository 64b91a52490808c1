"""Laws of a script outside of the checkout: its reward trains, and its error is named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.repository import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

CODE = """
def has_first_letter(completion, answer):
    "Return 1 for an answer with the first letter of the reference."
    return float(answer[0] in completion)


def fails(completion, answer):
    return {"a": 1.0}[answer]
"""
SCRIPT = """
import json
import sys

import my_code
from longstride import Run, train

name = sys.argv[1]
overrides = {
    "run.dir": sys.argv[2],
    "run.name": name,
    "data.train": "questions.jsonl",
    "data.eval_size": 2,
    "data.reward": getattr(my_code, name),
    "train.num_steps": 1,
    "groups.size": 4,
    "groups.per_step": 2,
    "actor.max_concurrent": 8,
    "algorithm.filter_zero_variance": False,
    "eval.before": False,
    "eval.after": False,
    "log.wandb": "disabled",
}
with train("dataset", overrides) as training:
    steps = [metrics["step"] for metrics in training]
run = Run(training.path)
rewards = [(episode.messages()[-1]["content"], episode.reward) for episode in run.episodes(step=1)]
print(json.dumps({"steps": steps, "path": str(training.policy.path), "rewards": rewards}))
"""


def run_script(folder: Path, name: str) -> subprocess.CompletedProcess[str]:
    """Run the user's script with a function of the user's file as the reward."""
    (folder / "my_code.py").write_text(CODE, encoding="utf-8")
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    record = json.dumps({"question": "Which letters?", "answer": "abcdefghij"})
    (folder / "questions.jsonl").write_text(f"{record}\n" * 12, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "script.py", name, str(folder / "made")],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        encoding="utf-8",
    )


def test_function_of_the_script_is_the_reward_of_a_run(tmp_path: Path) -> None:
    done = run_script(tmp_path, "has_first_letter")
    assert done.returncode == 0, done.stderr[-3000:]
    printed = json.loads(done.stdout.splitlines()[-1])
    assert printed["steps"] == [1]
    assert printed["path"] == str(tmp_path / "made/has_first_letter/checkpoints/step-000001")
    assert len(printed["rewards"]) >= 4
    assert all(reward == float("a" in text) for text, reward in printed["rewards"])


def test_error_of_the_function_is_the_error_of_the_script(tmp_path: Path) -> None:
    done = run_script(tmp_path, "fails")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "ProgramFailed: train ended with exit code 1" in last
    assert "reward fails failed on record" in last
    assert "KeyError: 'abcdefghij' (my_code.py, line 8)" in last
    assert f"{tmp_path}/my_code.py:fails" in last
