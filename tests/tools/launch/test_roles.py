"""Laws of another checkout of the code for hubs and actors."""

import sys
from pathlib import Path

import pytest

from common.store.run_dir import RunDir
from tools.launch.roles import command_of

OWN = ("python", "/own/run.py", "actor", "run.dir=runs", "run.name=a", "actor.name=actor-0")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "run.py").touch()
    return folder


def test_actor_and_hub_start_from_the_named_checkout(tmp_path: Path, other: Path) -> None:
    run_dir = RunDir(root=tmp_path / "runs" / "a")
    run_dir.root.mkdir(parents=True)
    assert command_of(OWN, run_dir, "actor-0") == OWN
    run_dir.code.write_text(f"{other}\n", encoding="utf-8")
    expected = (
        sys.executable,
        f"{other}/run.py",
        "actor",
        f"run.dir={tmp_path / 'runs'}",
        "run.name=a",
        "actor.name=actor-0",
    )
    assert command_of(OWN, run_dir, "actor-0") == expected
    assert command_of(OWN, run_dir, "envhub")[1] == f"{other}/run.py"
    for name in ("scheduler", "learner"):
        assert command_of(OWN, run_dir, name) == OWN
    python = other / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert command_of(OWN, run_dir, "actor-0")[0] == str(python)


@pytest.mark.parametrize("text", ["", "other", "/nowhere"])
def test_wrong_checkout_is_logged_and_not_used(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = RunDir(root=tmp_path)
    run_dir.code.write_text(text, encoding="utf-8")
    assert command_of(OWN, run_dir, "actor-0") == OWN
    assert "is no absolute path of a checkout" in caplog.text
