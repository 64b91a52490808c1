"""The launcher's handle of a role that runs in a Ray worker."""

# Ray's types are partly unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import logging
import re
import signal
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from common.host.child_process import KILLED_S, read_tail
from tools.launch.base import EXIT_CONFIG_ERROR
from tools.launch.ray.host import RoleUpdate, WorkerAssignment, WorkerCommand

logger = logging.getLogger(__name__)

LOST = -signal.SIGKILL  # Exit code of a role whose node or worker has failed.
LOG_S = 30.0  # Seconds without a node after which the log names the role.
Step = Generator[Any, Any, int]


class RayProcess:
    """A role in its own Ray worker. Calls return at once, except for `clear_away` (seconds).

    Example:
        Ray finds a node, the worker reports its place, receives its order, and is followed until
        the role ends. If the node dies before, the role ends with the exit code of a kill.
    """

    def __init__(
        self,
        name: str,
        worker: Any,
        *,
        needs: str,
        log_path: Path,
        make_order: Callable[[WorkerAssignment], WorkerCommand | None],
        place_timeout_s: float | None = None,
    ) -> None:
        """Take over a Ray worker (`RoleHost`) that Ray may not have placed yet.

        Args:
            needs: text about the resources that it waits for.
            log_path: receives the role's output from another node.
            make_order: returns the order for a place, or None while information is missing.
            place_timeout_s: seconds after which an unplaced role exits with 2; None: never.
        """
        self.name = name
        self.started_at: float | None = None
        self.place: WorkerAssignment | None = None
        self.memory_bytes = 0
        self._worker = worker
        self._needs = needs
        self.log_path = log_path
        self._make_order = make_order
        self._deadline = time.monotonic() + (place_timeout_s or float("inf"))
        self._log_at = time.monotonic() + LOG_S
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_path.touch()
        self._log_offset = log_path.stat().st_size  # Bytes on this machine.
        self._num_read = 0  # Bytes of the log on the worker's node.
        self._is_ordered = False
        self._code: int | None = None
        self._life = self._follow_worker()
        self._answer = next(self._life)

    @property
    def waits_for(self) -> str:
        """The resource that the start waits for; "" after the start."""
        if self.started_at is not None or self._code is not None:
            return ""
        return self._needs if self.place is None else "scheduler: its address"

    def poll(self) -> int | None:
        """Return the exit code (negative: minus the signal); None while it runs."""
        while self._code is None:
            if self._answer is not None and not ray.wait([self._answer], timeout=0)[0]:
                self._check_deadline()
                break
            try:
                self._answer = self._life.send(self._answer and ray.get(self._answer))
            except StopIteration as error:
                self._code = error.value
            except RayError as error:
                self._end_lost(error)
            if self._answer is None:
                break
        return self._code

    def terminate(self) -> None:
        """Send SIGTERM to the role itself, not to its child processes."""
        if self._is_ordered:
            self._worker.terminate.remote()
        elif self._code is None:
            self._code = -signal.SIGTERM

    def request_stacks(self) -> None:
        """Make the role write its stacks to its log."""
        if self._is_ordered and self._code is None:
            self._worker.request_stacks.remote()

    def clear_away(self) -> None:
        """Kill the remaining processes of the role, and release its place."""
        if self._is_ordered and self._code != LOST:
            try:
                cleared = self._worker.clear_away.remote(self._num_read)
                self._apply_update(ray.get(cleared, timeout=2 * KILLED_S))
            except RayError as error:
                logger.error("cannot kill processes role=%s: %s", self.name, _first_line(error))
        ray.kill(self._worker)
        self._code = LOST if self._code is None else self._code

    def log_tail(self, *, max_lines: int) -> list[str]:
        """Return the last lines of its log since this start."""
        return read_tail(self.log_path, self._log_offset, max_lines=max_lines)

    def _follow_worker(self) -> Step:
        """Yield the next pending Ray result, or None if there is none; return the exit code."""
        self.place = yield self._worker.place.remote()
        assert self.place is not None
        while (order := self._make_order(self.place)) is None:
            yield None
        self._is_ordered = True
        pid = yield self._worker.start.remote(order)
        self.started_at = time.time()
        logger.info("started role=%s node=%s pid=%d", self.name, self.place.host, pid)
        while True:
            update: RoleUpdate = yield self._worker.follow.remote(self._num_read)
            self._apply_update(update)
            if update.exit_code is not None:
                return update.exit_code

    def _apply_update(self, update: RoleUpdate) -> None:
        """Take over the state and the log text of the worker."""
        self.memory_bytes = update.memory_bytes
        self._num_read += len(update.text)
        self._write(update.text)

    def _write(self, text: bytes) -> None:
        """Append text to the role's log."""
        with self.log_path.open("ab") as log:
            log.write(text)

    def _end_lost(self, error: RayError) -> None:
        """End the role, because its worker process or its node is lost."""
        where = f" node={self.place.host}" if self.place else ""
        logger.warning("lost role=%s%s: %s", self.name, where, _first_line(error))
        self._write(f"launcher: lost{where}: {error}\n".encode())
        self._code = LOST
        if _is_deterministic(error):
            cause = str(error).strip().splitlines()[-1]
            self._write(f"error: no Ray worker can run this role{where}: {cause}\n".encode())
            self._code = EXIT_CONFIG_ERROR

    def _check_deadline(self) -> None:
        """Log a role that Ray has not placed; end it if it must have a place by now."""
        if self.place is None and time.monotonic() > self._log_at:
            self._log_at = float("inf")
            logger.info("role=%s waits for %s", self.name, self._needs)
        if self.place is None and time.monotonic() > self._deadline:
            text = f"error: {self.name}: no node within ray.place_timeout_s for {self._needs}\n"
            self._write(text.encode())
            self._code = EXIT_CONFIG_ERROR


def _is_deterministic(error: RayError) -> bool:
    """Return whether the worker process cannot be created, so that no restart helps."""
    if isinstance(error, ImportError | FileNotFoundError | PermissionError):
        return True
    is_creation = isinstance(error, ActorDiedError) and "creation task" in str(error)
    return (
        is_creation and re.search(r"\b(ImportError|ModuleNotFoundError)\b", str(error)) is not None
    )


def _first_line(error: RayError) -> str:
    """Return the line of an error that names a node, or its first line."""
    lines = str(error).splitlines()
    return next((line for line in lines if "node" in line.lower()), lines[0] if lines else "")
