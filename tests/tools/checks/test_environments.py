"""Laws of the commands about environments, on the real command line."""

import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from common.config.load import load_config
from common.repository import ROOT
from tests.in_process import carry_out
from tools.checks.environments import missing_for, spell_out


def test_short_keys_are_those_of_the_hub():
    given = ["env=textcraft, a.b:make", "port=8080", "host=::", "token=t", "log.level=INFO"]
    assert spell_out(given) == [
        'envhub.envs=["textcraft", "a.b:make"]',
        "envhub.port=8080",
        "envhub.host=::",
        "envhub.token=t",
        "log.level=INFO",
    ]


def test_section_with_same_name_is_unchanged():
    assert spell_out(["env.url=http://h", "env.dialect=maze"]) == [
        "env.url=http://h",
        "env.dialect=maze",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["envhub", "env=textcarft"], "nearest is 'textcraft'"),
        (["envhub", "env=textcraft", "host=0.0.0.0"], "Set envhub.token"),
        (["envhub", "env=textcraft", "host=192.0.2.1", "token=a"], "cannot bind 192.0.2.1:0"),
        pytest.param(
            ["envhub", "env=no.such:make"], "No module named 'no'", marks=pytest.mark.long
        ),
        (["envhub", "prot=8080"], "prot"),
        pytest.param(["envs", "env=textcarft"], "nearest is 'textcraft'", marks=pytest.mark.long),
        (["--config", "smoke", "eval.split=validation"], "has no validation items; use eval.split"),
        (["--config", "smoke", "envhub.envs=[no.such:make]"], "No module named 'no'"),
    ],
)
def test_wrong_request_ends_with_one_line(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
):
    done = carry_out(argv, capsys)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


def test_missing_program_is_reported_at_once_with_a_remedy(tmp_path: Path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    argv = [sys.executable, "run.py", "envhub", "env=textcraft,sciworld"]
    env = {"PATH": str(tmp_path)}
    done = subprocess.run(
        argv, cwd=ROOT, env=env, capture_output=True, encoding="utf-8", timeout=240
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2
    # Unlike wall time, the same on a loaded machine.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0
    assert done.stderr.startswith("error: sciworld needs Java: apt install")
    assert done.stderr.count("\n") == 1


def test_list_shows_runnable_tasks_and_missing_requirements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    done = carry_out(["envs", "env=textcraft,sciworld"], capsys, environ={"PATH": str(tmp_path)})
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["SCENARIO", "TASK", "ENV"]
    assert any(line.endswith("yes") and "textcraft" in line for line in lines)
    assert any("no: sciworld needs Java" in line for line in lines)


def test_list_has_the_sizes_of_a_task(capsys: pytest.CaptureFixture[str]):
    done = carry_out(["envs", "env=tests.envhub.outside:make_worker"], capsys)
    row = next(line.split() for line in done.stdout.splitlines() if "fragile" in line)
    assert row == ["Tests", "Any", "fragile", "any", "1", "0", "1", "5", "yes"]


@pytest.mark.slow
def test_doctor_lists_optional_parts_without_failing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    done = carry_out(["doctor", "--config", "smoke"], capsys, environ={"PATH": str(tmp_path)})
    assert "opt  env sciworld" in done.stdout
    assert "-> sciworld needs Java: apt install" in done.stdout
    assert "opt  env miniwob" in done.stdout
    assert "ok   env textcraft" in done.stdout


@pytest.mark.slow
def test_harness_without_its_folder_lacks_nothing():
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # Sandboxes hide /tmp.
        Path(folder).chmod(0o755)
        cfg = load_config("harness", [f"actor.harnesses={folder}/harnesses"])
        assert missing_for(cfg) == []


@pytest.mark.parametrize("preset", ["terminal", "harness"])
def test_terminal_accepts_a_larger_context_alone(preset: str):
    cfg = load_config(preset, ["actor.max_model_len=32768"])
    assert cfg.learner.max_tokens_per_microbatch == 32_768
