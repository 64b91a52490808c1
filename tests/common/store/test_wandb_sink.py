"""Laws of the wandb sink."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.config.run_config import LogSection, WandbMode
from common.repository import ROOT
from common.store.wandb_sink import choose_mode, has_account

NOBODY = {"HOME": "/nonexistent"}
AUTO = LogSection(wandb=WandbMode.AUTO)


def test_auto_is_offline_when_nobody_is_logged_in() -> None:
    assert choose_mode(AUTO, NOBODY) is WandbMode.OFFLINE


def test_auto_is_online_when_the_environment_or_netrc_has_a_key(tmp_path: Path) -> None:
    assert choose_mode(AUTO, {**NOBODY, "WANDB_API_KEY": "k" * 40}) is WandbMode.ONLINE
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n login user\n password abc\n")
    assert choose_mode(AUTO, {"HOME": str(tmp_path)}) is WandbMode.ONLINE


def test_account_is_not_seen_when_the_netrc_file_is_of_another_host_or_broken(
    tmp_path: Path,
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine example.org\n login user\n password abc\n")
    assert not has_account({**NOBODY, "NETRC": str(netrc)})
    netrc.write_text("machine machine password")
    assert not has_account({**NOBODY, "NETRC": str(netrc)})


def test_online_goes_offline_instead_of_asking_when_nobody_is_logged_in() -> None:
    assert choose_mode(LogSection(wandb=WandbMode.ONLINE), NOBODY) is WandbMode.OFFLINE


@pytest.mark.parametrize("mode", [WandbMode.OFFLINE, WandbMode.DISABLED])
def test_wish_of_the_user_decides_when_a_key_is_there(mode: WandbMode) -> None:
    environ = {**NOBODY, "WANDB_API_KEY": "k" * 40}
    assert choose_mode(LogSection(wandb=mode), environ) is mode
    assert choose_mode(AUTO, {**environ, "WANDB_MODE": mode.value}) is mode


def run_sink(root: Path, script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    head = (
        "import sys, pathlib, logging\n"
        "logging.basicConfig(level='WARNING')\n"
        "from common.config.run_config import ModelSection, RunConfig\n"
        "from common.store.run_dir import RunDir\n"
        "from common.store.wandb_sink import WandbSink\n"
        "cfg = RunConfig(model=ModelSection(path='m'))\n"
        "run_dir = RunDir(root=pathlib.Path(sys.argv[1]))\n"
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB") and k != "NETRC"}
    home = root / "home"
    home.mkdir(parents=True)
    return subprocess.run(
        [sys.executable, "-c", head + script, str(root / "run")],
        cwd=ROOT,
        check=False,
        env={**kept, "HOME": str(home), **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
def test_sink_is_silent_and_writes_below_the_run_directory_without_an_account(
    tmp_path: Path,
) -> None:
    script = (
        "sink = WandbSink(run_dir, cfg)\n"
        "assert sink.mode.value == 'offline', sink.mode\n"
        "sink.log(1, {'reward/mean': 0.5})\n"
        "sink.log(2, {'reward/mean': 0.6})\n"
        "sink.close()\n"
        "sink.log(3, {'reward/mean': 0.7})\n"
    )
    done = run_sink(tmp_path, script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (log,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert b"reward/mean" in log.read_bytes()


@pytest.mark.slow
def test_sink_goes_on_offline_with_one_warning_when_wandb_does_not_answer(tmp_path: Path) -> None:
    script = (
        "sink = WandbSink(run_dir, cfg, init_timeout_s=2.0)\n"
        "assert sink.mode.value == 'offline', sink.mode\n"
        "sink.log(1, {'reward/mean': 0.5})\n"
        "sink.close()\n"
    )
    done = run_sink(tmp_path, script, WANDB_API_KEY="0" * 40, WANDB_BASE_URL="http://127.0.0.1:9")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("wandb failed") == 1
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.slow
def test_sink_disables_itself_with_one_warning_when_wandb_breaks_later(tmp_path: Path) -> None:
    script = (
        "sink = WandbSink(run_dir, cfg)\n"
        "import wandb\n"
        "wandb.finish()\n"
        "sink.log(1, {'reward/mean': 0.5})\n"
        "sink.log(2, {'reward/mean': 0.5})\n"
        "sink.close()\n"
    )
    done = run_sink(tmp_path, script)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("wandb failed") == 1
