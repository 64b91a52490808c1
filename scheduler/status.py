"""The state of the run as one JSON object for status.json and the dashboard."""

import socket
import time
from typing import Any

import psutil

from common.ids import last_after
from common.wire.sockets import Router
from scheduler.components import Components
from scheduler.evaluation import Phase
from scheduler.members.members import Members
from scheduler.members.registry import AddressRegistry
from scheduler.state import save


def build_status(parts: Components, *, now: float) -> dict[str, Any]:
    """Return the content of status.json."""
    state = parts.gate_state()
    curriculum = parts.curriculum.report(state.version)
    longest = max(curriculum["horizons"].values(), key=lambda each: each["horizon"], default={})
    farthest = max(curriculum["distances"].values(), key=lambda each: each["distance"], default={})
    learners = parts.members.report("learner", now)
    groups = parts.success.eval_report()
    models = {"before": "eval-before-model", "after": last_after(groups)}
    success = {w: groups[name]["success"] for w, name in models.items() if name in groups}
    return {
        "phase": parts.run.phase.value,
        "version": state.version,
        "horizon": longest.get("horizon"),  # Horizon of the environment with the longest one.
        "stage": longest.get("stage"),
        "unit": curriculum["unit"],
        # Distance of the environment with the largest one. None: no distance curriculum.
        "distance": farthest.get("distance"),
        "distance_stage": farthest.get("stage"),
        "curriculum": curriculum,
        "groups": {
            "open": state.num_open,
            "ready": state.num_ready,
            "filtered": state.num_filtered,
            "opened": parts.lifecycle.table.next_number,
            "oversampled": parts.gate.is_oversampled(state),
        },
        "num_leased": len(parts.lifecycle.leases),
        "pace": parts.pace.report(),
        "limits": save(parts.limits),
        "gate": parts.gate.allowed(state).reason if parts.run.phase is Phase.TRAIN else "",
        "notice": parts.notice(now),
        "ledger": parts.lifecycle.ledger_report(),
        "failures": parts.lifecycle.kinds.report(),
        "success": parts.success.train_report(),
        "eval": {**success, "groups": groups},
        "eval_stream": parts.stream.report(),
        "actors": parts.members.report("actor", now),
        "learner": learners[-1] if learners else {},
    }


def others(
    members: Members, router: Router, registry: AddressRegistry, *, run_epoch: str, now: float
) -> dict[str, Any]:
    """Return the rest of the status: this process, the hubs, and the refused messages."""
    learner = [m.refused for m in members.alive("learner") if m.refused]
    return {
        "scheduler": {
            "name": "scheduler",
            "role": "scheduler",
            "incarnation": run_epoch,
            "node": socket.gethostname(),
            "rss_bytes": psutil.Process().memory_info().rss,
            "cpu_s": time.process_time(),
            "last_seen_s": 0.0,
        },
        "hubs": registry.report(now),
        "refused": {
            "scheduler": router.report(),
            "learner": learner[0] if learner else {},
            "hubs": registry.refused(),
        },
    }
