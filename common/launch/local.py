"""Starts roles as subprocesses on this machine."""

import contextlib
import logging
from collections.abc import Generator

from common.host.loopback import loopback
from common.launch.base import RoleSpec
from common.launch.guardian import Guardian
from common.launch.process import ChildProcess

logger = logging.getLogger(__name__)


class LocalStarter:
    """Starts subprocesses that end with this process, even if it is killed."""

    def __init__(self, guardian: Guardian) -> None:
        self.host = loopback()
        self._guardian = guardian

    def start(self, spec: RoleSpec) -> ChildProcess:
        """Start a role. Its output is appended to its log."""
        argv = spec.argv
        log_path = spec.log_path
        guardian = self._guardian
        child = ChildProcess(spec.name, argv, log_path=log_path, env=spec.env, guardian=guardian)
        logger.info("started role=%s pid=%d", spec.name, child.pid)
        return child

    def memory_bytes(self) -> int:
        """Return 0: all roles are descendants of this process."""
        return 0


@contextlib.contextmanager
def start_here() -> Generator[LocalStarter]:
    """Yield the starter of roles on this machine."""
    guardian = Guardian()
    try:
        yield LocalStarter(guardian)
    finally:
        guardian.close()
