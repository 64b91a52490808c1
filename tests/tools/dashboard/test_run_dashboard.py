"""Laws of a dashboard beside a run: it ends with the run, and the run never with it."""

import json
import socket
import time
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

import psutil
import pytest

from tests.tools.dashboard.runs import make_run
from tools.dashboard.beside import run_dashboard


def _runs(url: str) -> list[str]:
    with urlopen(f"{url}api/runs", timeout=120) as answer:  # it is bound before it answers
        return [each["name"] for each in json.load(answer)]


@pytest.mark.slow
def test_dashboard_serves_until_its_run_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path / "a", 4)
    with run_dashboard(run_dir):
        url = capsys.readouterr().out.strip().removeprefix("dashboard: ")
        assert urlsplit(url).hostname == "127.0.0.1"
        assert _runs(url) == ["a"]
    with pytest.raises(URLError):
        urlopen(url, timeout=5)


@pytest.mark.slow
def test_run_continues_when_its_dashboard_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path / "a", 4)
    with run_dashboard(run_dir):
        child = _dashboard_process()
        child.kill()
        address = urlsplit(capsys.readouterr().out.strip().removeprefix("dashboard: "))
        deadline = time.monotonic() + 60
        while _is_open(address.port or 0):
            assert time.monotonic() < deadline
    assert not child.is_running()


def _dashboard_process() -> psutil.Process:
    """Return the child that serves. Its command line is empty for a moment while it starts."""
    deadline = time.monotonic() + 60
    while True:
        children = psutil.Process().children()  # Those of earlier tests may be zombies.
        living = [each for each in children if each.status() != psutil.STATUS_ZOMBIE]
        if found := [each for each in living if "dashboard" in each.cmdline()]:
            (child,) = found
            return child
        assert time.monotonic() < deadline, living


def _is_open(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def test_run_continues_without_a_dashboard(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path / "a", 0)
    run_dir.logs.write_text("a file where the logs would be", encoding="utf-8")
    with run_dashboard(run_dir):
        pass
    assert capsys.readouterr().out == ""
    assert "dashboard not started" in caplog.text
