"""Laws of the terminal display."""

import io
import json
import logging
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from actor.engine.startup_history import StartupHistory
from common.config.horizon import HorizonKind, HorizonSection
from common.config.model import ModelSection
from common.config.train import TrainSection
from common.host.lock import hold_run
from common.store.run_dir import RunDir, write_json
from common.store.run_start import mark_finished
from tools.dashboard.run_state import EtaEstimator, start_of, state_line, stop_line
from tools.dashboard.run_view import RunView, view_run
from tools.dashboard.terminal import LiveDisplay
from tools.dashboard.words import ledger_line, sparkline, status_line
from tools.launch.base import LaunchState

STATUS = {
    "phase": "train",
    "version": 12,
    "horizon": 10,
    "stage": 1,
    "groups": {"open": 18, "ready": 3},
    "ledger": {
        "issued": 100,
        "trained": 60,
        "filtered": 20,
        "stale": 5,
        "failed": 5,
        "in_flight": 10,
    },
    "actors": [
        {
            "name": "actor-0",
            "version": 11,
            "running": 64,
            "tokens_per_s": 3200.4,
            "waiting_for": "",
            "last_seen_s": 0.3,
            "rss_bytes": 2**31,
        }
    ],
    "learner": {
        "name": "learner-77",
        "tokens_per_s": 7400.0,
        "waiting_for": "actor-0",
        "last_seen_s": 0.2,
    },
    "success": {"depth2": 0.5},
    "eval": {"before": 0.4},
}


def make_run(root: Path) -> RunDir:
    run_dir = RunDir(root=root)
    run_dir.logs.mkdir(parents=True)
    run_dir.status.write_text(json.dumps(STATUS), encoding="utf-8")
    lines = [
        {"step": 11, "time_s": 100.0, "reward/success": 0.6, "offpolicy/lag_mean": 0.8},
        {"step": 12, "time_s": 102.0, "reward/success": 0.62, "offpolicy/lag_mean": 0.9},
    ]
    run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return run_dir


def view_of(run_dir: RunDir) -> RunView:
    horizon = HorizonSection(kind=HorizonKind.STEPWISE, stages=[5, 10, 20])
    return view_run(run_dir, TrainSection(num_steps=100), horizon)


def display_of(
    run_dir: RunDir, *, console: Console, is_wanted: bool = True, refresh_s: float = 0.5
) -> LiveDisplay:
    return LiveDisplay(
        lambda: view_of(run_dir),
        title="longstride · r",
        subtitle="async",
        is_wanted=is_wanted,
        console=console,
        refresh_s=refresh_s,
    )


def show(run_dir: RunDir) -> str:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120, color_system=None)
    display = display_of(run_dir, console=console)
    display.start()
    display.refresh()
    display.stop()
    display.stop()
    return screen.getvalue()


def test_status_line_summarizes_progress_and_waits(tmp_path: Path) -> None:
    line = status_line(view_of(make_run(tmp_path)))
    assert line == (
        "step 12/100 success 0.61 horizon 10 (stage 2/3) lag 0.9 actor 3200 tok/s"
        " learner 7400 tok/s groups 18 open 3 ready eta 2m56s; learner-77 waits for actor-0"
    )


def test_status_line_omits_unknown_values(tmp_path: Path) -> None:
    line = status_line(view_of(RunDir(root=tmp_path / "none")))
    assert line == "starting, step 0/100"


@pytest.mark.parametrize(
    "status",
    ["", "{", "[]", "null", '{"actors": 3, "groups": [], "learner": "x", "ledger": 1}',
     '{"actors": [null, {"running": ["a", "b"]}], "version": "x", "success": {"a": null}}'],
)  # fmt: skip
def test_display_survives_a_malformed_status(tmp_path: Path, status: str) -> None:
    run_dir = RunDir(root=tmp_path)
    run_dir.status.write_text(status, encoding="utf-8")
    run_dir.metrics.write_text('{"step": "x", "time_s": null}\n3\n{"st\n', encoding="utf-8")
    assert "longstride" in show(run_dir)


def at_launch(run_dir: RunDir, **started_s: float) -> None:
    """Write the launcher's state: the start times of the roles."""
    now = time.time()
    started = {name.replace("_", "-"): now - since for name, since in started_s.items()}
    state = {"began_at": now - 70, "started_at": started, "stop_deadline": None}
    run_dir.root.mkdir(parents=True, exist_ok=True)
    run_dir.launch.write_text(json.dumps(state), encoding="utf-8")


def stop_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the displayed times be exact, however slow the machine is."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)


def test_status_line_lists_starting_roles_with_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_clock(monkeypatch)
    run_dir = RunDir(root=tmp_path / "r")
    at_launch(run_dir, scheduler=2.0, actor_0=34.0)
    line = status_line(view_of(run_dir))
    assert "elapsed 1m10s" in line
    assert line.endswith("; scheduler is starting (2s), engine is starting (34s)")


