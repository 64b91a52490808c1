"""What is going on, as one JSON object for people and displays."""

from typing import Any

from common.config.run_config import RunConfig
from learner.scheduler.dispatch.gate import GateState, allowed_groups, is_oversampled
from learner.scheduler.dispatch.limits import Limits
from learner.scheduler.episodes.lifecycle import Books
from learner.scheduler.evaluation.phases import Phase
from learner.scheduler.members.members import Members


def build_status(
    cfg: RunConfig,
    books: Books,
    members: Members,
    *,
    limits: Limits,
    gate: GateState,
    phase: Phase,
    now: float,
) -> dict[str, Any]:
    """Return the content of status.json.

    Args:
        now: the core's clock, for how long ago members were heard.
    """
    curriculum = books.curriculum.report(gate.version)
    longest = max(curriculum["horizons"].values(), key=lambda each: each["horizon"], default={})
    learners = members.report("learner", now)
    return {
        "phase": phase.value,
        "version": gate.version,
        "horizon": longest.get("horizon"),  # of the environment that may play longest
        "stage": longest.get("stage"),
        "curriculum": curriculum,
        "groups": {
            "open": gate.num_open,
            "ready": gate.num_ready,
            "filtered": gate.num_filtered,
            "opened": books.next_number,
            "oversampled": is_oversampled(cfg, gate),
        },
        "num_leased": books.leases.num_leased,
        "pace": books.pace.report(),
        "limits": limits.snapshot(),
        "gate": allowed_groups(cfg, gate).reason if phase is Phase.TRAIN else "",
        "ledger": books.ledger_report(),
        "success": books.averages.train_report(),
        "eval": _eval_report(books),
        "actors": members.report("actor", now),
        "learner": learners[-1] if learners else {},
    }


def _eval_report(books: Books) -> dict[str, Any]:
    """Return the success of the model before and after, and all groups in `groups`."""
    groups = books.averages.eval_report()
    model = {
        when: groups[f"eval-{when}-model"]["success"]
        for when in ("before", "after")
        if f"eval-{when}-model" in groups
    }
    return {**model, "groups": groups}
