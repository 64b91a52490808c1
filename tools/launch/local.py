"""Starts roles as subprocesses on this machine."""

import contextlib
import logging
from collections.abc import Generator

from common.host.child_process import ChildProcess
from common.host.guardian import Guardian
from common.host.loopback import loopback
from common.store.run_dir import RunDir
from tools.launch.base import RoleSpec
from tools.launch.roles import command_of

logger = logging.getLogger(__name__)


class LocalStarter:
    """Starts subprocesses that end with this process, even if it is killed."""

    def __init__(self, guardian: Guardian, run_dir: RunDir | None) -> None:
        self.host = loopback()
        self._run_dir = run_dir
        self._guardian = guardian

    def start(self, spec: RoleSpec) -> ChildProcess:
        """Start a role. Its output is appended to its log."""
        run_dir = self._run_dir
        argv = spec.argv if run_dir is None else command_of(spec.argv, run_dir, spec.name)
        log_path = spec.log_path
        guardian = self._guardian
        child = ChildProcess(spec.name, argv, log_path=log_path, env=spec.env, guardian=guardian)
        logger.info("started role=%s pid=%d", spec.name, child.pid)
        return child

    def memory_bytes(self) -> int:
        """Return 0: all roles are descendants of this process."""
        return 0


@contextlib.contextmanager
def start_here(run_dir: RunDir | None = None) -> Generator[LocalStarter]:
    """Yield the starter of roles on this machine; `run_dir` may name another checkout for some."""
    guardian = Guardian()
    try:
        yield LocalStarter(guardian, run_dir)
    finally:
        guardian.close()