def test_status_line_lists_unplaced_roles_with_needs(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    needs = {f"actor-{i}": "a node with 1 GPU" for i in range(2, 9)}
    run_dir.launch.write_text(
        json.dumps({"began_at": 0, "started_at": {}, "waiting": needs}), encoding="utf-8"
    )
    assert status_line(view_of(run_dir)).endswith(
        "waits for actor-0, 7 roles wait for a node with 1 GPU"
    )


def test_remote_hub_counts_as_started_with_scheduler(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)  # wrote its status, and has no address of a hub
    at_launch(run_dir, envhub=20.0)
    assert view_of(run_dir).starting == {}


def test_further_learner_node_starts_until_the_learner_reports(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)  # The learner reported 0.2 s before the status file.
    at_launch(run_dir, learner=20.0, ranks_1=10.0)
    assert view_of(run_dir).starting == {}
    at_launch(run_dir, learner=0.0, ranks_1=0.0)
    assert view_of(run_dir).starting.keys() == {"learner", "ranks-1"}


def test_reporting_role_is_no_longer_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run(tmp_path)  # actor-0 reported 0.3 s before the status file.
    stop_clock(monkeypatch)
    at_launch(run_dir, scheduler=20.0, learner=20.0, actor_0=20.0, actor_1=20.0)
    assert "engine is starting (20s)" in status_line(view_of(run_dir))
    assert view_of(run_dir).starting.keys() == {"actor-1"}
    at_launch(run_dir, actor_0=0.0)  # Restarted: the last report is older.
    assert view_of(run_dir).starting.keys() == {"actor-0"}


def test_evaluation_shows_its_progress(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    progress = {"num_done": 240, "num_total": 600}
    run_dir.status.write_text(
        json.dumps({"phase": "eval_before", "progress": progress}), encoding="utf-8"
    )
    line = status_line(view_of(run_dir))
    assert line.startswith("evaluation before training 240/600, step 12/100")
    assert "240/600" in show(run_dir)


def test_slow_phases_show_the_remaining_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_clock(monkeypatch)
    usual = StartupHistory(tmp_path / "cache" / "durations.json")
    model = ModelSection(path="configs/policies/tiny")
    for seconds in (60.0, 40.0):
        usual.note(start_of("actor-0", model), seconds)
    run_dir = make_run(tmp_path)
    told = {**STATUS, "phase": "eval_before", "progress": {"num_done": 8, "num_total": 64}}
    run_dir.status.write_text(json.dumps({**told, "actors": []}), encoding="utf-8")
    state = LaunchState(began_at=time.time() - 90, started_at={"actor-0": time.time() - 34})
    write_json(run_dir.launch, asdict(state))
    pace = EtaEstimator(model, usual=usual)
    pace.observe(view_of(run_dir))
    state = replace(state, **pace.as_dict())
    assert state.usual_s == {"actor-0": 50.0}
    assert usual.seconds(start_of("learner", model)) is None  # it had started already
    write_json(run_dir.launch, asdict(replace(state, phase_began_at=time.time() - 20)))
    told["progress"] = {"num_done": 24, "num_total": 64}
    run_dir.status.write_text(json.dumps({**told, "actors": []}), encoding="utf-8")
    line = status_line(view_of(run_dir))
    assert "engine is starting (34s of about 50s)" in line
    assert "24/64 (50s left)" in line  # 16 in 20 s, 40 to go
    both = {"actor-0": time.time() - 34, "learner": time.time() - 34}
    write_json(run_dir.launch, asdict(replace(state, started_at=both)))
    run_dir.status.write_text(json.dumps({**told, "actors": [], "learner": {}}), encoding="utf-8")
    pace.observe(view_of(run_dir))
    run_dir.status.write_text(json.dumps(told), encoding="utf-8")  # Both reported.
    pace.observe(view_of(run_dir))
    assert usual.seconds(start_of("actor-7", model)) == pytest.approx(42.0, abs=1.0)
    assert usual.seconds(start_of("learner", model)) == pytest.approx(34.0, abs=1.0)
    assert StartupHistory(tmp_path / "none").seconds("actor") is None


def test_checkpoint_wait_shows_the_last_duration(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    waits = {**STATUS["learner"], "waiting_for": "disk: a checkpoint"}  # type: ignore[dict-item]
    run_dir.status.write_text(json.dumps({**STATUS, "learner": waits}), encoding="utf-8")
    with run_dir.metrics.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 13, "time_s": 99.0, "train/checkpoint_s": 12.2}) + "\n")
    assert "disk: a checkpoint, which takes about 12s" in status_line(view_of(run_dir))


