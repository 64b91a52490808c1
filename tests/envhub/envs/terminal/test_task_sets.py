"""Laws of sets of tasks by a name of Harbor's registry."""

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from common.config.envs import TerminalOptions
from common.errors import ConfigError
from envhub.envs.terminal.task_sets import find_task_set, load_task_set
from tests.envhub.envs.terminal.container_tasks import write_task

KEY = "envs.terminal.train"
# The command of Harbor, reduced to the words that the hub uses.
PROGRAM = """#!/bin/sh
echo "$@" >> "$0.calls"
[ "$2" = own@1.0 ] || { echo "Dataset '$2' not found"; exit 1; }
for last; do :; done
mkdir -p "$last/own" && cp -r TASKS/. "$last/own/"
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of tasks; the only program of the PATH is a `harbor` that offers them."""
    folder = tmp_path / "tasks"
    write_task(folder, "no-python")
    program = tmp_path / "bin" / "harbor"
    program.parent.mkdir()
    program.write_text(PROGRAM.replace("TASKS", str(folder)), encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return folder


def options(tmp_path: Path) -> TerminalOptions:
    return TerminalOptions(cache=str(tmp_path / "cache"))


def names(value: str, chosen: TerminalOptions) -> list[str]:
    loaded = load_task_set(KEY, value, options=chosen, has_images=True, has_containers=True)
    return [task.name for task in loaded]


def test_named_set_is_downloaded_once(tmp_path: Path, tasks: Path) -> None:
    chosen = replace(options(tmp_path), registry="http://127.0.0.1:9/registry.json")
    assert names("harbor:own@1.0", chosen) == ["no-python"]
    assert names("harbor:own@1.0", chosen) == ["no-python"]
    [call] = (tmp_path / "bin" / "harbor.calls").read_text(encoding="utf-8").splitlines()
    words = "download own@1.0 --export --registry-url http://127.0.0.1:9/registry.json --output-dir"
    assert call.startswith(words)


def test_absent_set_is_named_and_leaves_no_folder(tmp_path: Path, tasks: Path) -> None:
    with pytest.raises(ConfigError, match="harbor download failed: Dataset 'lost@2' not found"):
        names("harbor:lost@2", options(tmp_path))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lost@2.lock"]


def test_set_without_the_program_comes_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"own@1\.0 has no tasks, and the command harbor is"):
        names("harbor:own@1.0", options(tmp_path))
    write_task(tmp_path / "cache" / "org" / "own@1.0", "user")
    assert names("harbor:org/own@1.0", options(tmp_path)) == ["user"]


@pytest.mark.parametrize("value", ["harbor:own", "harbor:own@", "harbor:../own@1", "harbor:a b@1"])
def test_malformed_name_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match="the form is harbor:NAME@VERSION"):
        find_task_set(KEY, value, options(tmp_path))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_package_of_harbor_downloads_a_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = shutil.which("python3.12") or shutil.which("python3.13")
    if python is None:
        pytest.skip("the package harbor needs Python 3.12")
    bin_folder = tmp_path / "venv" / "bin"
    for words in (
        [python, "-m", "venv", str(tmp_path / "venv")],
        [str(bin_folder / "python"), "-m", "pip", "install", "-q", "harbor==0.25.0"],
    ):
        made = subprocess.run(words, capture_output=True, encoding="utf-8", check=False)
        if made.returncode != 0:
            pytest.skip(f"harbor cannot be installed: {made.stderr[-300:]}")
    registry = tmp_path / "registry.json"
    commit = repository(tmp_path / "repository")
    url = f"file://{tmp_path}/repository"
    task = {"name": "user", "git_url": url, "git_commit_id": commit, "path": "user"}
    row = {"name": "own", "version": "1.0", "description": "", "tasks": [task]}
    registry.write_text(json.dumps([row]), encoding="utf-8")
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    chosen = replace(options(tmp_path), registry=str(registry))
    assert names("harbor:own@1.0", chosen) == ["user"]


def repository(folder: Path) -> str:
    """Make a repository with a task, and return its commit."""
    write_task(folder, "user")
    git = ["git", "-C", str(folder), "-c", "user.email=a@b.c", "-c", "user.name=a"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    found = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, encoding="utf-8"
    )
    return found.stdout.strip()
