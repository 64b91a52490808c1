"""Detects hanging roles and runs without progress, reports them, and decides on restarts."""

import contextlib
import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import psutil

from actor.rollout.pool import FOR_AGENTS
from common.config.run import OnStall, RunSection
from common.host.child_process import ChildProcess
from common.ids import process_of
from common.stall.report import RoleActivity, culprits, describe, read_activity, waits
from common.stall.stacks import MAX_STACKS_BYTES, ask, helpers_of
from common.store.disk import if_room
from common.store.run_dir import RunDir, write_atomically
from learner.teacher.scores import TEACHER
from tools.launch.base import RoleProcess, StallVerdict

MAX_BYTES = 60_000  # Maximum bytes of one process's stacks in a report.
STACKS_SUFFIX = ".stacks"


def request_role_stacks(
    folder: Path, name: str, activity: RoleActivity | None, process: RoleProcess
) -> dict[str, tuple[Path, int]]:
    """Request stacks from a role and its helpers; return each one's file and start offset.

    A remote role gets the request through its starter, and its stacks appear in its log.
    """
    if activity is None:
        if not isinstance(process, RemoteRole):
            return {}
        offset = _size(process.log_path)
        process.request_stacks()
        return {f"{name}, in its log": (process.log_path, offset)}
    if isinstance(process, ChildProcess):
        is_it = process.pid == activity.pid
    else:  # A process id of another node may belong to any process here.
        is_it = "run.py" in " ".join(_command_of(activity.pid))
    if not is_it:
        return {}
    path = folder / f"{name}.stacks"
    asked = {name: (path, _size(path))}
    ask(activity.pid)
    for helper, pid in helpers_of(folder, name).items():
        offset = _size(helper)
        if activity.pid in _ancestors(pid) and ask(pid):
            asked[f"{name}, process {pid} {' '.join(_command_of(pid))[:60]}"] = (helper, offset)
    return asked


@runtime_checkable
class RemoteRole(Protocol):
    """A role whose starter can forward a request for stacks."""

    @property
    def log_path(self) -> Path:
        """File that receives the role's output."""
        ...

    def request_stacks(self) -> None:
        """Make the role write its stacks to its log."""
        ...


def stacks_since(path: Path, offset: int) -> str:
    """Return the text of a file from `offset` on; "" if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""


def cut_stacks(path: Path) -> None:
    """Empty a file of stacks above the size limit. Its writers append."""
    if path.suffix == STACKS_SUFFIX and _size(path) > MAX_STACKS_BYTES:
        with contextlib.suppress(OSError):
            os.truncate(path, 0)


def _size(path: Path) -> int:
    """Return the size of a file in bytes; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _command_of(pid: int) -> list[str]:
    """Return the command line of a process; [] if it has ended."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).cmdline()
    return []


def _ancestors(pid: int) -> list[int]:
    """Return the ids of a process's parent, its parent, and so on."""
    with contextlib.suppress(psutil.Error):
        return [each.pid for each in psutil.Process(pid).parents()]
    return []


logger = logging.getLogger(__name__)

POLL_S = 1.0
ROOM_BYTES = 256 * 1024  # Free disk space that roles need; below it the run waits.
ASLEEP_S = 5.0  # A longer gap between two checks is a suspension of this process.
OLD_S = 10.0  # Age at which a status file counts as outdated.
IMPORT_S = 300.0  # Time for a role to import its libraries, before its first report.
STACKS_S = 1.5  # Time for a local role to write its stacks.
FAR_STACKS_S = 6.0  # Time for the stacks of a role on another node to arrive.
FACTOR = 3.0  # Multiple of the longest measured duration that counts as a stall.
BY_OTHERS = ("scheduler", "learner")  # An actor that waits for these has no turn in progress.
_NONE: dict[str, Any] = {}
MAX_REPORTS = 50  # Number of reports that are kept.
MAX_ATTEMPTS = 3  # Restarts for a run without progress, before the run is stopped.


@dataclass(slots=True)
class _CollectedStall:
    """A detected stall whose stacks are being collected."""

    culprits: list[str]
    text: str
    found_at: float
    asked: dict[str, tuple[Path, int]]  # Name -> (file of its stacks, start offset).


