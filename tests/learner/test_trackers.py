"""Laws of the trackers of `log.to`. Each runs with its real library where that is installed."""

import logging
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from common.config.load import load_config
from common.config.log import LogSection, TrackerName
from common.config.model import ModelSection
from common.config.run import RunSection
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.repository import ROOT
from common.store.run_dir import RunDir
from common.wire.messages import EpisodeKind
from learner.journal.metrics import MetricsWriter, read_metrics
from learner.trackers import TrackerSink, check_trackers, open_trackers
from tests.tools.dashboard.runs import append, episode, make_run
from tests.venvs import python_with

HAS_ALL = all(map(find_spec, ("tensorboard", "mlflow", "trackio")))


def config(*trackers: str) -> RunConfig:
    log = LogSection(to=[TrackerName(name) for name in trackers], wandb_project="laws")
    return RunConfig(log=log, model=ModelSection(path="m"), run=RunSection(name="a"))


def write(root: Path, cfg: RunConfig, *steps: int, resumed: int = -1, job: str = "") -> RunDir:
    """Log a value 10 * step in each step, as one life of a learner or of another command."""
    run_dir = RunDir(root=root / "runs" / "a" / job)
    sinks = open_trackers(run_dir, cfg, job=job, resumed_at_step=resumed)
    writer = MetricsWriter(run_dir, sinks, resumed_at_step=resumed)
    for step in steps:
        writer.log(step, {"loss/policy": 10.0 * step, "reward/x y(z)": 1.0})
    writer.close()
    return run_dir


class Recorder:
    """A tracker in memory; it fails or waits where a test wants it to."""

    def __init__(self, *, fails_at: int = -1, gate: threading.Event | None = None) -> None:
        self.sent: list[tuple[int, dict[str, float]]] = []
        self.is_closed = False
        self._fails_at = fails_at
        self._gate = gate

    def send(self, step: int, values: Mapping[str, float]) -> None:
        if self._gate is not None:
            assert self._gate.wait(30)
        if step == self._fails_at:
            raise ConnectionError("server is gone")
        self.sent.append((step, dict(values)))

    def close(self) -> None:
        self.is_closed = True


def sink_of(recorder: Recorder, root: Path, **keys: Any) -> TrackerSink:
    run_dir = RunDir(root=root)
    return TrackerSink("mlflow", lambda: recorder, run_dir, **{"has_evaluations": False, **keys})


def test_failing_tracker_is_logged_once_and_the_metrics_continue(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(fails_at=2)
    sink = sink_of(recorder, tmp_path)
    writer = MetricsWriter(RunDir(root=tmp_path), [sink])
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3, 4):
            writer.log(step, {"a": 1.0})
        writer.close()
    assert recorder.sent == [(1, {"a": 1.0})]
    texts = [record.getMessage() for record in caplog.records]
    text = "mlflow failed, the run continues without it at=step 2 error=ConnectionError:"
    assert texts == [f"{text} server is gone"]
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_tracker_that_calls_exit_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        run_dir = RunDir(root=tmp_path)
        sink = TrackerSink("mlflow", lambda: sys.exit(3), run_dir, has_evaluations=False)
        sink.close()
    assert (
        "mlflow failed, the run continues without it at=its start error=SystemExit" in caplog.text
    )


def test_all_trackers_close_at_once(tmp_path: Path) -> None:
    meeting = threading.Barrier(3, timeout=30)  # It raises if they close one after another.

    class Closing(Recorder):
        def close(self) -> None:
            meeting.wait()
            super().close()

    recorders = [Closing() for _ in range(3)]
    MetricsWriter(
        RunDir(root=tmp_path), [sink_of(each, tmp_path, close_s=60.0) for each in recorders]
    ).close()
    assert all(recorder.is_closed for recorder in recorders)


def test_tracker_that_cannot_open_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> Recorder:
        raise OSError("no route")

    with caplog.at_level(logging.WARNING):
        sink = TrackerSink("trackio", refuse, RunDir(root=tmp_path), has_evaluations=False)
        sink.log(1, {"a": 1.0})
        sink.close()
    assert [r.getMessage() for r in caplog.records] == [
        "trackio failed, the run continues without it at=its start error=OSError: no route"
    ]


def test_silent_tracker_delays_no_step_and_the_end_is_bounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    recorder = Recorder(gate=gate)
    sink = sink_of(recorder, tmp_path, close_s=0.2)
    with caplog.at_level(logging.WARNING):
        for step in range(3_000):  # More than wait for a tracker.
            sink.log(step, {"a": 1.0})
        sink.close()
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert "mlflow is slow: step 100" in texts[0]
    assert texts[1] == "mlflow did not finish in 0.2 s"
    gate.set()


def test_evaluations_beside_training_are_sent_once(tmp_path: Path) -> None:
    recorder = Recorder()
    (tmp_path / "journal").mkdir()
    line = '{"group_id": "eval-step-5-model", "step": 5, "eval/success": 0.5, "eval/reward": null}'
    (tmp_path / "eval.jsonl").write_text(f"{line}\n", encoding="utf-8")
    sink = sink_of(recorder, tmp_path, has_evaluations=True)
    sink.log(6, {"a": 1.0})
    sink.log(7, {"a": 2.0})
    sink.close()
    assert recorder.sent == [(6, {"a": 1.0}), (5, {"eval/success": 0.5}), (7, {"a": 2.0})]
    assert recorder.is_closed


