"""The processes of a run, by what they do in it."""

import re
from contextlib import suppress
from enum import StrEnum

import psutil

_ROLE = re.compile(r"run\.py (\w+)")
ENGINE_TITLE = "EngineCore"


class Role(StrEnum):
    """Who may be hit; an engine is a process of its own below its actor."""

    SCHEDULER = "scheduler"
    LEARNER = "learner"
    ACTOR = "actor"
    ENGINE = "engine"
    HUB = "envhub"


def find_victims(supervisor_pid: int, role: Role) -> list[psutil.Process]:
    """Return the processes of a role that live below the supervisor, oldest first."""
    found: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(supervisor_pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if role_of(process) is role:
                    found.append(process)
    return sorted(found, key=lambda process: process.pid)


def role_of(process: psutil.Process) -> Role | None:
    """Return what a process does in a run, None if it only helps one that does something."""
    words = process.cmdline()
    if ENGINE_TITLE in " ".join(words):
        return Role.ENGINE
    parent = process.parent()
    named = _ROLE.search(" ".join(words))
    if named is None or (parent is not None and parent.cmdline() == words):  # it is its fork
        return None
    return Role(named[1]) if named[1] in set(Role) else None
