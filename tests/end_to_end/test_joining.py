"""Laws of `--join` as a command: wrong input exits with code 2, and a joined hub serves."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.config.envhub import EnvhubSection
from common.config.learner import LoraSection
from common.host.child_process import ChildProcess
from common.repository import ROOT
from common.store.run_dir import RunDir
from common.wire.security import create_keys
from scheduler.main import serve
from tests.configs import edited
from tests.end_to_end.runs import REPOSITORY
from tests.in_process import carry_out
from tests.scheduler.builders import make_config

pytestmark = pytest.mark.slow

WAIT_S = 60.0
TINY = "configs/policies/tiny"
WITH_BASE = f"model.path={TINY}"  # adapters alone are sent


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[RunDir]:
    """A scheduler without its own hubs; it has started once its log reports it."""
    cfg = make_config(num_steps=1, per_step=1)
    task = edited(cfg.tasks[0], {"env": "textcraft", "subset": "depth1"})
    cfg = edited(cfg, {"tasks": [task], "model.path": TINY, "learner.lora": LoraSection(rank=4)})
    cfg = replace(cfg, envhub=EnvhubSection(is_started=False))
    run_dir = RunDir(root=tmp_path / "r")
    create_keys(run_dir.keys)
    stop = threading.Event()
    thread = threading.Thread(target=serve, args=(cfg, run_dir, stop))
    thread.start()
    run_dir.wait_for_address("scheduler", timeout_s=WAIT_S)
    yield run_dir
    stop.set()
    thread.join(WAIT_S)


def joining(run_dir: RunDir, role: str, *overrides: str, key: Path | None = None) -> list[str]:
    address = (run_dir.addresses / "scheduler").read_text(encoding="utf-8").removeprefix("tcp://")
    key = key or run_dir.keys / "join.key"
    return [
        *(sys.executable, str(REPOSITORY / "run.py"), role),
        *("--join", address, "--key", str(key), *overrides),
    ]


def test_joining_hub_serves_run_and_exits_cleanly(run_dir: RunDir) -> None:
    log = run_dir.root / "hub.txt"
    hub = ChildProcess("hub", joining(run_dir, "envhub"), log_path=log, cwd=ROOT)
    try:
        hub.wait_until(run_dir.status.exists, timeout_s=WAIT_S)  # the run has begun
        os.kill(hub.pid, signal.SIGTERM)
        assert hub.stop(timeout_s=WAIT_S)
        assert hub.poll() == 0, log.read_text(encoding="utf-8")
    finally:
        hub.clear_away()


@pytest.mark.parametrize(
    ("role", "overrides", "words"),
    [
        ("actor", [WITH_BASE, "actor.max_concurent=4"], "the nearest is actor.max_concurrent"),
        pytest.param(
            "actor",
            [WITH_BASE, "actor.max_concurrent=0"],
            "actor.max_concurrent=0",
            marks=pytest.mark.long,
        ),
        ("envhub", ["envhub.envs=[nosuch]"], "nosuch"),
        ("actor", [], f"sends only adapters, without their base model {TINY}. Give model.pa"),
        pytest.param(
            "actor",
            ["model.path=docs"],
            "model.path=docs: lacks config.json, tokenizer files, *.sa",
            marks=pytest.mark.long,
        ),
    ],
)
def test_wrong_node_key_ends_before_any_start(
    run_dir: RunDir, role: str, overrides: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, *argv = joining(run_dir, role, *overrides)
    done = carry_out(argv, capsys)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert words in done.stderr
