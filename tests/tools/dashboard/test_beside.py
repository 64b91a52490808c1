"""Laws of the processes beside a run."""

import socket
import time
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest

from common.config.log import LogSection
from common.config.model import ModelSection
from common.config.run_config import RunConfig
from common.errors import ConfigError
from tests.tools.dashboard.runs import make_run
from tools.dashboard.beside import SideProcess, exporter, metrics_listener


def _wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _scrape(port: int, token: str) -> str:
    request = Request(f"http://127.0.0.1:{port}/metrics")
    request.add_header("Authorization", f"Bearer {token}")
    with urlopen(request, timeout=120) as answer:  # The socket is bound before it answers.
        return answer.read().decode()


@pytest.mark.slow
def test_exporter_serves_its_run_with_the_token_of_the_run(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", 0)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    process = exporter(run_dir, listener)
    try:
        process.poll()
        token = run_dir.keys / "metrics_token"
        assert token.stat().st_mode & 0o777 == 0o600
        page = _scrape(port, token.read_text(encoding="utf-8").strip())
        assert 'longstride_run_step{run="a"} 12.0' in page
        with pytest.raises(HTTPError, match="401"):
            _scrape(port, "wrong")
    finally:
        process.stop(timeout_s=60)
        listener.close()
    with pytest.raises(URLError):
        _scrape(port, "wrong")


@pytest.mark.slow
def test_ended_process_is_started_again_after_a_pause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    log = tmp_path / "x.log"
    process = SideProcess("x", ["--version"], log_path=log, now=lambda: now[0])

    def has_ended(num: int) -> bool:
        """Return whether the process has ended this often."""
        process.poll()
        return caplog.text.count("ended, the run continues") == num

    _wait_until(lambda: has_ended(1))
    now[0] = 1.9  # The restart is due at 2 s.
    process.poll()
    lines = log.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1
    now[0] = 2.0
    _wait_until(lambda: has_ended(2))
    assert log.read_text(encoding="utf-8").splitlines() == 2 * lines
    process.stop(timeout_s=60)
    now[0] = 1e9
    process.poll()
    assert log.read_text(encoding="utf-8").splitlines() == 2 * lines


def test_taken_metrics_port_is_refused_by_its_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cfg = RunConfig(model=ModelSection(path="m"), log=LogSection(metrics_port=port))
        with pytest.raises(ConfigError, match=rf"log\.metrics_port={port}"):
            metrics_listener(cfg)
