"""Laws of the script that takes the pictures of the documentation."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest

from common.host.child_process import ChildProcess
from common.repository import ROOT
from common.wire.messages import EpisodeKind
from tests.tools.dashboard.runs import append, episode, make_run

START_S = 60.0
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH"),
]
_spec = importlib.util.spec_from_file_location("take", ROOT / "docs" / "pictures" / "take.py")
assert _spec is not None
assert _spec.loader is not None
take = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(take)


@pytest.fixture
def url(tmp_path: Path) -> Generator[str]:
    """Serve a run whose newest episodes are those of an evaluation, as of one that finished."""
    run_dir = make_run(tmp_path / "runs" / "a")
    evaluated = (replace(episode(number), kind=EpisodeKind.EVAL) for number in range(400, 404))
    append(run_dir, *(replace(each, group_id="eval-after-model") for each in evaluated))
    argv = [sys.executable, "run.py", "dashboard", "port=0", f"run.dir={run_dir.root.parent}", "a"]
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONUNBUFFERED": "1"}
    log = tmp_path / "dashboard.log"
    child = ChildProcess("dashboard", argv, log_path=log, env={**os.environ, **env}, cwd=ROOT)
    try:
        child.wait_until(lambda: "http://" in log.read_text(encoding="utf-8"), timeout_s=START_S)
        yield log.read_text(encoding="utf-8").split()[0]
    finally:
        child.stop(timeout_s=10.0)


@pytest.mark.long
def test_finished_run_pictures_show_a_training_group(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(take, "SIZES", {"light": (1280, 900)})
    monkeypatch.setattr(take, "VIEWS", {each: take.VIEWS[each] for each in ("run", "group")})
    take.main(url, tmp_path / "pictures", "a")
    found = sorted(each.name for each in (tmp_path / "pictures").iterdir())
    assert found == ["group-light.png", "run-light.png"]


@pytest.mark.long
def test_view_that_never_loads_is_named(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(take, "WAIT_MS", 1000)
    waits = {"run": lambda page: page.locator(".nothing").wait_for()}
    monkeypatch.setattr(take, "VIEWS", waits)
    with pytest.raises(SystemExit, match=r"^the view run of the run a \(light\): .*Timeout 1000ms"):
        take.main(url, tmp_path / "pictures", "a")


@pytest.mark.long
def test_missing_run_is_named_without_a_substitute(url: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^RUN=b: the dashboard has no such run\. It shows a\.$"):
        take.main(url, tmp_path / "pictures", "b")
