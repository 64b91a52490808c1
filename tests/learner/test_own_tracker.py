"""Laws of the user's own metrics logger."""

import logging
from pathlib import Path

import pytest

from common.config.load import load_config
from common.errors import ConfigError
from common.repository import ROOT
from common.store.run_dir import RunDir
from learner.trackers import check_trackers, open_trackers
from tests.in_process import carry_out

OWN = """
class Lines:
    "Writes lines."
    def __init__(self, run_dir, config):
        self.path = run_dir / "lines.txt"
        self.add(f"open {config['train.num_steps']}")
    def add(self, text):
        with self.path.open("a") as file: file.write(text + "\\n")
    def send(self, step, values): self.add(f"{step} {values}")
    def close(self): self.add("closed")

def made(run_dir, config): return Lines(run_dir, config)
class OneArgument:
    def __init__(self, run_dir): pass
    def send(self, step, values): pass
    def close(self): pass
class NoClose:
    def __init__(self, run_dir, config): pass
    def send(self, step, values): pass
def nothing(run_dir, config): pass
def unreachable(run_dir, config): raise OSError("no route")
def wrong(run_dir, config): return Lines(config)
class NoEnd(Lines):
    def close(self): raise RuntimeError("still open")
def open_end(run_dir, config): return NoEnd(run_dir, config)
class Waits(Lines):
    async def send(self, step, values): pass
class OnlyStep(Lines):
    def send(self, step): pass
def steps(run_dir, config): yield Lines(run_dir, config)
class Failing(Lines):
    def send(self, step, values): raise OSError("no server")
"""
LINES = ["open 3", "1 {'a': 0.5}", "2 {'a': 1.5}", "closed"]


@pytest.fixture
def own(tmp_path: Path) -> str:
    """The path of a file with the user's trackers."""
    path = tmp_path / "own_trackers.py"
    path.write_text(OWN, encoding="utf-8")
    return str(path)


def log_two_steps(reference: str, folder: Path) -> None:
    """Log two steps to a tracker, and close it."""
    cfg = load_config("smoke", [f"log.to=[{reference}]"])
    folder.mkdir(exist_ok=True)
    (sink,) = open_trackers(RunDir(root=folder), cfg, job="check")
    sink.log(1, {"a": 0.5})
    sink.log(2, {"a": 1.5})
    sink.close()


@pytest.mark.parametrize("name", ["Lines", "made"])
def test_own_tracker_gets_each_step(own: str, name: str, tmp_path: Path) -> None:
    log_two_steps(f"{own}:{name}", tmp_path / "run")
    assert (tmp_path / "run" / "lines.txt").read_text(encoding="utf-8").splitlines() == LINES


def test_example_writes_its_file(tmp_path: Path) -> None:
    cfg = load_config("smoke", ["log.to=[docs/examples/own_tracker.py:CsvTracker]"])
    (sink,) = open_trackers(RunDir(root=tmp_path), cfg, job="check")
    sink.log(1, {"reward/mean": 0.25, "loss": 1.0})
    sink.close()
    assert (tmp_path / "rewards.csv").read_text(encoding="utf-8") == "1,0.25\n"
    assert (ROOT / "docs/examples/own_tracker.py").is_file()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Failing", "OSError: no server"),
        ("nothing", "no method send and no"),
        ("unreachable", "OSError: no route"),
    ],
)
def test_failing_tracker_stops_no_run(
    own: str, name: str, text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        log_two_steps(f"{own}:{name}", tmp_path / "run")
    assert "the run continues without it" in caplog.text
    assert text in caplog.text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("OneArgument", r"is called with \(run_dir, config\)"),
        ("NoClose", "its tracker has no method close; expected"),
        ("Waits", "send is asynchronous; write `def`"),
        ("OnlyStep", r"is called with \(self, step, values\)"),
        ("steps", "is a generator; write `return`"),
        ("missing", "has no function 'missing'"),
        ("nothing", "its tracker has no method send and no method close"),
        ("wrong", "TypeError: "),
        ("open_end", "RuntimeError: still open"),
    ],
)
def test_check_names_key_function_and_fault(own: str, name: str, text: str) -> None:
    cfg = load_config("smoke", [f"log.to=[{own}:{name}]"])
    with pytest.raises(ConfigError, match=text) as raised:
        check_trackers(cfg, {})
    assert f"log.to={own}:{name}" in str(raised.value)


def test_function_without_its_server_is_a_warning_of_the_check(
    own: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_trackers(load_config("smoke", [f"log.to=[{own}:made]"]), {})
    assert "log.to" not in caplog.text
    check_trackers(load_config("smoke", [f"log.to=[{own}:unreachable]"]), {})
    assert f"log.to={own}:unreachable: OSError: no route" in caplog.text


@pytest.mark.slow
def test_dry_run_prints_the_tracker(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = carry_out(["--config", "smoke", f"log.to=[{own}:Lines]", "--dry-run"], capsys)
    assert done.returncode == 0, done.stderr
    assert f"# objective: log.to={own}:Lines: Writes lines. (sha256 " in done.stdout
