"""Processor seconds that each role of a run has used: the launcher writes them, others read."""

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress

import psutil

from common.dashboard.reading.tail import as_map, json_object
from common.store.disk import if_room
from common.store.run_dir import RunDir, write_json

SAMPLE_S = 5.0  # between two looks: each asks the system about every process of the run
_ROLE = re.compile(r"run\.py (\w+)|EngineCore")


class CpuWatch:
    """Adds up what this process and its descendants use, by role; a run that goes on adds to it.

    What a process used after the last look before its end is lost: some seconds at most. Roles on
    other machines are not counted.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._path = run_dir.cpu
        self._before = cpu_seconds(run_dir)
        self._others_s = _numbers(json_object(run_dir.cpu)).get("others_s", 0.0)
        self._last: tuple[float, float] | None = None  # busy seconds: of the cores, of the run
        self._used: dict[tuple[int, float], tuple[str, float]] = {}  # process -> role, seconds
        self._next = 0.0

    def sample(self) -> None:
        """Look, and write what is found, if the last look is old enough."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + SAMPLE_S
        self.look()
        told = {role: round(used_s, 2) for role, used_s in sorted(self.used().items())}
        self._note_others(sum(used_s for _, used_s in self._used.values()))
        about = {"cores": len(os.sched_getaffinity(0)), "others_s": round(self._others_s, 2)}
        if_room(lambda: write_json(self._path, {"roles": told, **about}), self._path)

    def _note_others(self, used_s: float) -> None:
        """Add what was used of this run's cores beside it since the last look."""
        now = (_busy_s(), used_s)
        if self._last is not None:
            self._others_s += max(0.0, now[0] - self._last[0] - (now[1] - self._last[1]))
        self._last = now

    def used(self) -> dict[str, float]:
        """Return the seconds by role up to the last look, those of earlier starts included."""
        total = dict(self._before)
        for role, used_s in self._used.values():
            total[role] = total.get(role, 0.0) + used_s
        return total

    def look(self) -> None:
        """Note this process and its descendants: a role's own, unless they say they are one."""
        root = psutil.Process()
        roles = {root.pid: "launcher"}
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
                key = (process.pid, process.create_time())
                own = self._role_of(process, roles, self._used.get(key, ("", 0.0))[0])
                roles[process.pid] = own
                self._used[key] = (own, sum(process.cpu_times()[:2]))

    def _role_of(self, process: psutil.Process, roles: Mapping[int, str], before: str) -> str:
        """Return a process's role, looked up anew: an engine names itself later.

        Args:
            before: its role at the last look. One that is exiting has no command line any more.
        """
        named = _ROLE.search(" ".join(process.cmdline()))
        if named and process.pid not in roles:
            return named[1] or "engine"
        return roles.get(process.pid) or before or roles.get(process.ppid(), "launcher")


def _busy_s() -> float:
    """Return the seconds for which the cores that this process may use were not idle."""
    cores = psutil.cpu_times(percpu=True)
    ours = [cores[i] for i in os.sched_getaffinity(0) if i < len(cores)]
    return sum(sum(each[:8]) - each.idle - getattr(each, "iowait", 0.0) for each in ours)


def family_cpu_s() -> float:
    """Return the processor seconds of this process and of all that it started, ended ones too."""
    own = psutil.Process()
    total = sum(own.cpu_times()[:4])
    for child in own.children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            total += sum(child.cpu_times()[:4])
    return round(total, 2)


def cpu_seconds(run_dir: RunDir) -> dict[str, float]:
    """Return the processor seconds by role, of all starts of a run; {} if nobody counted."""
    return _numbers(json_object(run_dir.cpu).get("roles"))


def cpu_metrics(run_dir: RunDir) -> dict[str, float]:
    """Return the metrics of a step: seconds by role so far, of others, cores, per trained episode.

    `cpu/others_s` is what programs beside the run have used of its cores.
    """
    used = cpu_seconds(run_dir)
    if not used:
        return {}
    found = {f"cpu/{role}_s": used_s for role, used_s in used.items()}
    found |= {f"cpu/{name}": cores for name, cores in _numbers(json_object(run_dir.cpu)).items()}
    if trained := _numbers(json_object(run_dir.ledger)).get("trained"):
        found["cpu/per_trained_episode_s"] = sum(used.values()) / trained
    return found


def _numbers(found: object) -> dict[str, float]:
    return {k: float(v) for k, v in as_map(found).items() if isinstance(v, int | float)}