class StallWatch:
    """Checks the reports of all roles once a second.

    A role hangs if it writes no report for longer than `run.stall_s`. It also hangs if one piece of
    work takes longer than `run.stall_s` and three times the longest earlier piece of its kind. A
    run makes no progress if the counts of its ledger stay the same for longer than `run.stall_s`
    and three times the longest earlier pause. The roles at the end of the chain of waits are then
    the culprits.

    Example: the learner is stopped by a signal. After `run.stall_s` all roles are asked for their
    stacks, the report is written, and the launcher kills and restarts the learner.
    """

    def __init__(
        self, run_dir: RunDir, cfg: RunSection, *, turn_s: float, episode_s: float = 0.0
    ) -> None:
        """Start without observations.

        Args:
            turn_s: longest allowed turn of an episode.
            episode_s: deadline of an episode, which ends one whose agent is silent.
        """
        self._run_dir = run_dir
        self._cfg = cfg
        self._turn_s = turn_s
        self._episode_s = episode_s
        self._polled_at = time.monotonic()
        self._awake_s = 0.0  # Seconds of this watch without suspensions.
        self._changed: dict[str, tuple[float, float]] = {}  # Role -> (report time, awake seconds).
        self._progress: tuple[object, float] = (None, 0.0)  # Counts, and their last change.
        self._longest_s = 0.0  # Longest phase without progress that ended by itself.
        self._case: _CollectedStall | None = None
        self._reported_until: dict[str, float] = {}  # Culprits -> time of the next report.
        self._num_attempts = 0
        self._first: tuple[int, int] | None = None  # Counts of the first status.

    def progress(self, role: str) -> object:
        """Return a value that changes as a role makes progress; for the restart budgets."""
        status = self._status()
        if role == "learner":
            return status.get("version")
        return _counts(status)

    def has_worked(self, role: str) -> bool:
        """Return whether the run has had a result since this launcher began.

        The result of the learner is a version. That of the other roles is a finished episode.
        """
        self._note_first(self._status())
        if self._first is None:
            return False
        learnt, played = _results(self._status())
        return learnt != self._first[0] or (role != "learner" and played != self._first[1])

    def _note_first(self, status: Mapping[str, Any]) -> None:
        """Keep the counts of the first status, from which results are counted."""
        if self._first is None and status:
            self._first = _results(status)

    def is_over(self) -> bool:
        """Return whether the scheduler has reported the end of the run."""
        return self._status().get("phase") == "done"

    def poll(self, processes: Mapping[str, RoleProcess]) -> StallVerdict | None:
        """Return the action against a stall; None without a stall. Frequent calls are cheap."""
        now = time.monotonic()
        slept_s = now - self._polled_at
        if slept_s < POLL_S:
            return None
        self._polled_at = now
        room = self._run_dir.root / ".room"
        if not if_room(lambda: _try_room(room), room):
            return None  # The roles wait for disk space and cannot write reports.
        self._awake_s += min(slept_s, ASLEEP_S)
        if self._case is not None:
            return self._close(processes, self._case) if self._has_stacks(self._case, now) else None
        activities = {name: self._activity_of(name, process) for name, process in processes.items()}
        status = self._status()
        self._note_first(status)
        problem = self._find(processes, activities, status, now)
        if problem is not None:
            self._open(processes, problem, activities, status, now)
        return None

    # --- detection ----------------------------------------------------------------------------

    def _activity_of(self, name: str, process: RoleProcess) -> RoleActivity | None:
        """Return the report of this process, not of an earlier process with its name."""
        activity = read_activity(self._run_dir, name)
        started_at = process.started_at
        if activity is None or started_at is None or activity.began_at < started_at - 1.0:
            self._changed.pop(name, None)
            return None
        if self._changed.get(name, (0.0, 0.0))[0] != activity.written_at:
            self._changed[name] = (activity.written_at, self._awake_s)
        return activity

    def _find(
        self,
        processes: Mapping[str, RoleProcess],
        activities: Mapping[str, RoleActivity | None],
        status: Mapping[str, Any],
        now: float,
    ) -> tuple[list[str], str] | None:
        """Return (culprits, description) of the first stall that is found; None without one."""
        for name, activity in activities.items():
            if activity is not None:
                what = self._hang_reason(name, activity, now)
            else:
                what = self._silence_reason(name, processes[name], status)
            if what:
                return [name], f"{name} hangs: {what}"
        return self._idle_reason(activities, status)

    def _hang_reason(self, name: str, activity: RoleActivity, now: float) -> str:
        """Return why a role hangs, by its own reports; "" if it does not."""
        stall_s = self._cfg.stall_s
        silent_s = self._awake_s - self._changed[name][1]
        if silent_s > stall_s:
            return f"it has written no report for {silent_s:.0f}s (run.stall_s={stall_s:g})"
        for line_name, line in activity.lines.items():
            limit_s = max(stall_s, FACTOR * line.longest_s, line.limit_s or 0.0)
            same_s = min(now, activity.written_at) - line.since
            if not line.waits_for and same_s > limit_s:
                what = f"{line_name} has been in {line.what!r} for {same_s:.0f}s"
                return f"{what}, the limit is {limit_s:.0f}s"
        return ""

    def _silence_reason(self, name: str, process: RoleProcess, status: Mapping[str, Any]) -> str:
        """Return how long a role without a local report has been silent; "" if that is normal."""
        actors: list[Any] = status.get("actors", [])
        started_at = process.started_at
        now = time.time()
        if started_at is None or now - started_at < self._cfg.stall_s:
            return ""
        is_here = isinstance(process, ChildProcess)
        if is_here and now - started_at > max(self._cfg.stall_s, IMPORT_S):
            return f"it has written no report since its start {now - started_at:.0f}s ago"
        if is_here or self._is_old(now):
            return ""
        for member in actors:
            silent_s = float(member.get("last_seen_s", 0.0))
            if member.get("name") == name and silent_s > self._cfg.stall_s:
                return f"the scheduler has received nothing from it for {silent_s:.0f}s"
        return ""

    def _idle_reason(
        self, activities: Mapping[str, RoleActivity | None], status: Mapping[str, Any]
    ) -> tuple[list[str], str] | None:
        """Return the roles to blame and the reason if the run makes no progress; else None."""
        counts = _counts(status)
        since = self._progress[1]
        if counts != self._progress[0] or status.get("phase") == "done":
            is_first = self._progress[0] is None
            self._longest_s = max(self._longest_s, 0.0 if is_first else self._awake_s - since)
            self._progress = (counts, self._awake_s)
            self._num_attempts = 0
            return None
        starting = {name for name, each in activities.items() if each and _is_starting(each)}
        engines = {name for name in activities if name.startswith("actor")}
        if starting - engines or (engines and starting >= engines):
            self._progress = (counts, self._awake_s)  # The start has its own time limit.
            return None
        if any(hub.get("paused") for hub in status.get("hubs", [])):
            self._progress = (counts, self._awake_s)  # A service outside of the run is down.
            return None
        learner: Any = status.get("learner") or _NONE
        if str(learner.get("waiting_for", "")).startswith(TEACHER):
            self._progress = (counts, self._awake_s)  # The teacher is down; it is probed.
            return None
        if _is_in_step(activities):
            self._progress = (counts, self._awake_s)  # A step has a limit for each microbatch.
            return None
        waiting = waits(activities, status)
        limit_s = max(self._cfg.stall_s, FACTOR * self._longest_s)
        members: list[Any] = status.get("actors", [])
        actors = [each for each in members if not each.get("is_dead")]
        if any(not each.get("waiting_for", "").startswith(BY_OTHERS) for each in actors):
            limit_s = max(limit_s, self._turn_s)  # The turn in progress has its own time limit.
        if any(each.get("waiting_for", "").startswith(FOR_AGENTS) for each in actors):
            # A silent agent ends by the deadline of its episode, which is a change.
            limit_s = max(limit_s, self._episode_s + self._cfg.stall_s)
        youngest_s = min((each.get("unchanged_s", limit_s) for each in actors), default=limit_s)
        still_s = min(self._awake_s - since, youngest_s)
        if still_s <= limit_s:
            return None
        ends = dict.fromkeys(process_of(name) for name in culprits(waiting, status))
        blamed = [name for name in ends if name in activities]
        return blamed, f"the run has finished no episode and no step for {still_s:.0f}s"

    # --- reports and actions ------------------------------------------------------------------

    def _open(
        self,
        processes: Mapping[str, RoleProcess],
        problem: tuple[list[str], str],
        activities: Mapping[str, RoleActivity | None],
        status: Mapping[str, Any],
        now: float,
    ) -> None:
        """Request the stacks of all roles, unless this stall has been reported recently."""
        blamed, what = problem
        key = ",".join(blamed)
        if self._awake_s < self._reported_until.get(key, 0.0):
            return
        waiting = waits(activities, status)
        lines = [
            f"stall: {what}",
            "activity of all roles:",
            *describe(activities, status, waiting, now),
        ]
        asked: dict[str, tuple[Path, int]] = {}
        for name, activity in activities.items():
            asked |= request_role_stacks(self._run_dir.alive, name, activity, processes[name])
        self._case = _CollectedStall(blamed, "\n".join(lines), now, asked)

    def _has_stacks(self, case: _CollectedStall, now: float) -> bool:
        """Return whether all stacks have arrived, or the time for them is over."""
        waited_s = now - case.found_at
        is_missing = any(not stacks_since(*asked) for asked in case.asked.values())
        return waited_s >= (FAR_STACKS_S if is_missing else STACKS_S)

    def _close(self, processes: Mapping[str, RoleProcess], case: _CollectedStall) -> StallVerdict:
        """Write the report; return the action against the stall."""
        self._case = None
        parts = [case.text, "probable cause: " + (", ".join(case.culprits) or "unknown")]
        for name, (asked, offset) in case.asked.items():
            stacks = stacks_since(asked, offset)
            parts.append(f"--- stacks of {name}\n{stacks or 'none: the process does not respond'}")
            cut_stacks(asked)
        self._run_dir.stalls.mkdir(exist_ok=True)
        path = self._run_dir.stalls / f"{time.strftime('%Y%m%d-%H%M%S')}.txt"
        write_atomically(path, "\n".join(parts) + "\n")
        for old in sorted(self._run_dir.stalls.glob("*.txt"))[:-MAX_REPORTS]:
            old.unlink(missing_ok=True)
        policy = self._cfg.on_stall
        logger.error("%s\nstacks of all roles: %s; run.on_stall=%s", case.text, path, policy.value)
        key = ",".join(case.culprits)
        self._reported_until[key] = self._awake_s + self._cfg.stall_s
        summary = case.text.partition("\n")[0]
        self._num_attempts += 1
        if policy is OnStall.WARN:
            return StallVerdict(report=summary)
        is_hopeless = self._num_attempts > MAX_ATTEMPTS and "hangs" not in summary
        if policy is OnStall.STOP or is_hopeless:
            return StallVerdict(report=f"{summary}; report: {path}", is_stop=True)
        self._progress = (self._progress[0], self._awake_s)
        to_restart = case.culprits if self._num_attempts == 1 else list(processes)
        if len(case.culprits) == 1 and "hangs" in summary:
            to_restart = case.culprits
        return StallVerdict(report=summary, restart=to_restart)

    def _is_old(self, now: float) -> bool:
        """Return whether the status file has not been written recently."""
        try:
            return now - self._run_dir.status.stat().st_mtime > OLD_S
        except OSError:
            return True

    def _status(self) -> dict[str, Any]:
        """Return the content of status.json; {} if it is missing or damaged."""
        try:
            status: dict[str, Any] = json.loads(self._run_dir.status.read_bytes())
        except (OSError, ValueError):
            return {}
        return status


