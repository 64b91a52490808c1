"""Law of a whole run whose answers are graded by an engine that the run starts itself."""

import os
import signal
from pathlib import Path

import pytest

from tests.end_to_end.runs import Run, unbounded

OVERRIDES = (
    "train.num_steps=4",
    "groups.per_step=4",
    "eval.before=false",
    "eval.after=false",
    "eval.baselines=false",
    "actor.max_concurrent=32",
)


def paused_envs(run: Run) -> dict[str, str]:
    """Return the paused environments in the status of a run, with the reasons."""
    if not (run.root / "status.json").exists():
        return {}
    return {
        env: why for hub in run.read("status.json")["hubs"] for env, why in hub["paused"].items()
    }


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_judge_delays_a_run_and_falsifies_nothing(tmp_path: Path) -> None:
    with Run(tmp_path, *OVERRIDES, config="judge") as run:
        run.wait_until(lambda: len(run.metrics()) >= 1, timeout_s=900)
        key = Path(f"/proc/{run.role_pid('serve')}/environ").read_bytes()
        os.kill(run.role_pid("serve"), signal.SIGKILL)
        run.wait_until(lambda: "dataset" in paused_envs(run), timeout_s=300)
        assert "judge judge" in paused_envs(run)["dataset"]
        assert run.wait(timeout_s=900) == 0, run.output[-3000:]
        lines = run.metrics()
        assert len(lines) == 4
        # A step without newly arrived episodes has no metrics of episodes.
        lines = [line for line in lines if "episodes/reward_judge_mean" in line]
        assert lines
        assert all(0.0 <= line["episodes/reward_judge_mean"] <= 1.0 for line in lines)
        assert sum(line["episodes/reward_judge_calls_mean"] for line in lines) > 0
        assert sum(line["episodes/reward_judge_prompt_tokens_mean"] for line in lines) > 0
        ledger = run.read("ledger.json")
        assert ledger["failed"] == ledger["lost"] == 0
        assert (run.root / "judges" / "judge.sqlite").is_file()
        assert unbounded(run.root) == []
        (variable,) = [
            each for each in key.split(b"\0") if each.startswith(b"LONGSTRIDE_JUDGE_KEY=")
        ]
        secret = variable.partition(b"=")[2]
        files = [path for path in run.root.rglob("*") if path.is_file()]
        assert [path for path in files if secret in path.read_bytes()] == []
