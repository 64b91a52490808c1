"""Laws of the author's commands: a scaffold that works, play by hand."""

import io
import sys
from pathlib import Path

import pytest

from common.config.load import load_config
from common.repository import ROOT
from tests.in_process import carry_out
from tools.offline.config import SftConfig

Capture = pytest.CaptureFixture[str]

EXAMPLE = ROOT / "docs" / "examples" / "sort.py"


@pytest.mark.slow
def test_scaffold_of_forty_lines_passes_check_env(tmp_path: Path, capsys: Capture):
    made = carry_out(["new-env", "my_game", f"to={tmp_path}"], capsys)
    assert made.returncode == 0, made.stderr
    path, config = tmp_path / "my_game.py", tmp_path / "my_game.yaml"
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    assert len(lines) <= 48
    assert "sort" not in path.read_text(encoding="utf-8").lower().replace("sorted", "")
    cfg = load_config(str(config), [], schema=SftConfig)
    assert (cfg.run.name, cfg.tasks[0].env) == ("my_game", "my_game")
    assert cfg.envhub.envs == [f"{path}:make_spec"]
    assert cfg.model.path == cfg.sft.output == "runs/my_game-start/policy"
    checked = carry_out(["check-env", f"{path}:make_spec", "items=4"], capsys)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "FAIL" not in checked.stdout
    again = carry_out(["new-env", "my_game", f"to={tmp_path}"], capsys)
    assert (again.returncode, "exists already" in again.stderr) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["new-env", "Maze"], "lower case letters"),
        (["new-env", "maze"], "an environment of this name exists"),
        (["new-env"], "run.py new-env NAME"),
        (["check-env", "no/such.py:make_spec"], "no such file"),
        (["check-env", "textcarft"], "the nearest is 'textcraft'"),
        (["check-env", "textcraft", "items=x"], "items=x: must be a number from 1 to 100000"),
        (["play", "textcraft", "item=depth9-train-0"], "no subset 'depth9'"),
    ],
)
def test_wrong_author_command_ends_with_one_line(argv: list[str], words: str, capsys: Capture):
    done = carry_out(argv, capsys)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: ")
    assert words in done.stderr


@pytest.mark.slow
def test_play_reads_actions_from_a_pipe(capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    lines = "?\n!\n*\nnonsense\n" + "".join(f"{number}\n" for number in range(10))
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    done = carry_out(["play", f"{EXAMPLE}:make_spec", "item=four-train-0"], capsys)
    assert done.returncode == 0, done.stderr
    assert "invalid action" in done.stdout
    assert done.stdout.rstrip().endswith("[reward 1, ended, solved]")
    monkeypatch.setattr(sys, "stdin", io.StringIO("q\n"))
    left = carry_out(["play", f"{EXAMPLE}:make_spec"], capsys)
    assert left.returncode == 1
