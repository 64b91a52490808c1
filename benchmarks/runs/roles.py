"""Finds the processes of a run by their role."""

import re
from collections import defaultdict
from contextlib import suppress
from enum import StrEnum

import psutil

_ROLE = re.compile(r"run\.py (\w+)")
ENGINE_TITLE = "EngineCore"
RANK_CODE = "multiprocessing.spawn"  # A part of the command line of a rank, not of its helpers.


class Role(StrEnum):
    """A role of a run. An engine is a process below its actor, a rank one below its learner."""

    SCHEDULER = "scheduler"
    LEARNER = "learner"
    RANK = "rank"
    ACTOR = "actor"
    ENGINE = "engine"
    HUB = "envhub"


def roles_below(supervisor_pid: int) -> dict[Role, list[psutil.Process]]:
    """Return the processes of each role below the supervisor, oldest first."""
    found: defaultdict[Role, list[psutil.Process]] = defaultdict(list)
    with suppress(psutil.NoSuchProcess):
        processes = psutil.Process(supervisor_pid).children(recursive=True)
        for process in sorted(processes, key=lambda each: each.pid):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if role := _role_of(process):
                    found[role].append(process)
    return dict(found)


def _role_of(process: psutil.Process) -> Role | None:
    """Return the role of a process in a run; None for auxiliary processes."""
    words = process.cmdline()
    if ENGINE_TITLE in " ".join(words):
        return Role.ENGINE
    parent = process.parent()
    named = _ROLE.search(" ".join(words))
    if named is None and RANK_CODE in " ".join(words) and parent is not None:
        above = _ROLE.search(" ".join(parent.cmdline()))
        return Role.RANK if above is not None and above[1] == Role.LEARNER else None
    # The process is a fork of its parent.
    if named is None or (parent is not None and parent.cmdline() == words):
        return None
    return Role(named[1]) if named[1] in set(Role) else None
