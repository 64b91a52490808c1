"""The launcher: starts and restarts the roles of a run, and stops them in order."""

import contextlib
import logging
import math
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence

from common.host.child_process import TAIL_LINES, describe_exit, find_error
from tools.launch.base import (
    EXIT_CONFIG_ERROR,
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_NOT_STARTED,
    Ending,
    LaunchState,
    RoleProcess,
    RoleSpec,
    RoleStarter,
    StallDetector,
)
from tools.launch.permanent_errors import MAX_LINES, PermanentError, permanent_error

logger = logging.getLogger(__name__)

MAX_BACKOFF_S = 30.0
RESTART_WINDOW_S = 600.0  # Restarts older than this are not counted.
JUST_S = 5.0  # An exit is detected within this time.
CALM_S = 30.0  # A role that ran for this long restarts with the shortest delay.
MAX_LAST_CHARS = 300  # Longest part of a role's last log line in the launcher's log.
AT_ONCE_FRAC = 0.1  # Shortest delay / first backoff; the role's descendants end within it.


class RoleSupervisor:
    """Supervises roles. Use it in the main thread, because it handles SIGINT and SIGTERM.

    Example:
        A learner killed with -9 is restarted after its backoff. A learner that exits with 0 ends
        the run: the other roles get `finish_grace_s` to exit, then SIGTERM rank by rank, then
        SIGKILL to their groups. SIGTERM to this process stops all roles at once in the same order.
        The learner gets `stop_timeout_s` to save; a second signal ends that wait.
    """

    def __init__(
        self,
        starter: RoleStarter,
        *,
        stop_timeout_s: Callable[[], float],
        quick_stop_s: float = 6.0,
        finish_grace_s: float = 10.0,
        first_backoff_s: float = 1.0,
        on_poll_every_s: float = 0.5,
        watch: StallDetector | None = None,
    ) -> None:
        """Start no role yet.

        Args:
            starter: starts and restarts the roles.
            stop_timeout_s: called at a stop; returns the seconds for roles that save data.
            quick_stop_s: seconds for every other role.
            watch: reports hanging roles and progress. Progress resets the restart budgets.
        """
        self._starter = starter
        self._stop_timeout_s = stop_timeout_s
        self._quick_stop_s = quick_stop_s
        self._finish_grace_s = finish_grace_s
        self._first_backoff_s = first_backoff_s
        self._on_poll_every_s = on_poll_every_s
        self._watch_stalls = watch
        self._next_poll = 0.0
        self._stop_deadline: float | None = None  # Unix time.
        self._signals: list[int] = []
        self._roles: list[_Role] = []

    def run(self, specs: Sequence[RoleSpec], *, on_poll: Callable[[LaunchState], None]) -> Ending:
        """Start the roles in order, restart and stop them; return when all have ended.

        Until then `on_poll` is called every `on_poll_every_s`.
        """
        self._on_poll = on_poll
        self._began_at = time.time()
        backoff_s = self._first_backoff_s
        watch = self._watch_stalls
        self._roles = [
            _Role(spec, self._starter, first_backoff_s=backoff_s, watch=watch) for spec in specs
        ]
        with _noted_signals() as (self._signals, self._wakeup):
            try:
                for role in self._roles:
                    role.start()
                ending = self._watch()
                if ending.exit_code == EXIT_FINISHED:
                    # The first rank ends by itself. The other roles serve until they are stopped.
                    grace_s = self._finish_grace_s
                    self._wait({role: grace_s for role in self._ranks()[0]}, num_signals=0)
                return ending
            finally:
                self._stop_all()

    def _watch(self) -> Ending:
        """Restart ended roles until the run ends; return its ending."""
        while not self._signals:
            last = next((each for each in self._roles if each.spec.ends_run), None)
            for role in self._roles:
                ending = role.check(last)
                if ending is not None:
                    return ending
            ending = self._end_stall()
            if ending is not None:
                return ending
            next_s = min((role.starts_in_s for role in self._roles), default=math.inf)
            self._await_event(min(self._on_poll_every_s, next_s))
        number = self._signals[0]
        return Ending(exit_code=128 + number, reason=f"stopped by {signal.Signals(number).name}")

    def _end_stall(self) -> Ending | None:
        """Kill hanging roles, so that they restart; return an ending if the run must stop."""
        if self._watch_stalls is None:
            return None
        running = {r.spec.name: r.process for r in self._roles if r.process and r.is_running}
        verdict = self._watch_stalls.poll(running)
        if verdict is None:
            return None
        if verdict.is_stop:
            return Ending(exit_code=EXIT_FAILED, reason=verdict.report)
        for name in verdict.restart:
            if name in running:
                logger.warning("killing role=%s: %s", name, verdict.report)
                running[name].clear_away()
        return None

    def _await_event(self, timeout_s: float) -> None:
        """Call `on_poll` if it is due, then wait for a signal, a child's end or the timeout."""
        if time.monotonic() >= self._next_poll:
            self._next_poll = time.monotonic() + self._on_poll_every_s
            running = {r.spec.name: r.process for r in self._roles if r.process and r.is_running}
            self._on_poll(
                LaunchState(
                    began_at=self._began_at,
                    started_at={n: p.started_at for n, p in running.items() if p.started_at},
                    stop_deadline=self._stop_deadline,
                    waiting={n: p.waits_for for n, p in running.items() if p.waits_for},
                )
            )
        if select.select([self._wakeup], [], [], max(0.0, timeout_s))[0]:
            self._wakeup.recv(4096)

    def _ranks(self) -> list[list["_Role"]]:
        """Return the roles with a process by rank, in the order of stopping."""
        ranks = sorted({role.spec.stop_rank for role in self._roles})
        return [
            [r for r in self._roles if r.spec.stop_rank == rank and r.process is not None]
            for rank in ranks
        ]

    def _stop_all(self) -> None:
        """End all roles, rank by rank. Each role gets its time to exit by itself."""
        num_signals = len(self._signals)
        for ours in self._ranks():
            limits = {role: self._quick_stop_s for role in ours}
            for role in ours:
                if role.is_running and role.spec.saves_at_stop:
                    limits[role] = self._stop_timeout_s()
                    self._stop_deadline = time.time() + limits[role]
                    self._next_poll = 0.0  # The display shows it at once.
                    text = "stopping: the %s may save for %.0f s; a second Ctrl-C ends it at once"
                    logger.info(text, role.spec.name, limits[role])
                if role.process is not None:
                    role.process.terminate()
            self._wait(limits, num_signals=num_signals)
            for role in ours:
                role.clear_away()

    def _wait(self, limits: Mapping["_Role", float], *, num_signals: int) -> None:
        """Wait until each role has ended or timed out, or until one more signal arrives."""
        began = time.monotonic()
        while len(self._signals) <= num_signals:
            waited_s = time.monotonic() - began
            left_s = [limit_s - waited_s for role, limit_s in limits.items() if role.is_running]
            if max(left_s, default=0.0) <= 0:
                return
            self._await_event(min(self._on_poll_every_s, max(left_s)))


