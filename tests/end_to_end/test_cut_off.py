"""Laws of a run with a suspended hub, lost actors or a disconnected scheduler."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.end_to_end.fleet import Fleet
from tests.end_to_end.nodes import Network, why_not

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

SLOTS = 32
ENV_TIMEOUT_S = 5.0
STOPPED_S = 13.0  # Longer than that and than the hub's silence limit.
CUT_S = 40.0
BACK_S = 15.0  # from the end of a cut to the next steps
GONE_S = 10.0  # after which others' pace is what it was
WINDOW_S = 12.0
OVERRIDES = (
    f"actor.env_timeout_s={ENV_TIMEOUT_S}",
    "scheduler.dead_after_s=10",
    "scheduler.max_ahead_steps=7",
    "groups.per_step=4",
)


@pytest.fixture(scope="module")
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def network(stack: ExitStack) -> Network | None:
    return None if why_not() else stack.enter_context(Network(200 + os.getpid() % 50))


@pytest.fixture(scope="module")
def fleet(
    stack: ExitStack, network: Network | None, tmp_path_factory: pytest.TempPathFactory
) -> Fleet:
    """A run with one actor; its learner and that actor are on nodes, if there can be some."""
    folder = tmp_path_factory.mktemp("fleet")
    fleet = Fleet(folder, *OVERRIDES)
    stack.callback(fleet.close)
    if network is None:
        fleet.start_centre()
        fleet.add(0, SLOTS)
    else:
        first, second = (
            stack.enter_context(network.node(i, folder / f"node-{i}", hidden=folder))
            for i in (1, 2)
        )
        fleet.nodes = {"learner": first, "actor-0": second}
        fleet.start_centre(node=first, host=network.host)
        fleet.add(0, SLOTS, node=second, host=network.host)
    fleet.wait_until(lambda: fleet.ledger()["version"] >= 3)
    return fleet


def test_long_hub_stall_fails_no_episode(fleet: Fleet) -> None:
    hub, before = fleet.roles["envhub"].pid, fleet.ledger()
    os.kill(hub, signal.SIGSTOP)
    try:
        time.sleep(ENV_TIMEOUT_S + 1.0)  # it answers again just as steps are given up
    finally:
        os.kill(hub, signal.SIGCONT)
    fleet.wait_until(lambda: fleet.ledger()["version"] >= before["version"] + 3)
    fleet.check_books()
    os.kill(hub, signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        time.sleep(ENV_TIMEOUT_S + 3.0)  # by then all actors know
        paused = fleet.ledger()["issued"]
        time.sleep(max(0.0, stopped + STOPPED_S - time.monotonic()))
        assert fleet.ledger()["issued"] == paused, "leases pause"
    finally:
        os.kill(hub, signal.SIGCONT)
    version = fleet.ledger()["version"]
    fleet.wait_until(lambda: fleet.ledger()["version"] >= version + 3)
    assert fleet.dead() == []
    fleet.check_books()
    assert fleet.ledger()["reissued"] == before["reissued"], "they are played again where they were"


def test_joint_suspension_declares_no_role_dead(fleet: Fleet) -> None:
    """Like a suspended machine; the actor is on another machine and continues."""
    before = fleet.ledger()
    roles = [fleet.roles[name] for name in ("learner", "envhub", "scheduler")]
    for role in roles:
        role.suspend()
    time.sleep(STOPPED_S)  # Longer than every silence limit.
    for role in roles:
        role.resume()
    version = before["version"]
    fleet.wait_until(lambda: fleet.ledger()["version"] >= version + 3)
    assert fleet.dead() == []
    fleet.check_books()
    assert fleet.ledger()["reissued"] == before["reissued"]


def busy_slots(fleet: Fleet, name: str) -> float:
    """Return the mean number of busy engine slots of an actor: its pace under any other load.

    Slots that wait for leases, rounds or acknowledgements are idle.
    """
    before, began = fleet.worked_s()[name], time.monotonic()
    time.sleep(WINDOW_S)
    return (fleet.worked_s()[name] - before) / (time.monotonic() - began)


def test_lost_actors_do_not_slow_the_others(
    fleet: Fleet, network: Network | None, stack: ExitStack, tmp_path: Path
) -> None:
    others = ["actor-1", "actor-2"]
    fleet.add(1, SLOTS)
    fleet.add(2, SLOTS)
    if network is not None:
        node = stack.enter_context(network.node(3, tmp_path / "node", hidden=tmp_path / "none"))
        fleet.add(3, SLOTS, node=node, host=network.host)
        others.append("actor-3")
    start = fleet.finished()
    fleet.wait_until(lambda: all(fleet.finished()[n] > start[n] + SLOTS for n in others))
    before = min(busy_slots(fleet, "actor-0") for _ in range(2))
    assert fleet.dead() == [], fleet.said
    killed, stopped = fleet.roles.pop("actor-1"), fleet.roles["actor-2"]
    killed.kill()
    stopped.suspend()
    if network is not None:
        node.cut()
    time.sleep(GONE_S)
    for _ in range(3):  # One window may be disturbed by other load.
        after = busy_slots(fleet, "actor-0")
        if abs(after / before - 1) <= 0.05:
            break
    assert after >= 0.95 * before, f"{after:.1f} of {SLOTS} slots, {before:.1f} before"
    for name in others[1:]:
        fleet.roles.pop(name).kill()
    fleet.check_books()


def test_scheduler_recovers_from_a_forty_second_cutoff(
    fleet: Fleet, network: Network | None
) -> None:
    if network is None:
        pytest.skip(why_not())
    for node in fleet.nodes.values():
        node.swallow(fleet.scheduler_port)
    cut = fleet.ledger()["version"]
    time.sleep(CUT_S)
    during = fleet.ledger()["version"]
    assert during - cut <= 1
    for node in fleet.nodes.values():
        node.carry()
    took_s = fleet.wait_until(lambda: fleet.ledger()["version"] >= during + 2, timeout_s=BACK_S)
    # Steps made during the cut arrive at once: only new episodes show that the run continues.
    issued = fleet.ledger()["issued"]
    took_s += fleet.wait_until(lambda: fleet.ledger()["issued"] > issued, timeout_s=BACK_S)
    assert took_s <= BACK_S
    fleet.check_books()
