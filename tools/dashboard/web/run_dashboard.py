"""The dashboard as a separate process of a run, which it never delays."""

import contextlib
import logging
import sys
from collections.abc import Callable, Generator
from pathlib import Path

from common.errors import ConfigError
from common.host.child_process import ChildProcess, describe_exit
from common.host.guardian import Guardian
from common.host.loopback import loopback
from common.store.run_dir import RunDir
from tools.dashboard.web.server import listen, url_of

logger = logging.getLogger(__name__)

STOP_S = 3.0


@contextlib.contextmanager
def run_dashboard(run_dir: RunDir, *, root: Path, echo: Callable[[str], None]) -> Generator[None]:
    """Serve the dashboard of a run during the context. A failure is only logged.

    Args:
        root: folder of `run.py`.
        echo: receives the page's address.
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
            argv = [sys.executable, str(root / "run.py"), *words]
            child = ChildProcess(name, argv, log_path=log, pass_fds=[fd], guardian=guardian)
            echo(f"dashboard: {url_of(listener, '')}")
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
