"""Laws of grants while some hubs are unreachable."""

from dataclasses import replace

import pytest

from common.config.eval import EvalSection
from common.config.tasks import TaskSection
from common.config.train import TrainMode
from common.wire.messages import Lease, LeaseRequest
from scheduler.components import build_components
from scheduler.core import SchedulerCore
from scheduler.curriculum.catalogue import HubCatalogue
from scheduler.dispatch.grants import MAX_LEASES
from tests.scheduler.builders import CATALOGUE, Clock, hello_of, make_config, request_of

SUBSETS = CATALOGUE.envs["maze"]


def core_of_two(mode: TrainMode = TrainMode.ASYNC, *, evaluates: bool = False) -> SchedulerCore:
    """A scheduler core with two environments and one actor."""
    tasks = [TaskSection(env="maze", subset="easy"), TaskSection(env="cave", subset="easy")]
    evaluation = EvalSection(before=evaluates, after=False, num_items=6, baselines=False)
    cfg = replace(make_config(mode=mode, per_step=8, evaluation=evaluation), tasks=tasks)
    catalogue = HubCatalogue(envs={"maze": SUBSETS, "cave": SUBSETS})
    core = SchedulerCore(build_components(cfg, catalogue), clock=Clock())
    core.handle("actor-0", hello_of("actor-0"))
    return core


def ask(core: SchedulerCore, num: int, *absent: str) -> list[Lease]:
    request: LeaseRequest = replace(request_of("actor-0", num), absent=list(absent))
    return core.handle("actor-0", request).leases


def test_groups_are_drawn_from_reachable_environments_only() -> None:
    core = core_of_two()
    assert {lease.env for lease in ask(core, 32, "cave")} == {"maze"}
    assert {lease.env for lease in ask(core, 32)} == {"maze", "cave"}


def test_groups_of_an_absent_environment_do_not_block_others() -> None:
    core = core_of_two()
    held: list[Lease] = []
    while len({lease.group_id for lease in held}) < core.parts.gate_state().num_open or not held:
        held += ask(core, 1)
    for _ in range(200):  # Both environments play until the gate is closed.
        held += ask(core, 1)
    assert ask(core, 1) == []
    num_open = core.parts.gate_state().num_open
    num_absent = len({lease.group_id for lease in held if lease.env == "cave"})
    assert 0 < num_absent < num_open
    more = ask(core, 1000, "cave")
    assert {lease.env for lease in more} == {"maze"}
    assert len({lease.group_id for lease in more}) == num_absent
    assert core.parts.gate_state().num_open == num_open
    assert ask(core, 1000, "cave") == []
    assert ask(core, 1000) == []  # The environment is back, and its groups count again.
    assert core.parts.gate_state().num_open == num_open + num_absent


def test_absence_of_all_environments_opens_no_more_groups() -> None:
    core = core_of_two()
    ask(core, 1000)
    assert ask(core, 1000, "cave", "maze") == []


def test_waiting_group_members_keep_their_order_until_reachable() -> None:
    core = core_of_two()
    some = ask(core, 1)
    while some[-1].env == "maze":  # a group of the other environment is begun
        some += ask(core, 1)
    group = some[-1].group_id
    assert all(lease.group_id != group for lease in ask(core, 9, "cave"))
    left = [lease.member for lease in ask(core, 9) if lease.group_id == group]
    assert left == [1, 2, 3]


def test_evaluation_continues_on_reachable_environments() -> None:
    core = core_of_two(evaluates=True)
    there = ask(core, 100, "cave")
    assert {lease.env for lease in there} == {"maze"}
    assert ask(core, 100, "cave") == []
    rest = ask(core, 100)
    assert {lease.env for lease in rest} == {"cave"}
    assert len({lease.episode_id for lease in (*there, *rest)}) == len(there) + len(rest) == 6


@pytest.mark.parametrize("absent", [(), ("cave",)])
def test_lockstep_rounds_do_not_depend_on_reachable_hubs(absent: tuple[str, ...]) -> None:
    core, other = core_of_two(TrainMode.SYNC), core_of_two(TrainMode.SYNC)
    ask(core, 100, *absent)
    ask(other, 100)
    drawn, expected = (
        [each.item_id for _, each in one.lifecycle.table.episodes()] for one in (core, other)
    )
    assert drawn == expected


@pytest.mark.parametrize("forks", [0, 3])
def test_forks_stay_with_the_actor_of_their_trunk(forks: int) -> None:
    """The gate is closed, and actor-0 has played one member of the last group."""
    cfg = make_config(size=4, per_step=1, max_ahead_steps=1)
    cfg = replace(cfg, groups=replace(cfg.groups, forks=forks))
    catalogue = HubCatalogue(envs={"maze": SUBSETS})
    core = SchedulerCore(build_components(cfg, catalogue), clock=Clock())
    for name in ("actor-0", "actor-1"):
        core.handle(name, hello_of(name))
    taken = [lease for _ in range(5) for lease in ask(core, 1)]
    assert {lease.group_id for lease in taken[:4]} == {taken[0].group_id}
    rest = core.handle("actor-1", request_of("actor-1", 8)).leases
    group = taken[4].group_id
    stolen = [lease.member for lease in rest if lease.group_id == group]
    assert stolen == ([] if forks else [1, 2, 3])
    assert [lease.member for lease in ask(core, 3)] == ([1, 2, 3] if forks else [])


def test_grant_is_bounded_by_one_message() -> None:
    mode = TrainMode.ASYNC
    cfg = make_config(mode=mode, per_step=MAX_LEASES)
    core = SchedulerCore(build_components(cfg, CATALOGUE), clock=Clock())
    core.handle("actor-0", hello_of("actor-0"))
    assert len(ask(core, 3 * MAX_LEASES)) == MAX_LEASES
    assert len(ask(core, 2 * MAX_LEASES)) == MAX_LEASES
    assert len(ask(core, 5)) == 5