@contextlib.contextmanager
def _noted_signals() -> Generator[tuple[list[int], socket.socket]]:
    """Yield the stop signals received so far, and a socket readable after a signal or SIGCHLD."""
    noted: list[int] = []
    wakeup, notified = socket.socketpair()
    notified.setblocking(False)
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {each: signal.signal(each, lambda n, _: noted.append(n)) for each in stops}
    previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda n, _: None)
    before = signal.set_wakeup_fd(notified.fileno(), warn_on_full_buffer=False)
    try:
        yield noted, wakeup
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in previous.items():
            signal.signal(number, handler)
        wakeup.close()
        notified.close()


class _Role:
    """A spec, its current process, and the time of its next start."""

    def __init__(
        self,
        spec: RoleSpec,
        starter: RoleStarter,
        *,
        first_backoff_s: float,
        watch: StallDetector | None,
    ) -> None:
        self.spec = spec
        self._watch = watch
        self._progress: object = None  # Progress at the last restart.
        self.process: RoleProcess | None = None
        self._starter = starter
        self._first_backoff_s = first_backoff_s
        self._backoff_s = AT_ONCE_FRAC * first_backoff_s
        self._start_again_at = 0.0
        self._left_beside: RoleProcess | None = None  # Run-ending process at the last exit with 0.
        self._restarted_at = -math.inf  # On the monotonic clock.
        self._restarts: deque[float] = deque()
        self._may_have_worked = False
        self._error: PermanentError | None = None  # Error of the last end.

    @property
    def is_running(self) -> bool:
        """Whether there is a process that has not ended."""
        return self.process is not None and self.process.poll() is None

    @property
    def starts_in_s(self) -> float:
        """Seconds until its restart; infinite while it has a process."""
        return math.inf if self.process else max(0.0, self._start_again_at - time.monotonic())

    def start(self) -> None:
        """Start the process."""
        self.process = self._starter.start(self.spec)

    def check(self, last: "_Role | None") -> Ending | None:
        """Check the process once; return the run's ending if this role ends the run.

        Args:
            last: the role whose end ends the run, if there is one.
        """
        if self.process is None:
            if time.monotonic() >= self._start_again_at:
                self._start_again(last.process if last is not None else None)
            return None
        code = self.process.poll()
        if code is None:
            return None
        ended = self.process
        self.clear_away()
        if code == 0 and self.spec.ends_run:
            return Ending(exit_code=EXIT_FINISHED, reason=f"{self.spec.name} finished")
        if code == EXIT_CONFIG_ERROR:
            error = find_error(ended.log_tail(max_lines=TAIL_LINES))
            reason = f"{self.spec.name}: {error.removeprefix('error: ')}"
            return Ending(exit_code=EXIT_CONFIG_ERROR, reason=reason)
        if reason := self._permanent_reason(ended, code):
            text = f"{self.spec.name} {reason} Log: {self.spec.log_path}"
            return Ending(exit_code=EXIT_FAILED, reason=text)
        if not self._may_restart():
            return self._failure(ended, code)
        self._plan_restart(ended, code)
        # A role whose exit is found just after the restart of `last` may have ended before it.
        has_left = code == 0 and last is not None and not last.has_just_restarted
        self._left_beside = last.process if has_left and last is not None else None
        return None

    @property
    def has_just_restarted(self) -> bool:
        """Whether the process is a recent restart."""
        return time.monotonic() - self._restarted_at < JUST_S

    def _start_again(self, last: RoleProcess | None) -> None:
        """Restart the process, unless the run is over and the process had exited normally.

        The restart is needed if the run-ending process `last` was itself restarted since then.
        """
        is_same = last is not None and last is self._left_beside and last.poll() is None
        if is_same and self._watch is not None and self._watch.is_over():
            self._start_again_at = time.monotonic() + self._first_backoff_s
            return
        self._restarted_at = time.monotonic()
        self.start()

    def clear_away(self) -> None:
        """Kill the remaining processes of the role and clear its process."""
        if self.process is None:
            return
        if self.process.poll() is None:
            logger.warning("killing role=%s", self.spec.name)
        self.process.clear_away()
        self.process = None

    def _permanent_reason(self, ended: RoleProcess, code: int) -> str:
        """Return why a restart does not mend this end; "" if it may.

        A role that may have worked is restarted: its failures are only counted.
        """
        before = self._error
        self._error = permanent_error(ended.log_tail(max_lines=MAX_LINES), code)
        is_start = code == EXIT_NOT_STARTED
        if not is_start:
            self._may_have_worked = True
        error = self._error
        if error is not None and error.ends_run:
            return f"ends the run: {error.text.rstrip('.')}."
        if error is None or (self._may_have_worked if is_start else self._has_worked()):
            return ""
        text = error.text.rstrip(".")
        if not is_start and error.is_certain:
            return f"cannot work: {text}. A restart does not mend this error."
        if before is None or before.key != error.key:
            return ""
        if is_start:
            return f"cannot start: {text}. Two starts failed with this error."
        return f"cannot work: {text}. It ended twice with this error, without a result."

    def _has_worked(self) -> bool:
        """Return whether this role may have had a result since the launcher began."""
        return self._watch is None or self._watch.has_worked(self.spec.name)

    def _may_restart(self) -> bool:
        """Return whether the role may restart: it has made progress, or few restarts are recent."""
        progress = self._watch.progress(self.spec.name) if self._watch else None
        if progress != self._progress:  # Progress resets the count.
            self._progress = progress
            self._restarts.clear()
        horizon = time.monotonic() - RESTART_WINDOW_S
        while self._restarts and self._restarts[0] < horizon:
            self._restarts.popleft()
        return self.spec.is_restartable and len(self._restarts) < self.spec.max_restarts

    def _plan_restart(self, ended: RoleProcess, code: int) -> None:
        """Set the time of the next start. The wait doubles with each quick failure."""
        now = time.monotonic()
        if ended.started_at is not None and time.time() - ended.started_at > CALM_S:
            self._backoff_s = AT_ONCE_FRAC * self._first_backoff_s
        wait_s = max(self._backoff_s, self.spec.quiet_exit_grace_s if code == 0 else 0.0)
        self._backoff_s = min(max(self._first_backoff_s, 2 * self._backoff_s), MAX_BACKOFF_S)
        self._restarts.append(now)
        self._start_again_at = now + wait_s
        if code == 0:  # Usually the run is over, and the learner is about to end, too.
            logger.info("role exited normally role=%s", self.spec.name)
            return
        logger.warning(
            "role ended role=%s exit=%s restart=%d/%d in_s=%.1f last=%s",
            self.spec.name,
            describe_exit(code),
            len(self._restarts),
            self.spec.max_restarts,
            wait_s,
            " ".join(ended.log_tail(max_lines=1))[:MAX_LAST_CHARS],
        )

    def _failure(self, ended: RoleProcess, code: int) -> Ending:
        """Return the ending of a run whose role failed for good."""
        tail = "\n".join(f"  {line}" for line in ended.log_tail(max_lines=TAIL_LINES))
        times = len(self._restarts)
        again = f" after {times} restarts" if times else ""
        reason = (
            f"{self.spec.name} failed{again}: {describe_exit(code)}\n{tail}\n"
            f"Log: {self.spec.log_path}"
        )
        return Ending(exit_code=EXIT_FAILED, reason=reason)
