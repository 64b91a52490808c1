"""Builders of reports."""

from typing import Any

from common.report.model import Baselines, HeldOut, PeakMemory, Report, TokenRates


def make_report(**changes: Any) -> Report:
    """Return the report of a run that did nothing, with some fields changed."""
    plain: dict[str, Any] = {
        "before": None,
        "after": None,
        "baselines": Baselines(random_valid=None, expert=None),
        "gain": None,
        "absent": {},
        "failed_evals": {},
        "eval_curve": [],
        "mode": "async",
        "seed": 0,
        "steps": 0,
        "episodes": 0,
        "wall_s": None,
        "tokens_per_s": TokenRates(actor=None, learner=None),
        "peak_memory_bytes": PeakMemory(all_roles=None, by_role={}),
        "lag_histogram": {},
        "ledger": None,
        "heldout": HeldOut(num_train_items_drawn=0, num_test_items=0, num_shared_item_ids=0),
        "selection": None,
    }
    return Report(**plain | changes)
