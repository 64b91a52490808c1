"""The local launcher: a supervisor of subprocesses on this machine."""

import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType

from common.launch.base import EXIT_CONFIG_ERROR, EXIT_FAILED, EXIT_FINISHED, Ending, RoleSpec
from common.launch.guardian import Guardian
from common.launch.process import TAIL_LINES, ChildProcess, describe_exit, wait_until_ended

logger = logging.getLogger(__name__)

MAX_BACKOFF_S = 30.0
CALM_S = 60.0  # a role that ran so long starts again without delay
STOP_SHARES = (0.65, 0.8, 0.95)  # of the stop timeout, by when each rank must have ended


class LocalLauncher:
    """Supervises roles as subprocesses. Use from the main thread: it handles SIGINT and SIGTERM.

    Example:
        A learner killed with -9 is started again after its backoff. A learner that exits with 0
        ends the run: the others get `finish_grace_s` to leave by themselves, then SIGTERM rank by
        rank, then SIGKILL to their groups. SIGTERM to this process stops all at once in the same
        order; a second signal skips the waiting.
    """

    def __init__(
        self,
        *,
        stop_timeout_s: float = 10.0,
        finish_grace_s: float = 10.0,
        first_backoff_s: float = 1.0,
        poll_s: float = 0.1,
        on_poll_every_s: float = 0.5,
    ) -> None:
        self._stop_timeout_s = stop_timeout_s
        self._finish_grace_s = finish_grace_s
        self._first_backoff_s = first_backoff_s
        self._poll_s = poll_s
        self._on_poll_every_s = on_poll_every_s
        self._signals: list[int] = []
        self._roles: list[_Role] = []

    def run(self, specs: Sequence[RoleSpec], *, on_poll: Callable[[], None]) -> Ending:
        """Start the roles in order, keep them alive, stop all of them. See `Launcher.run`."""
        self._signals = []
        stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        previous = [signal.signal(number, self._note_signal) for number in stops]
        guardian = Guardian()
        backoff_s = self._first_backoff_s
        self._roles = [_Role(each, guardian, first_backoff_s=backoff_s) for each in specs]
        try:
            for role in self._roles:
                role.start()
            ending = self._watch(on_poll)
            if ending.exit_code == EXIT_FINISHED:
                # The roles that stop first end by themselves; the others serve until told to stop.
                first = min(role.spec.stop_rank for role in self._roles)
                ours = [role for role in self._roles if role.spec.stop_rank == first]
                alive = [role.process for role in ours if role.process is not None]
                self._wait(alive, deadline=time.monotonic() + self._finish_grace_s, num_signals=0)
            return ending
        finally:
            self._stop_all()
            guardian.close()
            for number, handler in zip(stops, previous, strict=True):
                signal.signal(number, handler)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _watch(self, on_poll: Callable[[], None]) -> Ending:
        """Keep the roles alive until the run ends in one way or another."""
        next_call = time.monotonic()
        while not self._signals:
            for role in self._roles:
                ending = role.check()
                if ending is not None:
                    return ending
            if time.monotonic() >= next_call:
                on_poll()
                next_call = time.monotonic() + self._on_poll_every_s
            time.sleep(self._poll_s)
        number = self._signals[0]
        return Ending(exit_code=128 + number, reason=f"stopped by {signal.Signals(number).name}")

    def _stop_all(self) -> None:
        """End everything, rank by rank, within the stop timeout."""
        started = time.monotonic()
        ranks = sorted({role.spec.stop_rank for role in self._roles})
        num_signals = len(self._signals)
        for i, rank in enumerate(ranks):
            share = STOP_SHARES[min(i, len(STOP_SHARES) - 1)]
            ours = [r for r in self._roles if r.spec.stop_rank == rank and r.process is not None]
            alive = [role.process for role in ours if role.process is not None]
            for process in alive:
                process.terminate()
            deadline = started + share * self._stop_timeout_s
            self._wait(alive, deadline=deadline, num_signals=num_signals)
            for role in ours:
                role.clear_away()

    def _wait(self, processes: list[ChildProcess], *, deadline: float, num_signals: int) -> None:
        """Wait until the processes have ended, the deadline has come or one more signal has."""
        while len(self._signals) <= num_signals and time.monotonic() < deadline:
            soon = min(deadline, time.monotonic() + self._poll_s)
            if wait_until_ended(processes, deadline=soon, poll_s=self._poll_s / 4):
                return


class _Role:
    """A spec, the process that runs it now, and when it may start again."""

    def __init__(self, spec: RoleSpec, guardian: Guardian, *, first_backoff_s: float) -> None:
        self.spec = spec
        self.process: ChildProcess | None = None
        self._guardian = guardian
        self._first_backoff_s = first_backoff_s
        self._backoff_s = first_backoff_s
        self._started_at = 0.0
        self._start_again_at = 0.0
        self._restarts: deque[float] = deque()

    def start(self) -> None:
        """Start the process."""
        self.process = ChildProcess(
            self.spec.name,
            self.spec.argv,
            log_path=self.spec.log_path,
            env=self.spec.env,
            guardian=self._guardian,
        )
        self._started_at = time.monotonic()
        logger.info("started role=%s pid=%d", self.spec.name, self.process.pid)

    def check(self) -> Ending | None:
        """Look after the process once; return how the run ends if this role ends it."""
        if self.process is None:
            if time.monotonic() >= self._start_again_at:
                self.start()
            return None
        code = self.process.poll()
        if code is None:
            return None
        ended = self.process
        self.clear_away()
        if code == 0 and self.spec.ends_run:
            return Ending(exit_code=EXIT_FINISHED, reason=f"{self.spec.name} finished")
        if code == EXIT_CONFIG_ERROR:
            last = (ended.log_tail(max_lines=1) or ["no output"])[0]
            return Ending(exit_code=EXIT_CONFIG_ERROR, reason=f"{self.spec.name}: {last}")
        if not self._may_restart():
            return self._failure(ended, code)
        self._plan_restart(code)
        return None

    def clear_away(self) -> None:
        """Kill what the process left behind and forget it."""
        if self.process is None:
            return
        if self.process.poll() is None:
            logger.warning("killing role=%s pid=%d", self.spec.name, self.process.pid)
        self.process.clear_away()
        self.process = None

    def _may_restart(self) -> bool:
        horizon = time.monotonic() - self.spec.restart_window_s
        while self._restarts and self._restarts[0] < horizon:
            self._restarts.popleft()
        return self.spec.is_restartable and len(self._restarts) < self.spec.max_restarts

    def _plan_restart(self, code: int) -> None:
        now = time.monotonic()
        if now - self._started_at > CALM_S:
            self._backoff_s = self._first_backoff_s
        wait_s = max(self._backoff_s, self.spec.quiet_exit_grace_s if code == 0 else 0.0)
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
        self._restarts.append(now)
        self._start_again_at = now + wait_s
        logger.warning(
            "role ended role=%s exit=%s restart=%d/%d in_s=%.1f",
            self.spec.name,
            describe_exit(code),
            len(self._restarts),
            self.spec.max_restarts,
            wait_s,
        )

    def _failure(self, ended: ChildProcess, code: int) -> Ending:
        tail = "\n".join(f"  {line}" for line in ended.log_tail(max_lines=TAIL_LINES))
        times = len(self._restarts)
        again = f" after {times} restarts" if times else ""
        reason = (
            f"{self.spec.name} failed{again}: {describe_exit(code)}\n{tail}\n"
            f"the whole log: {self.spec.log_path}"
        )
        return Ending(exit_code=EXIT_FAILED, reason=reason)