def test_stop_shows_limit_and_skip_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = make_run(tmp_path)
    stop_clock(monkeypatch)
    state = {"began_at": time.time(), "started_at": {}, "stop_deadline": time.time() + 40.4}
    run_dir.launch.write_text(json.dumps(state), encoding="utf-8")
    told = "the learner may take 40s to save; a second Ctrl-C ends it at once"
    assert f"stopping: {told}" in status_line(view_of(run_dir))
    assert told in show(run_dir)


def test_log_gets_one_line_per_phase_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = make_run(tmp_path)
    display = display_of(run_dir, console=Console(file=io.StringIO()), refresh_s=0)
    with caplog.at_level(logging.INFO):
        display.refresh()
        display.refresh()
        run_dir.status.write_text(json.dumps({"phase": "eval_after"}), encoding="utf-8")
        display.refresh()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert lines[1].startswith("evaluation after training")


def test_run_state_is_finished_stopped_or_progress(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "r")
    with hold_run(run_dir.root, name="r"):
        assert state_line(run_dir, view_of(run_dir)).startswith("step 12/100 success")
    os.utime(run_dir.status, (0, 0))
    assert (
        state_line(run_dir, view_of(run_dir))
        == "stopped at step 12/100; the same command resumes the run"
    )
    mark_finished(run_dir, version=12, result="held-out success (8 items): after 0.5")
    told = "finished: step 12/100; held-out success (8 items): after 0.5"
    assert state_line(run_dir, view_of(run_dir)) == told


def test_interrupted_run_reports_its_saved_step(tmp_path: Path) -> None:
    empty = RunDir(root=tmp_path / "empty")
    assert stop_line(empty, 0) == "stopped before the first step; the same command resumes the run"
    run_dir = make_run(tmp_path / "r")
    for step in (5, 12):
        folder = run_dir.checkpoints / f"step-{step:06d}"
        folder.mkdir(parents=True)
        if step == 12:
            told = stop_line(run_dir, 12)
            assert told.startswith(
                "stopped at step 12 with the last checkpoint at step 5; the same"
            )
        (folder / "COMPLETE").write_text(json.dumps({"version": step}), encoding="utf-8")
    assert (
        stop_line(run_dir, 12)
        == "stopped with a checkpoint at step 12; the same command resumes the run"
    )


def test_display_shows_progress_ledger_roles_and_warnings(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    (run_dir.logs / "actor-0.log").write_text(
        "2026-01-01 10:00:00,1 I actor-0 x: fine\n"
        "2026-01-01 10:00:01,1 W actor-0 actor.env: hub \x1b[2J answered [bold]429[/bold]\n"
        "2026-01-01 10:00:01,2 W actor-0 vllm.triton_utils: Disabling Triton.\n",
        encoding="utf-8",
    )
    text = show(run_dir)
    for part in (
        "12/100  eta 2m56s",
        "0.61 in training   ▅▅   0.40 before training",
        "10 (stage 2/3)",
        "issued 100 = trained 60 + filtered 20 + stale 5 + failed 5 + in flight 10",
        "actor-0 2.00 GiB",
        "learner-77 waits for actor-0",
        "v11",
        "answered [bold]429[/bold]",
    ):
        assert part in text
    assert "fine" not in text
    assert "Triton" not in text  # what libraries warn of is for the logs
    assert "\x1b[2J answered" not in text


def test_display_shows_the_silence_of_the_scheduler(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    old_s = time.time() - 60
    os.utime(run_dir.status, (old_s, old_s))
    assert "scheduler silent for 1m0" in status_line(view_of(run_dir))


def test_display_without_terminal_logs_once_per_interval(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    display = display_of(make_run(tmp_path), console=Console(file=io.StringIO()))
    with caplog.at_level(logging.INFO):
        display.start()
        display.refresh()
        display.refresh()
        display.stop()
    assert [record.message[:11] for record in caplog.records] == ["step 12/100"]


def test_disabled_display_is_plain(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    assert not display_of(RunDir(root=tmp_path), console=console, is_wanted=False).is_live


def test_display_redirects_the_log_and_restores_it(tmp_path: Path) -> None:
    stream = sys.stderr
    handler = logging.StreamHandler(stream)
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    display = display_of(make_run(tmp_path), console=console)
    logging.getLogger().addHandler(handler)
    try:
        display.start()
        assert handler.stream is not stream
        display.stop()
        assert handler.stream is stream
    finally:
        logging.getLogger().removeHandler(handler)


def test_ledger_line_and_sparkline_match_hand_computation() -> None:
    assert ledger_line({"issued": 3, "trained": 2, "in_flight": 1, "lost": 0}) == (
        "issued 3 = trained 2 + in flight 1   lost 0"
    )
    assert ledger_line({}) == ""
    assert sparkline([0.0, 0.5, 1.0, 2.0]) == "▁▅██"
