"""Data of the Fleet view: roles with their state, restarts with causes, and waiting times."""

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.cpu import cpu_seconds
from common.store.members import members_of
from common.store.run_dir import as_map, json_object
from tools.dashboard.reading.run_source import RunSource

NUM_STEPS = 60  # Number of steps of the timeline.
ON_THIS_DISK = ("scheduler", "envhub")  # Roles that write their state to the run's disk.
TAIL_BYTES = 1 << 16
MAX_LINES = 50
MAX_REPORT_CHARS = 20_000
KEYS = (
    "name",
    "role",
    "node",
    "commit",
    "url",
    "envs",
    "version",
    "tokens_per_s",
    "running",
    "num_slots",
    "num_sessions",
    "max_sessions",
    "rss_bytes",
    "cpu_s",
    "waiting_for",
    "last_seen_s",
    "is_dead",
    "is_silent",
    "gone",
    "num_finished",
    "num_restarts",
)
_ENDED = re.compile(
    r"^(\S+ \S+) . .*(role ended|killing role|hangs|stands still"
    r"|changed the live configuration).*$"
)
_RESTART = re.compile(
    r"^(?P<at>\S+ \S+) . .*role ended role=(?P<role>\S+) exit=(?P<exit>.+?) restart=(?P<number>\S+)"
    r" in_s=\S+(?: last=(?P<last>.*))?$"
)
PARTS = {
    "waits for a batch": "wait/batch_s",
    "trains": "train/step_s",
    "publishes": "publish/total_s",
    "saves": "train/checkpoint_stall_s",
}
SLOTS = ("waits for the engine", "waits for the environment", "other work", "empty")


def fleet(run: RunSource) -> dict[str, Any]:
    """Return the roles, the parts of the last steps in seconds, restarts, and stall reports."""
    status = run.status()
    events = _events(run.run_dir.logs)
    roles = {each["name"]: {key: each.get(key) for key in KEYS} for each in members_of(status)}
    for name in ON_THIS_DISK:
        if activity := _own_activity(run, name):
            known = {k: v for k, v in roles.get(name, {}).items() if v is not None}
            roles[name] = activity | known
    for name, role in roles.items():
        own = role["role"] if role["role"] == "learner" else name
        restarts = sum(each["role"] == own for each in events["restarts"])
        role["num_restarts"] = max(restarts, role.get("num_restarts") or 0)
    try:
        silent_s = max(0.0, time.time() - run.run_dir.status.stat().st_mtime)
    except OSError:
        silent_s = None
    lines = run.metrics.tail(NUM_STEPS)
    return {
        "state": run.state(),
        "roles": list(roles.values()),
        "silent_s": silent_s,
        "gate": status.get("gate") or "",
        "steps": [line.get("step") for line in lines],
        "parts": {name: [line.get(key) or 0.0 for line in lines] for name, key in PARTS.items()},
        "slots": slots(lines),
        **events,
        "stalls": _stalls(run.run_dir.stalls),
    }


def _own_activity(run: RunSource, role: str) -> dict[str, Any]:
    """Return the state that a role wrote to the run's disk; {} if there is none."""
    path = run.run_dir.alive / f"{role}.json"
    try:
        age_s = max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return {}
    doing = as_map(as_map(json_object(path).get("lines")).get("main"))
    activity = {"waiting_for": doing.get("waits_for"), "cpu_s": cpu_seconds(run.run_dir).get(role)}
    return {"name": role, "role": role, "last_seen_s": age_s, **activity}


def slots(lines: Sequence[Mapping[str, float | None]]) -> dict[str, list[float]]:
    """Return the shares of the slots' time by activity for each step; 0 for the first step."""
    shares: dict[str, list[float]] = {name: [] for name in SLOTS}
    for i, line in enumerate(lines):
        took_s = (line.get("time_s") or 0.0) - (lines[i - 1].get("time_s") or 0.0) if i else 0.0
        whole_s = took_s * (line.get("actor/concurrency") or 0.0)
        num = line.get("episodes/arrived") or 0.0
        used = [num * (line.get(f"episodes/{each}_s_mean") or 0.0) for each in ("generate", "env")]
        wall_s = max(sum(used), num * (line.get("episodes/wall_s_mean") or 0.0))
        parts = [*used, wall_s - sum(used), max(0.0, whole_s - wall_s)]
        total = sum(parts) if whole_s > 0 else 0.0
        for name, part in zip(SLOTS, parts, strict=True):
            shares[name].append(round(part / total, 4) if total else 0.0)
    return shares


def _events(logs: Path) -> dict[str, Any]:
    """Return the restarts, and other log lines about roles that ended or hung, the newest last."""
    found: list[str] = []
    for path in sorted(logs.glob("*.log")):
        try:
            with path.open("rb") as handle:
                handle.seek(max(0, path.stat().st_size - TAIL_BYTES))
                text = handle.read().decode(errors="replace")
        except OSError:
            continue
        found += [line[:500] for line in text.splitlines() if _ENDED.match(line)]
    matches = {line: _RESTART.match(line) for line in sorted(set(found))[-MAX_LINES:]}
    return {
        "restarts": [match.groupdict() for match in matches.values() if match],
        "events": [line for line, match in matches.items() if match is None],
    }


def _stalls(folder: Path) -> list[dict[str, str]]:
    """Return the newest stall reports."""
    paths = sorted((p for p in folder.glob("*") if p.is_file()), key=lambda p: p.stat().st_mtime)
    found: list[dict[str, str]] = []
    for path in paths[-5:]:
        try:
            text = path.read_text(errors="replace", encoding="utf-8")[:MAX_REPORT_CHARS]
        except OSError:
            continue
        found.append({"name": path.name, "text": text})
    return found[::-1]
