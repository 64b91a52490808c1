"""Services that are measured run as processes of their own: a hub, or the reference server."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from common.repository import ROOT
from common.store.run_dir import RunDir
from envhub.bench.client import Target

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0


class ServiceFailed(RuntimeError):
    """A service did not start, or did not stop when it was told to; holds its last words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A running service: where it listens, its process and its log."""

    target: Target
    process: subprocess.Popen[bytes]
    log: Path

    def rss_bytes(self) -> int:
        """Return the resident memory of the process, without its children."""
        return psutil.Process(self.process.pid).memory_info().rss

    def worker_rss_bytes(self) -> int:
        """Return the resident memory of all its children and their children."""
        total = 0
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += child.memory_info().rss
        return total

    def tail(self, num_chars: int = 1500) -> str:
        """Return the last words of the log."""
        return self.log.read_text(errors="replace")[-num_chars:]


@contextlib.contextmanager
def hub_process(
    envs: Sequence[str],
    *,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Generator[Service]:
    """Yield a hub that serves `envs`, started by `python run.py envhub`.

    Args:
        envs: names as in the registry.
        overrides: further settings, such as `envhub.session_lease_s=5`.
        environ: environment variables to add.

    Raises:
        ServiceFailed: it did not start; holds the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="longstride-bench-") as folder:
        run_dir = RunDir(root=Path(folder) / "hub")
        quoted = ",".join(f'"{name}"' for name in envs)
        argv = [sys.executable, "run.py", "envhub", f"run.dir={folder}", "run.name=hub"]
        argv += [
            "model.path=unset",
            "tasks=[]",
            f"envhub.envs=[{quoted}]",
            "log.level=WARNING",
            *overrides,
        ]
        log = Path(folder) / "log.txt"
        with _process(argv, log=log, environ=environ) as process:
            address = run_dir.addresses / "envhub"
            _wait(process, log=log, until=address.exists)
            token = (run_dir.keys / "hub_token").read_text().strip()
            target = Target(url=address.read_text().strip(), token=token)
            _wait(process, log=log, until=lambda: _accepts(target))
            yield Service(target=target, process=process, log=log)


@contextlib.contextmanager
def module_process(module: str, *, environ: Mapping[str, str] | None = None) -> Generator[Service]:
    """Yield a service that is started by `python -m <module> <port>`."""
    with tempfile.TemporaryDirectory(prefix="longstride-bench-") as folder:
        log = Path(folder) / "log.txt"
        target = Target(url=f"http://127.0.0.1:{_free_port()}")
        argv = [sys.executable, "-m", module, str(target.address[1])]
        with _process(argv, log=log, environ=environ) as process:
            _wait(process, log=log, until=lambda: _accepts(target))
            yield Service(target=target, process=process, log=log)


@contextlib.contextmanager
def _process(
    argv: list[str], *, log: Path, environ: Mapping[str, str] | None
) -> Generator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})},
        )
    try:
        yield process
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and whatever it left behind, by process id.

    Raises:
        ServiceFailed: it had to be killed.
    """
    children: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    is_late = False
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        is_late = True
        process.kill()
        process.wait()
    _, left = psutil.wait_procs(children, timeout=STOP_TIMEOUT_S)
    for child in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    if is_late or left:
        raise ServiceFailed(f"not stopped within {STOP_TIMEOUT_S:g} s, left {len(left)} children")


def _wait(process: subprocess.Popen[bytes], *, log: Path, until) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not until():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise ServiceFailed(f"not started: {log.read_text(errors='replace')[-1500:]}")
        time.sleep(0.05)


def _accepts(target: Target) -> bool:
    try:
        with socket.create_connection(target.address, timeout=1.0) as connection:
            connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            return connection.recv(16).startswith(b"HTTP/1.")
    except OSError:
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
