"""Every item can be solved over HTTP, and the same actions always see the same observations.

LONGSTRIDE_SOLVE_ITEMS=200 solves that many items of every subset; by default a few of some.
"""

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest
import uvloop

from benchmarks.envhub.hub import Client, ServiceProcess, ServiceTarget, hub_process
from envhub.envs.miniwob.pages import UNSOLVABLE, subset_name
from tests.end_to_end.hub_solve import (
    MIN_SOLVED_FRAC,
    NO_WAY,
    SolvedItem,
    Subset,
    SubsetResult,
    list_subsets,
    open_patiently,
    sample_items,
    solve_all,
    solve_subset,
)
from tests.end_to_end.hubs import amount, offline_envs
from tests.marks import WITH_PROCESSES, long_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

NUM_ITEMS = amount("LONGSTRIDE_SOLVE_ITEMS", default=0)
NUM_SUBSETS = 2  # by default, with one item each
NUM_TURNS = 10
WITHOUT_EXPERT = frozenset(subset_name(page) for page in UNSOLVABLE)


SEED, OTHER_SEED = "0", "12345"
# Environments without processes of their own. One hub for each hash seed serves all of them.
LIGHT = [name for name in offline_envs() if name not in WITH_PROCESSES]
Hubs = dict[tuple[str, str], ServiceProcess]


@pytest.fixture(scope="module")
def light_hubs() -> Iterator[Hubs]:
    """The hubs of the light environments, by environment and hash seed."""
    with hub_of(LIGHT, SEED) as hub, hub_of(LIGHT, OTHER_SEED) as other:
        yield {(env, SEED): hub for env in LIGHT} | {(env, OTHER_SEED): other for env in LIGHT}


@pytest.fixture(scope="module", params=long_for(offline_envs(), WITH_PROCESSES))
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, Hubs]]:
    """An environment and the hubs that serve it."""
    env = request.param
    if env in LIGHT:
        yield env, request.getfixturevalue("light_hubs")
        return
    with hub_of([env], SEED) as hub, hub_of([env], OTHER_SEED) as other:
        yield env, {(env, SEED): hub, (env, OTHER_SEED): other}


def hub_of(envs: list[str], seed: str) -> AbstractContextManager[ServiceProcess]:
    return hub_process(envs, environ={"PYTHONHASHSEED": seed})


def subsets_of(env: str, hub: ServiceProcess) -> list[Subset]:
    return [each for each in uvloop.run(list_subsets(hub.target)) if each.env == env]


def some_of(subsets: list[Subset]) -> list[Subset]:
    """Return at most NUM_SUBSETS subsets, the same ones on every machine."""
    chance = random.Random(len(subsets))
    subsets = [each for each in subsets if each.name not in WITHOUT_EXPERT]
    return chance.sample(subsets, min(NUM_SUBSETS, len(subsets)))


def test_expert_solves_every_sampled_item(served: tuple[str, Hubs]) -> None:
    env, hubs = served
    hub = hubs[env, SEED]
    subsets = subsets_of(env, hub)
    if NUM_ITEMS:
        tallies = list(solve_all(hub, subsets, num_items=NUM_ITEMS))
        assert {t.subset.name for t in tallies if not t.has_expert} <= WITHOUT_EXPERT
        low = [t for t in tallies if t.has_expert and t.solved_frac < MIN_SOLVED_FRAC]
        assert low == []
        return
    faults: list[SolvedItem] = []
    for subset in some_of(subsets):
        faults += uvloop.run(solve_subset(hub.target, subset, num_items=1)).faults
    assert faults == []


def test_sample_is_half_test_items_distinct_and_deterministic() -> None:
    subset = Subset(env="e", name="s", num_train=1000, num_test=50, max_turns=5)
    items = sample_items(subset, 20)
    assert items == sample_items(subset, 20)
    assert len(set(items)) == 20
    assert sum("-test-" in item_id for item_id in items) == 10
    assert len(sample_items(subset, 200)) == 200  # 50 test items are all there are
    small = Subset(env="e", name="s", num_train=2, num_test=2, max_turns=5)
    assert sample_items(small, 200) == ["s-test-0", "s-test-1", "s-train-0", "s-train-1"]


def test_tally_counts_the_items_with_a_fault() -> None:
    subset = Subset(env="e", name="s", num_train=2, num_test=2, max_turns=5)
    outcomes = [
        SolvedItem(item_id="s-test-0", num_turns=3),
        SolvedItem(item_id="s-test-1", num_turns=5, fault="no end in 5 turns"),
    ]
    tally = SubsetResult(subset=subset, outcomes=outcomes, took_s=1.0, num_retried=0)
    assert tally.solved_frac == 0.5
    assert [each.item_id for each in tally.faults] == ["s-test-1"]
    assert tally.has_expert
    helpless = [SolvedItem(item_id="s-test-0", num_turns=0, fault=NO_WAY)]
    assert not SubsetResult(subset=subset, outcomes=helpless, took_s=1.0, num_retried=0).has_expert


async def play(target: ServiceTarget, subset: Subset, item_id: str) -> list[object]:
    """Return all that an agent sees of an item: expert's, valid and invalid actions in turn."""
    chance = random.Random(item_id)
    async with Client(target) as client:
        session_id = await open_patiently(client, subset.env, item_id)
        seen: list[object] = [await client.want(200, "GET", f"/v1/sessions/{session_id}/render")]
        for seq in range(1, min(NUM_TURNS, subset.max_turns) + 1):
            hint = await client.hint(session_id)
            seen.append(hint)
            valid = hint["valid_actions"] or ["look"]
            expert = hint["expert_action"] or valid[0]
            action = chance.choice([expert, expert, chance.choice(valid), "no such action"])
            answer = await client.step(session_id, action, seq)
            seen.append((action, answer))
            if answer["done"]:
                break
        else:
            await client.delete(session_id)
    return seen


async def play_all(target: ServiceTarget, subsets: list[Subset]) -> dict[str, list[object]]:
    """Return the observations of one item of some subsets."""
    return {
        item_id: await play(target, subset, item_id)
        for subset in some_of(subsets)
        for item_id in sample_items(subset, 1)
    }


def test_observations_are_independent_of_the_hash_seed(served: tuple[str, Hubs]) -> None:
    env, hubs = served
    seen, seen_there = (
        uvloop.run(play_all(hubs[env, seed].target, subsets_of(env, hubs[env, seed])))
        for seed in (SEED, OTHER_SEED)
    )
    assert seen
    assert seen.keys() == seen_there.keys()
    assert [item_id for item_id in seen if seen[item_id] != seen_there[item_id]] == []
