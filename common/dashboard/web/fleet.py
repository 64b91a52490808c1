"""What the Fleet view shows: roles with their state, restarts with causes, who waited for whom."""

import re
import time
from pathlib import Path
from typing import Any

from common.dashboard.reading.run_source import RunSource
from common.dashboard.reading.tail import as_map

NUM_STEPS = 60  # of the timeline
TAIL_BYTES = 1 << 16
MAX_LINES = 50
MAX_REPORT_CHARS = 20_000
LIST_KEYS = ("name", "role", "version", "tokens_per_s", "running", "num_slots", "rss_bytes")
LATER_KEYS = ("waiting_for", "last_seen_s", "is_dead", "is_silent", "num_finished")
_ENDED = re.compile(r"^(\S+ \S+) . .*(role ended|restarted|hangs|stands still).*$")
PARTS = {
    "waits for a batch": "wait/batch_s",
    "trains": "train/step_s",
    "publishes": "publish/total_s",
    "saves": "train/checkpoint_stall_s",
}


def fleet(run: RunSource) -> dict[str, Any]:
    """Return roles, the parts of the last steps in seconds, restarts, and the stall reports."""
    status = run.status()
    actors: list[object] = status.get("actors") or []
    members = [as_map(each) for each in (status.get("learner"), *actors)]
    roles = [{key: each.get(key) for key in (*LIST_KEYS, *LATER_KEYS)} for each in members if each]
    try:
        silent_s = max(0.0, time.time() - run.run_dir.status.stat().st_mtime)
    except OSError:
        silent_s = None
    lines = run.metrics.tail(NUM_STEPS)
    return {
        "state": run.state(),
        "roles": roles,
        "silent_s": silent_s,
        "gate": status.get("gate") or "",
        "hubs": status.get("hubs") or [],
        "steps": [line.get("step") for line in lines],
        "parts": {name: [line.get(key) or 0.0 for line in lines] for name, key in PARTS.items()},
        "events": _events(run.run_dir.logs),
        "stalls": _stalls(run.run_dir.stalls),
    }


def _events(logs: Path) -> list[str]:
    """Return what the logs say of roles that ended or hung, the newest last."""
    found: list[str] = []
    for path in sorted(logs.glob("*.log")):
        try:
            with path.open("rb") as handle:
                handle.seek(max(0, path.stat().st_size - TAIL_BYTES))
                text = handle.read().decode(errors="replace")
        except OSError:
            continue
        found += [line[:500] for line in text.splitlines() if _ENDED.match(line)]
    return sorted(found)[-MAX_LINES:]


def _stalls(folder: Path) -> list[dict[str, str]]:
    paths = sorted((p for p in folder.glob("*") if p.is_file()), key=lambda p: p.stat().st_mtime)
    found: list[dict[str, str]] = []
    for path in paths[-5:]:
        try:
            text = path.read_text(errors="replace")[:MAX_REPORT_CHARS]
        except OSError:
            continue
        found.append({"name": path.name, "text": text})
    return found[::-1]
