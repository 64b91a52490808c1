"""A hub's memory stays flat: under mixed load, and after abandoned sessions.

LONGSTRIDE_SOAK_S=600 and LONGSTRIDE_ABANDONED=10000 for the whole of it.
"""

import pytest

from benchmarks.envhub.hub import hub_process
from tests.end_to_end.hub_soak import ENVS, IDLE_S, MAX_GROWTH_FRAC, abandon, soak_hub
from tests.end_to_end.hubs import amount, offline_envs

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]

DURATION_S = amount("LONGSTRIDE_SOAK_S", default=20)
NUM_ABANDONED = amount("LONGSTRIDE_ABANDONED", default=2000)


def test_mixed_load_succeeds_with_flat_memory() -> None:
    envs = [name for name in ENVS if name in offline_envs()]
    with hub_process(envs, overrides=[f"envhub.session_idle_s={IDLE_S:g}"]) as hub:
        soak = soak_hub(hub, duration_s=DURATION_S)
    assert soak.failures == []
    assert soak.counts["steps"] > 20 * DURATION_S
    assert soak.growth_frac() <= MAX_GROWTH_FRAC


def test_expired_sessions_return_their_memory() -> None:
    idle_s = 30.0 if NUM_ABANDONED > 5000 else 5.0
    left = abandon(num_sessions=NUM_ABANDONED, idle_s=idle_s)
    assert left.peak_bytes > left.start_bytes
    assert left.growth_frac <= MAX_GROWTH_FRAC, left
