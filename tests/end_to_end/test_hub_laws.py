"""Every item can be solved over HTTP, and the same actions always see the same observations.

LONGSTRIDE_SOLVE_ITEMS=200 solves that many items of every subset; by default a few of some.
"""

import random
from collections.abc import Iterator

import pytest
import uvloop

from benchmarks.envhub.client import Client, ServiceTarget
from benchmarks.envhub.hub import ServiceProcess, hub_process
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
    solve_one_env,
    solve_subset,
)
from tests.end_to_end.hubs import amount, offline_envs
from tests.marks import WITH_PROCESSES, long_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

NUM_ITEMS = amount("LONGSTRIDE_SOLVE_ITEMS", default=0)
NUM_SUBSETS = 4  # by default, with one item each
NUM_TURNS = 10
WITHOUT_EXPERT = frozenset(subset_name(page) for page in UNSOLVABLE)


@pytest.fixture(scope="module", params=long_for(offline_envs(), WITH_PROCESSES))
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, ServiceProcess]]:
    """An environment and the hub that serves it."""
    with hub_process([request.param], environ={"PYTHONHASHSEED": "0"}) as hub:
        yield request.param, hub


def some_of(subsets: list[Subset]) -> list[Subset]:
    """Return at most NUM_SUBSETS subsets, the same ones on every machine."""
    chance = random.Random(len(subsets))
    subsets = [each for each in subsets if each.name not in WITHOUT_EXPERT]
    return chance.sample(subsets, min(NUM_SUBSETS, len(subsets)))


def test_expert_solves_every_sampled_item(served: tuple[str, ServiceProcess]) -> None:
    _, hub = served
    if NUM_ITEMS:
        tallies = list(solve_one_env(hub, num_items=NUM_ITEMS))
        assert {t.subset.name for t in tallies if not t.has_expert} <= WITHOUT_EXPERT
        low = [t for t in tallies if t.has_expert and t.solved_frac < MIN_SOLVED_FRAC]
        assert low == []
        return
    subsets = some_of(uvloop.run(list_subsets(hub.target)))
    faults: list[SolvedItem] = []
    for subset in subsets:
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


async def play_all(target: ServiceTarget) -> dict[str, list[object]]:
    """Return the observations of one item of some subsets."""
    return {
        item_id: await play(target, subset, item_id)
        for subset in some_of(await list_subsets(target))[:3]
        for item_id in sample_items(subset, 1)
    }


def test_observations_are_independent_of_the_hash_seed(served: tuple[str, ServiceProcess]) -> None:
    env, hub = served
    seen = uvloop.run(play_all(hub.target))
    with hub_process([env], environ={"PYTHONHASHSEED": "12345"}) as other:
        seen_there = uvloop.run(play_all(other.target))
    assert seen.keys() == seen_there.keys()
    assert [item_id for item_id in seen if seen[item_id] != seen_there[item_id]] == []