def test_evaluation_is_sent_at_its_version_when_no_step_follows(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    for name, version in {"before": 0, "after": 2, "after-2": 4}.items():
        group = f"eval-{name}-model"
        played = replace(episode(version), kind=EpisodeKind.EVAL, group_id=group)
        append(run_dir, replace(played, episode_id=f"{group}/0", opened_at_version=version))
    recorder = Recorder()
    sink_of(recorder, run_dir.root, has_evaluations=True).close()
    assert sorted(step for step, _ in recorder.sent) == [0, 2, 4]


@pytest.mark.parametrize("name", [*TrackerName])
def test_missing_package_is_named_at_the_start(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^log\.to=\[{name}\]: the package {name} is not inst"):
        check_trackers(load_config("smoke", [f"log.to=[{name}]"]), {}, find=lambda module: None)


def test_unknown_tracker_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"log\.to"):
        load_config("smoke", ["log.to=[tensorbord]"])


def test_variables_of_wandb_matter_only_with_wandb() -> None:
    environ = {"WANDB_MODE": "onlin"}
    check_trackers(load_config("smoke", ["log.to=[]"]), environ)
    with pytest.raises(ConfigError, match=r"^WANDB_MODE=onlin"):
        check_trackers(load_config("quickstart", []), environ)


def test_run_without_trackers_has_none(tmp_path: Path) -> None:
    assert open_trackers(RunDir(root=tmp_path), config()) == []


@pytest.mark.slow
def test_wandb_offline_receives_the_metrics_beside_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_dir = write(tmp_path, config("wandb"), 1, 2)
    assert list((run_dir.root / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.slow
def test_tensorboard_continues_its_run_after_a_restart(tmp_path: Path) -> None:
    events_of = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    cfg = config("tensorboard")
    write(tmp_path, cfg, 1, 2, 3)
    run_dir = write(tmp_path, cfg, 3, 4, resumed=2)  # Step 3 is repeated.
    events = events_of.EventAccumulator(str(run_dir.root / "tensorboard"))
    events.Reload()
    found = [(each.step, each.value) for each in events.Scalars("loss/policy")]
    assert found == [(1, 10.0), (2, 20.0), (3, 30.0), (4, 40.0)]


@pytest.mark.slow
def test_mlflow_continues_its_run_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    cfg = config("mlflow")
    write(tmp_path, cfg, 1, 2)
    run_dir = write(tmp_path, cfg, 3, resumed=2)
    run_id = (run_dir.root / "mlflow_id").read_text(encoding="utf-8")
    with sqlite3.connect(tmp_path / "runs" / "mlflow.db") as store:
        asked = "select step, value from metrics where run_uuid=? and key='loss/policy' order by 1"
        assert store.execute(asked, (run_id,)).fetchall() == [(1, 10.0), (2, 20.0), (3, 30.0)]
        assert store.execute("select name, status from runs").fetchall() == [("a", "FINISHED")]
        names = {name for (name,) in store.execute("select distinct key from metrics")}
        assert names == {"loss/policy", "reward/x y_z_"}
        asked = "select value from params where key='model.path'"
        assert store.execute(asked).fetchall() == [("m",)]
        assert store.execute("select name from experiments").fetchall() == [("Default",), ("laws",)]


@pytest.mark.slow
def test_other_command_has_the_store_and_the_name_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("trackio")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    cfg = config("mlflow", "trackio")
    write(tmp_path, cfg, 1)
    part = replace(
        cfg, run=RunSection(name="sft", dir="runs/a")
    )  # The configuration that `command_part` makes.
    run_dir = write(tmp_path, part, 1, job="sft")
    with sqlite3.connect(tmp_path / "runs" / "mlflow.db") as store:
        named = store.execute("select name from runs order by name").fetchall()
    assert named == [("a",), ("a-sft",)]
    assert (run_dir.root / "trackio_id-sft").read_text(encoding="utf-8").startswith("a-sft-")


@pytest.mark.slow
def test_mlflow_continues_in_a_new_run_if_its_run_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    path = tmp_path / "runs" / "a" / "mlflow_id"
    path.parent.mkdir(parents=True)
    # A copied run has the id, and its machine has no mlflow.db with this run.
    path.write_text("0" * 32, encoding="utf-8")
    write(tmp_path, config("mlflow"), 1)
    assert "mlflow has no run 00000000000000000000000000000000; a new one begins" in caplog.text
    with sqlite3.connect(tmp_path / "runs" / "mlflow.db") as store:
        found = store.execute("select run_uuid, status from runs").fetchall()
    assert found == [(path.read_text(encoding="utf-8"), "FINISHED")]


@pytest.mark.slow
def test_trackio_continues_its_run_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    cfg = config("trackio")
    write(tmp_path, cfg, 1, 2)
    run_dir = write(tmp_path, cfg, 3, resumed=2)
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    name = (run_dir.root / "trackio_id").read_text(encoding="utf-8")
    rows = storage.get_logs("laws", name)
    assert [(row["step"], row["loss/policy"]) for row in rows] == [(1, 10.0), (2, 20.0), (3, 30.0)]


@pytest.mark.slow
@pytest.mark.skipif(HAS_ALL, reason="the other tests have run with the real libraries")
def test_laws_hold_with_the_real_libraries() -> None:
    python = python_with("tensorboard==2.21.0", "mlflow==3.17.2", "trackio==0.43.0", sees_ours=True)
    names = "continues or beside_each_other or other_command"
    options = ["-q", "-W", "default", "-p", "no:cacheprovider", "-k", names]
    command = [python, "-m", "pytest", __file__, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=280)
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.startswith("...... "), done.stdout[-3000:]  # Six have run.


@pytest.mark.slow
def test_all_trackers_work_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tensorboard", "mlflow", "trackio"):
        pytest.importorskip(name)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_dir = write(tmp_path, config("wandb", "tensorboard", "mlflow", "trackio"), 1)
    for name in ("wandb_id", "mlflow_id", "trackio_id", "tensorboard"):
        assert (run_dir.root / name).exists(), name
    assert os.environ["WANDB_MODE"] == "offline"
