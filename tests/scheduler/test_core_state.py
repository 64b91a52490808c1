"""The state of the scheduler survives, exactly."""

import json

import pytest

from common.errors import ConfigError
from tests.scheduler.builders import Table, ids


def test_restored_state_is_equal_and_keeps_live_leases() -> None:
    table = Table()
    table.hello("actor-0")
    leases = table.ask("actor-0", 6).leases
    table.arrive(leases[:2])
    state = json.loads(json.dumps(table.core.snapshot()))
    other = Table(clock=table.clock)
    other.clock.now += 5_000
    other.core.restore(state)
    assert other.core.snapshot() == state
    other.core.tick()
    assert other.beat("actor-0", ids(leases[2:])).revoked == []
    assert len(other.core.lifecycle.leases) == 4
    assert ids(other.ask("actor-0", 2).leases) == ["g0000001/2", "g0000001/3"]


def test_restored_lease_is_reissued_when_its_actor_stays_away() -> None:
    table = Table()
    table.hello("actor-0")
    leases = table.ask("actor-0", 4).leases
    other = Table(clock=table.clock)
    other.core.restore(table.core.snapshot())
    other.clock.now += 11
    other.hello("actor-1")
    other.core.tick()
    assert ids(other.ask("actor-1", 4).leases) == ids(leases)


def test_state_of_another_seed_is_refused() -> None:
    table = Table()
    state = table.core.snapshot() | {"seed": 7}
    with pytest.raises(ConfigError, match="seed=7, expected 0"):
        table.core.restore(state)
