"""Processor seconds that each role of a run has used. The launcher writes them to a file."""

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from common.host.cgroups import PROC, cores_here, cpu_quotas, cpu_used_s
from common.ids import process_of
from common.memory import descendants
from common.stall.report import read_activity
from common.store.disk import if_room
from common.store.members import members_of
from common.store.run_dir import RunDir, as_map, json_object, write_json

SAMPLE_S = 5.0  # Seconds between two samples. Each sample queries every process of the run.
Key = tuple[int, float]  # Process id and creation time of a process.
_ROLE = re.compile(r"run\.py (\w+)|EngineCore")


class CpuWatch:
    """Sums the processor time of this process and its descendants by role.

    A resumed run adds to its earlier totals. Short-lived processes, such as agents, are counted
    after their end, because the system reports the total of a process's ended children. Roles on
    joined nodes or on other nodes of Ray are not descendants. Their seconds, engine included, come
    from their reports to the scheduler.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._path = run_dir.cpu
        self._run_dir = run_dir
        self._began = time.time()
        self._elsewhere = _elsewhere(run_dir)
        self._before = cpu_seconds(run_dir)
        for role, used_s in self._elsewhere.values():
            self._before[role] = self._before.get(role, 0.0) - used_s
        self._own: set[str] = set()  # Incarnations that are measured here as local processes.
        self._others_s = _numbers(json_object(run_dir.cpu)).get("others_s", 0.0)
        self._last: tuple[float, float] | None = None  # Busy seconds of the cores and of the run.
        self._used: dict[Key, tuple[str, float]] = {}  # Process -> (role, seconds).
        self._parents: dict[Key, Key] = {}
        self._next = 0.0

    def sample(self) -> None:
        """Measure, and write the result, if the last sample is old enough."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + SAMPLE_S
        self.measure()
        self._read_reported()
        roles = {role: round(used_s, 2) for role, used_s in sorted(self.used().items())}
        self._note_others(sum(used_s for _, used_s in self._used.values()))
        about = {"cores": cores_here(), "others_s": round(self._others_s, 2)}
        about |= {"elsewhere": self._elsewhere}
        if_room(lambda: write_json(self._path, {"roles": roles, **about}), self._path)

    def _note_others(self, used_s: float) -> None:
        """Add the time that other programs used on this run's cores since the last sample."""
        now = (busy_s(), used_s)
        if self._last is not None:
            self._others_s += max(0.0, now[0] - self._last[0] - (now[1] - self._last[1]))
        self._last = now

    def used(self) -> dict[str, float]:
        """Return the seconds by role at the last sample, including earlier starts of the run."""
        total = dict(self._before)
        for role, used_s in (*self._used.values(), *self._elsewhere.values()):
            total[role] = total.get(role, 0.0) + used_s
        return total

    def measure(self) -> None:
        """Measure this process and its descendants, each for its own role or its parent's."""
        root = psutil.Process()
        roles = {root.pid: "launcher"}
        measured: dict[int, tuple[Key, float]] = {}  # Process id -> seconds of ended children.
        for process in [root, *descendants(root)]:
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
                key = (process.pid, process.create_time())
                role = self._role_of(process, roles, self._used.get(key, ("", 0.0))[0])
                roles[process.pid] = role
                times = process.cpu_times()
                measured[process.pid] = key, sum(times[2:4])
                self._used[key] = (role, sum(times[:2]))
                if parent := measured.get(process.ppid()):
                    self._parents[key] = parent[0]
        self._add_ended(dict(measured.values()))

    def _add_ended(self, reaped: Mapping[Key, float]) -> None:
        """Add the time of ended children that no sample measured while they ran.

        Args:
            reaped: running process -> seconds of its ended children and their ended descendants.
        """
        seen: dict[Key, float] = {}
        for key, (_, used_s) in self._used.items():
            if key in reaped:
                continue
            while (parent := self._parents.get(key)) is not None and parent not in reaped:
                key = parent
            if parent is not None:
                seen[parent] = seen.get(parent, 0.0) + used_s
        for key, total_s in reaped.items():
            role, used_s = self._used[key]
            self._used[key] = (role, used_s + max(0.0, total_s - seen.get(key, 0.0)))

    def _read_reported(self) -> None:
        """Read the reported seconds of roles that never were descendants of this process."""
        try:
            if self._run_dir.status.stat().st_mtime < self._began:
                return  # A previous launcher wrote the file and counted its seconds.
        except OSError:
            return
        pids = {pid for pid, _ in self._used}
        for member in members_of(json_object(self._run_dir.status)):
            role = member["role"]
            incarnation = str(member.get("incarnation") or "")
            activity = read_activity(
                self._run_dir, "learner" if role == "learner" else process_of(member["name"])
            )
            if activity is not None and activity.pid in pids:
                self._own.add(incarnation)
                self._elsewhere.pop(incarnation, None)  # The role started since the scan.
            elif incarnation and incarnation not in self._own and (used_s := member.get("cpu_s")):
                self._elsewhere[incarnation] = (role, float(used_s))

    def _role_of(self, process: psutil.Process, roles: Mapping[int, str], before: str) -> str:
        """Return a process's role. It is read at every sample, because an engine is named late.

        Args:
            before: its role at the last sample. An exiting process has no command line any more.
        """
        named = _ROLE.search(" ".join(process.cmdline()))
        if named and process.pid not in roles:
            return named[1] or "engine"
        return roles.get(process.pid) or before or roles.get(process.ppid(), "launcher")


