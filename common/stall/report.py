"""Activities and waits of all roles: read from their reports, formatted as text."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil
from pydantic import TypeAdapter, ValidationError

from common.stall.beacon import MonitoredWork, boot_id
from common.store.members import hub_text
from common.store.run_dir import RunDir
from common.text import counted

LEARNER = "learner"
LATE_S = 2.5  # Age of a report, due every second, at which the role counts as late.


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleActivity:
    """The last report of a role on this machine."""

    pid: int
    boot_id: str  # Boot id of its machine.
    began_at: float  # Unix time.
    written_at: float  # Monotonic seconds.
    lines: dict[str, MonitoredWork] = field(default_factory=dict[str, MonitoredWork])


_ACTIVITY = TypeAdapter(RoleActivity)


def read_activity(run_dir: RunDir, role: str) -> RoleActivity | None:
    """Return a role's last report. None: there is none, or it is from another machine."""
    try:
        activity = _ACTIVITY.validate_json((run_dir.alive / f"{role}.json").read_bytes())
    except (OSError, ValidationError):
        return None
    return activity if activity.boot_id == boot_id() else None


def waits(
    activities: Mapping[str, RoleActivity | None], status: Mapping[str, Any]
) -> dict[str, str]:
    """Return the role that each role waits for, "" for none, from its report or heartbeats."""
    waited_for: dict[str, str] = {}
    for name, activity in activities.items():
        lines = activity.lines.values() if activity else ()
        waited_for[name] = next((line.waits_for for line in lines if line.waits_for), "")
    members: list[Any] = [*status.get("actors", []), {**status.get("learner", {}), "name": LEARNER}]
    for member in members:
        name = str(member.get("name", ""))
        if not waited_for.get(name) and not member.get("is_dead"):
            waited_for[name] = str(member.get("waiting_for", ""))
    if "scheduler" in waited_for and status.get("gate") and not waited_for["scheduler"]:
        waited_for["scheduler"] = f"learner: {status['gate']}"
    return waited_for


def culprits(waiting: Mapping[str, str], status: Mapping[str, Any]) -> list[str]:
    """Return the roles at the end of the chain of waits that begins at the learner.

    The status names the actors. An actor that was added to the run may have any name.

    Example: the learner waits for actors, actor-0 for the hub, and actor-1 works. The result is
    envhub and actor-1. If the learner waits for actors, all actors for leases, and the scheduler
    for the learner, the waits form a cycle. The result is all roles in it, without the hub.
    """
    members = {str(each.get("name", "")) for each in status.get("actors", [])}
    actors = [name for name in waiting if name.startswith("actor") or name in members]
    ends: list[str] = []
    visited: list[str] = []
    queue = [LEARNER]
    while queue:
        name = queue.pop(0)
        if name in visited or name not in waiting:
            continue
        visited.append(name)
        target = waiting[name].partition(":")[0]
        if target == "actors":
            queue += actors
        elif target in waiting:
            queue.append(target)
        else:
            ends.append(name)
    return ends or visited


def describe(
    activities: Mapping[str, RoleActivity | None],
    status: Mapping[str, Any],
    waiting: Mapping[str, str],
    now: float,
) -> Iterator[str]:
    """Yield one line per role: its activity, or the role that it waits for, and the duration."""
    actors: list[Any] = status.get("actors", [])
    members = {activity.get("name"): activity for activity in actors}
    for name in sorted({*activities, *waiting}):
        activity = activities.get(name)
        for line_name, line in (activity.lines if activity else {}).items():
            doing = f"waits for {line.waits_for}" if line.waits_for else line.what
            yield f"  {name} ({line_name}): {doing}, since {now - line.since:.0f}s"
        if activity is not None and now - activity.written_at > LATE_S:
            late_s = now - activity.written_at
            yield f"  {name}: has written no report for {late_s:.0f}s{_state_of(activity.pid)}"
        elif activity is None:
            doing = f"waits for {waiting[name]}" if waiting.get(name) else "works"
            heard_s = members.get(name, {}).get("last_seen_s")
            heard = "" if heard_s is None else f", last message {heard_s:.0f}s before the status"
            node = members.get(name, {}).get("node")
            yield f"  {name}{f' on {node}' if node else ''}: {doing}{heard}"
    for hub in status.get("hubs", []):
        yield f"  hub {hub.get('name')}: {hub_text(hub)}"
    groups: Any = status.get("groups")
    if groups:
        counts = ", ".join(f"{groups.get(key)} {key}" for key in ("open", "ready", "filtered"))
        leased = counted(status.get("num_leased") or 0, "leased episode")
        yield f"  scheduler: groups {counts}; {leased}"
        yield f"  scheduler: phase {status.get('phase')}, version {status.get('version')}"


def _state_of(pid: int) -> str:
    """Return the operating system's state of a process as text."""
    with contextlib.suppress(psutil.Error):
        return f"; process {pid} is {psutil.Process(pid).status()}"
    return f"; process {pid} does not exist"
