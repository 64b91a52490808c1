"""Processes beside a run: the dashboard, the exporter of metrics, and the copies to a store."""

import contextlib
import logging
import secrets
import socket
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.host.child_process import ChildProcess, describe_exit
from common.host.guardian import Guardian
from common.host.loopback import loopback
from common.repository import CODE
from common.store.run_dir import RunDir, write_atomically
from common.wire.addresses import is_loopback
from tools.dashboard.web.server import listen, url_of

logger = logging.getLogger(__name__)

STOP_S = 3.0
FIRST_PAUSE_S = 1.0  # Seconds until the first restart. They double with each quick failure.
MAX_PAUSE_S = 60.0
CALM_S = 60.0  # A process that ran for this long restarts with the first pause.
TOKEN = "metrics_token"


@contextlib.contextmanager
def run_dashboard(run_dir: RunDir) -> Generator[None]:
    """Serve the dashboard of a run during the context. A failure is only logged.

    Args:
    """
    guardian = child = None
    log = run_dir.logs / "dashboard.log"
    try:
        guardian = Guardian()
        # Binding in this process gives the address at once.
        with listen(loopback(), "") as listener:
            fd = listener.fileno()
            name = "dashboard"
            where = f"run.dir={run_dir.root.parent}"
            words = [name, run_dir.root.name, where, f"fd={fd}", f"host={loopback()}"]
            argv = [sys.executable, str(CODE / "run.py"), *words]
            child = ChildProcess(name, argv, log_path=log, pass_fds=[fd], guardian=guardian)
            print(f"dashboard: {url_of(listener, '')}")
    except (OSError, ConfigError) as error:
        logger.warning("dashboard not started reason=%s", error)
    try:
        yield
    finally:
        if child is not None:
            if code := child.poll():
                logger.warning("dashboard process ended exit=%s log=%s", describe_exit(code), log)
            child.stop(timeout_s=STOP_S)
        if guardian is not None:
            guardian.close()


class SideProcess:
    """A process beside a run. It is restarted after it ended, and it never ends the run.

    Example: process.poll() starts it. It is killed -> a later poll() starts it again after a pause.
    """

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        *,
        log_path: Path,
        pass_fds: Sequence[int] = (),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start nothing yet; `words` are the arguments of run.py."""
        self._name = name
        self._argv = [sys.executable, str(CODE / "run.py"), *words]
        self._log_path = log_path
        self._pass_fds = pass_fds
        self._now = now
        self._child: ChildProcess | None = None
        self._start_at = now()
        self._started_at = 0.0
        self._pause_s = FIRST_PAUSE_S

    def poll(self) -> None:
        """Start the process if it is due, and plan its restart if it has ended."""
        child = self._child
        if child is not None and (code := child.poll()) is not None:
            is_calm = self._now() - self._started_at > CALM_S
            self._pause_s = FIRST_PAUSE_S if is_calm else min(MAX_PAUSE_S, 2 * self._pause_s)
            self._start_at = self._now() + self._pause_s
            text = "%s ended, the run continues exit=%s restart_in_s=%g log=%s"
            logger.warning(text, self._name, describe_exit(code), self._pause_s, self._log_path)
            child.clear_away()
            self._child = None
        if self._child is None and self._now() >= self._start_at:
            self._start()

    def _start(self) -> None:
        """Start the process; a failure is logged and retried."""
        self._started_at = self._now()
        self._start_at = self._started_at + MAX_PAUSE_S
        try:
            self._child = ChildProcess(
                self._name, self._argv, log_path=self._log_path, pass_fds=self._pass_fds
            )
        except OSError as error:
            logger.warning("%s not started, the run continues reason=%s", self._name, error)

    def stop(self, *, timeout_s: float) -> bool:
        """Stop the process; return whether it ended by itself in time, with exit code 0."""
        child = self._child
        self._child = None
        self._start_at = float("inf")
        if child is None:
            return False
        child.terminate()
        is_in_time = child.has_ended_by(time.monotonic() + timeout_s)
        code = child.poll()
        child.clear_away()
        return is_in_time and code == 0


def metrics_listener(cfg: RunConfig) -> socket.socket:
    """Return a socket for the exporter. Raises: ConfigError: the port is taken."""
    host = cfg.log.metrics_host
    return listen(
        loopback() if is_loopback(host) else host,
        str(cfg.log.metrics_port),
        keys=("log.metrics_host", "log.metrics_port"),
    )


def exporter(run_dir: RunDir, listener: socket.socket) -> SideProcess:
    """Return the process that answers scrapes at the socket. It reads the run's files only."""
    token = run_dir.keys / TOKEN
    token.parent.mkdir(exist_ok=True, mode=0o700)
    if not token.exists():
        write_atomically(token, secrets.token_urlsafe(24) + "\n", mode=0o600)
    fd = listener.fileno()
    words = [
        "dashboard",
        run_dir.root.name,
        f"run.dir={run_dir.root.parent}",
        f"fd={fd}",
        f"metrics_token_file={token}",
    ]
    return SideProcess("metrics", words, log_path=run_dir.logs / "metrics.log", pass_fds=[fd])


def copier(cfg: RunConfig, run_dir: RunDir) -> SideProcess:
    """Return the process that copies the run to a store."""
    words = [
        "journal",
        run_dir.root.name,
        "copy",
        f"run.dir={run_dir.root.parent}",
        f"to={cfg.journal.copy_to}",
        f"every_s={cfg.journal.copy_every_s:g}",
    ]
    return SideProcess("copies", words, log_path=run_dir.logs / "copies.log")
