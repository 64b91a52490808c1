"""Runs a hub as a separate process."""

import contextlib
import json
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.envhub.client import ServiceTarget
from common.host.child_process import ChildFailed, ChildProcess, wait_until_ended
from common.memory import resident_bytes
from common.repository import ROOT

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceProcess:
    """A running service: its target and its process."""

    target: ServiceTarget
    process: ChildProcess

    def rss_bytes(self) -> int:
        """Return the resident memory of the process, without its children."""
        return psutil.Process(self.process.pid).memory_info().rss

    def worker_rss_bytes(self) -> int:
        """Return the resident memory of all its descendants."""
        return resident_bytes([self.process.pid])[self.process.pid] - self.rss_bytes()


@contextlib.contextmanager
def hub_process(
    envs: Sequence[str], *, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Generator[ServiceProcess]:
    """Yield a hub that serves `envs`, started by `python run.py envhub`.

    Args:
        overrides: further settings, such as `envhub.session_idle_s=5`.
        environ: environment variables to add.

    Raises: ChildFailed: it did not start, or did not stop after SIGTERM.
    """
    token = secrets.token_urlsafe(16)
    argv = ["run.py", "envhub", f"envhub.envs={json.dumps(list(envs))}", f"token={token}"]
    with _running([*argv, "log.level=WARNING", *overrides], environ) as process:
        process.wait_until(lambda: _said_address(process) != "", timeout_s=START_TIMEOUT_S)
        target = ServiceTarget(url=_said_address(process), token=token)
        process.wait_until(lambda: _accepts(target), timeout_s=START_TIMEOUT_S)
        yield ServiceProcess(target=target, process=process)


def _said_address(process: ChildProcess) -> str:
    """Return the address that a hub has printed on its standard output, "" before that."""
    found = [line for line in process.log_tail(max_lines=100) if line.startswith("hub: ")]
    return found[0].split()[1] if found else ""


@contextlib.contextmanager
def _running(argv: list[str], environ: Mapping[str, str] | None) -> Generator[ChildProcess]:
    """Yield a service once it accepts requests; end it afterwards."""
    env = {"OMP_NUM_THREADS": "1", **(environ or {})}
    with tempfile.TemporaryDirectory(prefix="longstride-bench-") as folder:
        log_path = Path(folder) / "log.txt"
        argv = [sys.executable, *argv]
        child = ChildProcess("service", argv, log_path=log_path, env=env, cwd=ROOT)
        try:
            yield child
        finally:
            _stop(child)


def _stop(child: ChildProcess) -> None:
    """Stop a service, which must stop its own children.

    Raises: ChildFailed: some process did not end within the limit.
    """
    offspring: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        offspring = psutil.Process(child.pid).children(recursive=True)
    child.terminate()
    has_ended = wait_until_ended([child], deadline=time.monotonic() + STOP_TIMEOUT_S)
    _, left = psutil.wait_procs(offspring, timeout=STOP_TIMEOUT_S)
    child.clear_away()
    if left or not has_ended:
        raise ChildFailed(f"not stopped within {STOP_TIMEOUT_S:g} s, left {len(left)} children")


def _accepts(target: ServiceTarget) -> bool:
    """Return whether a service accepts requests."""
    try:
        with socket.create_connection(target.address, timeout=1.0) as connection:
            connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            return connection.recv(16).startswith(b"HTTP/1.")
    except OSError:
        return False