def busy_s(proc: Path = PROC) -> float:
    """Return the busy seconds of the cores of this process.

    If a container's quota is smaller than the visible cores, its own used seconds are returned.
    """
    num = len(os.sched_getaffinity(0))
    smaller = [(quota, group) for group, quota in cpu_quotas(proc) if quota < num]
    if smaller:
        _, group = min(smaller, key=lambda each: each[0])
        if (used_s := cpu_used_s(group, proc)) is not None:
            return used_s
    cores = psutil.cpu_times(percpu=True)
    ours = [cores[i] for i in os.sched_getaffinity(0) if i < len(cores)]
    return sum(sum(each[:8]) - each.idle - getattr(each, "iowait", 0.0) for each in ours)


def family_cpu_s() -> float:
    """Return the processor seconds of this process and its descendants, including ended ones."""
    this_process = psutil.Process()
    total = sum(this_process.cpu_times()[:4])
    for child in descendants(this_process):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            total += sum(child.cpu_times()[:4])
    return round(total, 2)


def cpu_seconds(run_dir: RunDir) -> dict[str, float]:
    """Return the processor seconds by role over all starts of a run; {} without a record."""
    return _numbers(json_object(run_dir.cpu).get("roles"))


def _elsewhere(run_dir: RunDir) -> dict[str, tuple[str, float]]:
    """Return (role, seconds) by incarnation for the roles that no launcher of the run started."""
    seconds: dict[str, tuple[str, float]] = {}
    for name, entry in as_map(json_object(run_dir.cpu).get("elsewhere")).items():
        match entry:
            case [str() as role, int() | float() as used_s]:
                seconds[name] = (role, float(used_s))
            case _:
                pass
    return seconds


def cpu_metrics(run_dir: RunDir) -> dict[str, float]:
    """Return the metrics of a step: seconds by role, of other programs, and per trained episode.

    `cpu/others_s` is the time that other programs used on the run's cores. `cpu/<role>_elsewhere_s`
    is the part of the role's seconds from processes that the launcher did not start itself.
    """
    used = cpu_seconds(run_dir)
    if not used:
        return {}
    metrics = {f"cpu/{role}_s": used_s for role, used_s in used.items()}
    metrics |= {f"cpu/{name}": cores for name, cores in _numbers(json_object(run_dir.cpu)).items()}
    for role, used_s in _elsewhere(run_dir).values():
        name = f"cpu/{role}_elsewhere_s"
        metrics[name] = metrics.get(name, 0.0) + used_s
    if trained := _numbers(json_object(run_dir.ledger)).get("trained"):
        metrics["cpu/per_trained_episode_s"] = sum(used.values()) / trained
    return metrics


def _numbers(content: object) -> dict[str, float]:
    """Return the numbers of a JSON object by their names."""
    return {k: float(v) for k, v in as_map(content).items() if isinstance(v, int | float)}
