"""How many groups may be opened."""

from dataclasses import replace

import pytest

from common.config.run_config import RunConfig
from common.config.train import TrainMode
from scheduler.dispatch.gate import GateState, StalenessThrottle
from tests.scheduler.builders import make_config


def _gate(cfg: RunConfig) -> StalenessThrottle:
    return StalenessThrottle(cfg.groups, cfg.scheduler, cfg.train)


STATE = GateState(
    version=0, num_open=0, num_ready=0, num_filtered=0, max_ahead_steps=9, needed_ahead_steps=0
)


def _state(**changes: int) -> GateState:
    return replace(STATE, **changes)


def test_async_gate_allows_the_current_and_next_batches() -> None:
    cfg = make_config(per_step=16, max_ahead_steps=2, num_steps=100)
    assert _gate(cfg).allowed(_state()).num_allowed == 48
    assert _gate(cfg).allowed(_state(num_open=30, num_ready=10)).num_allowed == 8


def test_learner_can_tighten_the_gate_but_not_widen_it() -> None:
    cfg = make_config(per_step=16, max_ahead_steps=2, num_steps=100)
    assert _gate(cfg).allowed(_state(max_ahead_steps=0)).num_allowed == 16
    assert _gate(cfg).allowed(_state(max_ahead_steps=5)).num_allowed == 48


def test_gate_opens_the_needed_steps_within_both_bounds() -> None:
    cfg = make_config(per_step=16, max_ahead_steps=2, num_steps=100)
    assert _gate(cfg).allowed(_state(needed_ahead_steps=1, num_open=4)).num_allowed == 28
    assert _gate(cfg).allowed(_state(needed_ahead_steps=9)).num_allowed == 48
    assert _gate(cfg).allowed(_state(needed_ahead_steps=9, max_ahead_steps=1)).num_allowed == 32
    assert _gate(cfg).allowed(_state(needed_ahead_steps=1, max_ahead_steps=0)).num_allowed == 16


def test_async_gate_reports_the_actors_lead() -> None:
    cfg = make_config(per_step=16, max_ahead_steps=1, num_steps=100)
    verdict = _gate(cfg).allowed(_state(num_open=20, num_ready=12))
    assert (verdict.num_allowed, verdict.reason) == (0, "gate: 32 groups are ahead of the learner")


def test_async_gate_opens_only_the_rest_of_the_run() -> None:
    cfg = make_config(per_step=4, max_ahead_steps=3, num_steps=10)
    assert _gate(cfg).allowed(_state(version=8)).num_allowed == 8
    assert _gate(cfg).allowed(_state(version=9)).num_allowed == 4


def test_sync_gate_refills_a_step_after_its_open_groups() -> None:
    cfg = make_config(mode=TrainMode.SYNC, per_step=4)
    assert _gate(cfg).allowed(_state()).num_allowed == 4
    assert _gate(cfg).allowed(_state(num_open=1)).num_allowed == 0
    assert _gate(cfg).allowed(_state(num_ready=3)).num_allowed == 1
    assert _gate(cfg).allowed(_state(num_ready=4)).num_allowed == 0


def test_sync_gate_draws_at_most_max_oversample_batches() -> None:
    cfg = make_config(mode=TrainMode.SYNC, per_step=4, max_oversample=2.0)  # 8 groups
    assert _gate(cfg).allowed(_state(num_ready=1, num_filtered=6)).num_allowed == 1
    state = _state(num_ready=1, num_filtered=7)
    assert _gate(cfg).is_oversampled(state)
    assert _gate(cfg).allowed(state).num_allowed == 0


def test_gate_lifts_its_bound_when_no_group_is_ready() -> None:
    cfg = make_config(mode=TrainMode.SYNC, per_step=4, max_oversample=2.0)
    state = _state(num_filtered=8)
    assert not _gate(cfg).is_oversampled(state)
    assert _gate(cfg).allowed(state).num_allowed == 4


@pytest.mark.parametrize(
    ("num_filtered", "num_groups"), [(0, 4), (4, 4), (5, 3), (7, 1), (8, 1), (99, 1)]
)
def test_async_batch_is_short_at_the_oversampling_bound(num_filtered: int, num_groups: int) -> None:
    cfg = make_config(per_step=4, max_oversample=2.0)  # 8 groups
    state = _state(num_filtered=num_filtered, num_open=3, num_ready=1)
    assert _gate(cfg).num_batch_groups(state) == num_groups


def test_sync_batch_waits_for_the_end_of_its_round() -> None:
    cfg = make_config(mode=TrainMode.SYNC, per_step=4, max_oversample=2.0)
    assert _gate(cfg).num_batch_groups(_state(num_ready=4, num_open=1)) == 0
    assert _gate(cfg).num_batch_groups(_state(num_ready=4)) == 4
    assert _gate(cfg).num_batch_groups(_state(num_ready=2, num_filtered=5)) == 0, "a round follows"
    assert _gate(cfg).num_batch_groups(_state(num_ready=2, num_filtered=6)) == 2
    assert _gate(cfg).num_batch_groups(_state(num_filtered=8)) == 0, "no batch is empty"


@pytest.mark.parametrize("mode", list(TrainMode))
@pytest.mark.parametrize("num_ready", range(5))
@pytest.mark.parametrize("num_filtered", range(12))
def test_gate_or_batch_is_available_without_open_groups(
    mode: TrainMode, num_ready: int, num_filtered: int
) -> None:
    """Both refusing would be a wait for ever."""
    cfg = make_config(mode=mode, per_step=4, max_oversample=2.0, max_ahead_steps=0)
    state = _state(num_ready=num_ready, num_filtered=num_filtered)
    has_batch = 0 < _gate(cfg).num_batch_groups(state) <= num_ready
    assert has_batch or _gate(cfg).allowed(state).num_allowed > 0
