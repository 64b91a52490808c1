"""Laws of the terminal display."""

import io
import json
import logging
import sys
from pathlib import Path

import pytest
from rich.console import Console

from common.config.curriculum import HorizonKind, HorizonSection
from common.config.run_config import RunConfig, TrainSection
from common.dashboard.live import LiveDisplay, ledger_line, sparkline, status_line
from common.dashboard.run_view import view_run
from common.store.run_dir import RunDir

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
    "learner": {"tokens_per_s": 7400.0, "waiting_for": "actor-0"},
    "success": {"depth2": 0.5},
    "eval": {"before": 0.4},
}


def make_config() -> RunConfig:
    return RunConfig(
        train=TrainSection(num_steps=100),
        horizon=HorizonSection(kind=HorizonKind.STEPWISE, stages=[5, 10, 20]),
    )


def make_run(root: Path) -> RunDir:
    run_dir = RunDir(root=root)
    run_dir.logs.mkdir(parents=True)
    run_dir.status.write_text(json.dumps(STATUS))
    lines = [
        {"step": 11, "time_s": 100.0, "reward/success": 0.6, "offpolicy/lag_mean": 0.8},
        {
            "step": 12,
            "time_s": 102.0,
            "reward/success": 0.62,
            "offpolicy/lag_mean": 0.9,
        },
    ]
    run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_dir


def show(run_dir: RunDir, cfg: RunConfig) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    display = LiveDisplay(run_dir, cfg, console=console)
    display.start()
    display.refresh()
    display.stop()
    display.stop()
    return console.file.getvalue()


def test_status_line_says_what_goes_on_and_who_waits_for_whom(tmp_path: Path) -> None:
    line = status_line(view_run(make_run(tmp_path), make_config()))
    assert line == (
        "step 12/100 success 0.61 horizon 10 (stage 2/3) lag 0.9 actor 3200 tok/s"
        " learner 7400 tok/s groups 18 open 3 ready eta 2m56s; waiting: learner <- actor-0"
    )


def test_status_line_leaves_out_what_is_not_known(tmp_path: Path) -> None:
    line = status_line(view_run(RunDir(root=tmp_path / "none"), make_config()))
    assert line == "starting step 0/100"


@pytest.mark.parametrize(
    "status",
    ["", "{", "[]", "null", '{"actors": 3, "groups": [], "learner": "x", "ledger": 1}',
     '{"actors": [null, {"running": ["a", "b"]}], "version": "x", "success": {"a": null}}'],
)  # fmt: skip
def test_display_goes_on_when_the_status_is_not_what_it_should_be(
    tmp_path: Path, status: str
) -> None:
    run_dir = RunDir(root=tmp_path)
    run_dir.status.write_text(status)
    run_dir.metrics.write_text('{"step": "x", "time_s": null}\n3\n{"st\n')
    assert "longstride" in show(run_dir, make_config())


def test_display_shows_progress_ledger_roles_and_warnings(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    (run_dir.logs / "actor-0.log").write_text(
        "2026-01-01 10:00:00,1 I actor-0 x: fine\n"
        "2026-01-01 10:00:01,1 W actor-0 x: hub \x1b[2J answered [bold]429[/bold]\n"
    )
    text = show(run_dir, make_config())
    for part in (
        "12/100  eta 2m56s",
        "0.61 train   ▅▅   0.40 before",
        "10 (stage 2/3)",
        "issued 100 = trained 60 + filtered 20 + stale 5 + failed 5 + in flight 10",
        "actor-0 2.00 GiB",
        "learner <- actor-0",
        "v11",
        "answered [bold]429[/bold]",
    ):
        assert part in text
    assert "fine" not in text
    assert "\x1b[2J answered" not in text


def test_display_says_how_long_the_scheduler_is_silent(tmp_path: Path) -> None:
    import os
    import time

    run_dir = make_run(tmp_path)
    old_s = time.time() - 60
    os.utime(run_dir.status, (old_s, old_s))
    assert "scheduler silent for 1m0" in status_line(view_run(run_dir, make_config()))


def test_display_logs_one_line_per_interval_when_there_is_no_terminal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    display = LiveDisplay(make_run(tmp_path), make_config(), console=Console(file=io.StringIO()))
    with caplog.at_level(logging.INFO):
        display.start()
        display.refresh()
        display.refresh()
        display.stop()
    assert [record.message[:11] for record in caplog.records] == ["step 12/100"]


def test_display_is_plain_on_a_terminal_when_the_user_says_so(tmp_path: Path) -> None:
    cfg = make_config()
    cfg.log.live = False
    console = Console(file=io.StringIO(), force_terminal=True)
    assert not LiveDisplay(RunDir(root=tmp_path), cfg, console=console).is_live


def test_display_takes_the_log_to_its_terminal_and_gives_it_back(tmp_path: Path) -> None:
    stream = sys.stderr
    handler = logging.StreamHandler(stream)
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    display = LiveDisplay(make_run(tmp_path), make_config(), console=console)
    logging.getLogger().addHandler(handler)
    try:
        display.start()
        assert handler.stream is not stream
        display.stop()
        assert handler.stream is stream
    finally:
        logging.getLogger().removeHandler(handler)


def test_ledger_line_and_sparkline_by_hand() -> None:
    assert ledger_line({"issued": 3, "trained": 2, "in_flight": 1, "lost": 0}) == (
        "issued 3 = trained 2 + in flight 1   lost 0"
    )
    assert ledger_line({}) == ""
    assert sparkline([0.0, 0.5, 1.0, 2.0]) == "▁▅██"
