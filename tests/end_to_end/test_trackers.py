"""Laws of a whole run with all trackers, by their real libraries."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.runs import Run
from tests.venvs import python_with

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1500)]

LIBRARIES = ("tensorboard==2.21.0", "mlflow==3.17.2", "trackio==0.43.0")
NAMES = ("wandb", "tensorboard", "mlflow", "trackio")
SETTINGS = (
    f"log.to=[{','.join(NAMES)}]",
    "log.wandb=offline",
    "log.wandb_project=laws",
    "eval.num_items=0",
)
KEY = "loss/policy"
READ = """
import json, sys
from mlflow.tracking import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trackio.sqlite_storage import SQLiteStorage

root, key = sys.argv[1:]
events = EventAccumulator(f"{root}/tensorboard")
events.Reload()
mlflow = MlflowClient(f"sqlite:///{root}/../mlflow.db")
history = mlflow.get_metric_history(open(f"{root}/mlflow_id").read(), key)
rows = SQLiteStorage.get_logs("laws", open(f"{root}/trackio_id").read())
print(json.dumps({
    "tensorboard": [event.step for event in events.Scalars(key)],
    "mlflow": sorted(metric.step for metric in history),
    "trackio": [row["step"] for row in rows if key in row],
}))
"""


def steps_of(run: Run) -> list[int]:
    """Return the optimizer steps in the metrics of a run."""
    return [line["step"] for line in run.metrics() if KEY in line]


def test_each_tracker_has_all_steps_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = python_with(*LIBRARIES, sees_ours=True)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    with Run(tmp_path, *SETTINGS, python=python) as run:
        assert run.wait() == 0, run.output[-2_000:]
        assert "the run continues without it" not in run.output
    read = [python, "-W", "ignore", "-c", READ, str(run.root), KEY]
    stored = json.loads(subprocess.check_output(read, timeout=240).splitlines()[-1])
    steps = steps_of(run)
    assert len(steps) == 3
    assert stored == dict.fromkeys(("tensorboard", "mlflow", "trackio"), steps)
    (events,) = (run.root / "wandb").glob("offline-run-*/*.wandb")
    assert events.read_bytes().count(KEY.encode()) >= len(steps)


def test_trackers_that_fail_stop_no_run(tmp_path: Path) -> None:
    python = python_with(*LIBRARIES, sees_ours=True)
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="utf-8")
    (tmp_path / "r").mkdir()
    for folder in ("wandb", "tensorboard"):
        (tmp_path / "r" / folder).write_text("", encoding="utf-8")
    stores = {
        "TRACKIO_DIR": str(blocked / "trackio"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{blocked}/mlflow.db",
    }
    with Run(tmp_path, *SETTINGS, python=python, env=stores) as run:
        assert run.wait() == 0, run.output[-2_000:]
    assert len(steps_of(run)) == 3
    log = (run.root / "logs" / "learner.log").read_text(encoding="utf-8")
    for name in ("tensorboard", "mlflow"):
        assert log.count(f"{name} failed, the run continues without it") == 1, log[-2_000:]
    assert "trackio failed to flush" in log  # It warns by itself, and raises nothing.