def _is_starting(activity: RoleActivity) -> bool:
    return any(line.what == "starting" for line in activity.lines.values())


def _is_in_step(activities: Mapping[str, RoleActivity | None]) -> bool:
    """Return whether the learner computes a step."""
    learner = activities.get("learner")
    line = learner.lines.get("main") if learner else None
    return line is not None and not line.waits_for and line.what.startswith("step ")


def _counts(status: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the counts that grow as a run makes progress. Failures are not counted."""
    ledger: Any = status.get("ledger") or _NONE
    evaluated = (ledger.get("eval") or _NONE).get("evaluated")
    settled = [ledger.get(name) for name in ("trained", "filtered", "stale")]
    groups: Any = status.get("groups") or _NONE
    seen = [groups.get(name) for name in ("ready", "opened")]
    return (status.get("phase"), status.get("version"), evaluated, *settled, *seen)


def _results(status: Mapping[str, Any]) -> tuple[int, int]:
    """Return the version, and the number of finished episodes and groups."""
    ledger: Any = status.get("ledger") or _NONE
    groups: Any = status.get("groups") or _NONE
    evaluated = (ledger.get("eval") or _NONE).get("evaluated") or 0
    settled = sum(ledger.get(name) or 0 for name in ("trained", "filtered", "stale"))
    return int(status.get("version") or 0), evaluated + settled + (groups.get("ready") or 0)


def _try_room(path: Path) -> None:
    """Write as much as a role might need. Raises: OSError: the disk may be full."""
    try:
        path.write_bytes(bytes(ROOM_BYTES))
    except FileNotFoundError:
        return  # The run's folder was moved; this is not a lack of space.
    finally:
        path.unlink(missing_ok=True)
