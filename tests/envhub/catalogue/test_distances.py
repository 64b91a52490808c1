"""Laws of the distance dial: the reported turns equal the expert's turns."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from common.config.env import RemoteOptions
from common.config.envs import EnvsSection
from common.ids import subset_at
from envhub.catalogue import distances
from envhub.catalogue.distances import Distances, counted, measured
from envhub.catalogue.registry import Registry, load_spec
from envhub.env import Env, Style, UnknownItem
from envhub.hosting.sessions import Sessions

RANGES = {
    ("maze", "DoubleT"): (3, 9),
    ("textcraft", "depth2"): (4, 5),
    ("babyai", "GoToObjMazeS7"): (3, 12),
    ("babyai", "UnlockPickupDist"): (2, 8),
    ("rooms", "Carry"): (7, 9),
}


@pytest.fixture(autouse=True)
def small_and_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(distances, "NUM_MEASURED", 60)
    return iter(())


def turns_of(env_name: str, item_id: str) -> int:
    """Play the expert on an item."""
    env = cast(Env, load_spec(env_name, EnvsSection(), RemoteOptions()).make(Style.COMPACT))
    env.reset(item_id, 0)
    results = [env.step(action) for action in iter(env.expert_action, None)]
    assert results[-1].is_success
    return len(results)


@pytest.mark.parametrize(("env", "subset"), list(RANGES))
def test_items_at_a_distance_take_the_expert_that_long(env: str, subset: str) -> None:
    low, high = RANGES[env, subset]
    name = subset_at(subset, low, high)
    registry = Registry([env])

    async def ask() -> tuple[dict, list[str]]:
        asked = Distances(registry)
        entry = (await asked.catalogue([f"{env}/{name}", "elsewhere/x@1..2"]))[env]
        sizes = {"train": entry["subsets"][name]["num_train"]}
        sizes["test"] = entry["subsets"][name]["num_test"]
        ids = [
            await asked.plain(env, f"{name}-{s}-{i}") for s, n in sizes.items() for i in range(n)
        ]
        with pytest.raises(UnknownItem, match="out of range"):
            await asked.plain(env, f"{name}-train-{sizes['train']}")
        return entry, ids

    entry, ids = asyncio.run(ask())
    assert ids
    assert len(set(ids)) == len(ids)
    assert {split for item_id in ids for split in ("train", "test") if split in item_id} == {
        "train",
        "test",
    }
    assert all(low <= turns_of(env, item_id) <= high for item_id in ids[::3])
    told = entry["distances"][subset]["train"]
    assert (
        sum(n for t, n in told.items() if low <= t <= high) == entry["subsets"][name]["num_train"]
    )
    assert entry["subsets"][name]["max_turns"] == entry["subsets"][subset]["max_turns"]


def test_item_at_distance_equals_plain_id() -> None:
    async def first_observations() -> tuple[str, str]:
        sessions = Sessions(Registry(["maze"]), idle_s=9.0, capacity=9, step_timeout_s=9.0)
        plain = await sessions.distances.plain("maze", "DoubleT@3..9-test-0")
        return (
            (await sessions.create("maze", "DoubleT@3..9-test-0"))[1],
            (await sessions.create("maze", plain))[1],
        )

    far, plain = asyncio.run(first_observations())
    assert far == plain


def test_distances_are_cached_on_disk_until_something_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = load_spec("rooms", EnvsSection(), RemoteOptions())
    first = measured(spec, "Carry", EnvsSection())
    numbers = [*range(1, 9)] * 4 + [*range(10, 17)] * 2 + [9, *range(18, 33)]
    numbers.remove(1)
    numbers.remove(5)  # the first 15 items of each band
    assert counted(first)["train"] == Counter(numbers)
    asked: list[str] = []
    monkeypatch.setattr(distances, "_play", lambda _, item_id, __: asked.append(item_id) or 1)
    assert measured(spec, "Carry", EnvsSection()) == first
    assert not asked
    monkeypatch.setattr(distances, "NUM_MEASURED", 61)
    assert len(measured(spec, "Carry", EnvsSection())["train"]) == len(asked) - 61 == 61


def test_rooms_item_ends_after_twice_its_expert_turns() -> None:
    env = cast(Env, load_spec("rooms", EnvsSection(), RemoteOptions()).make(Style.COMPACT))
    first = env.reset("Carry-train-5", 0)
    assert first.startswith("goal: open the door of your key\n")
    assert turns_of("rooms", "Carry-train-5") == 7
    for turn in range(14):
        wrong = next(a for a in env.valid_actions() if a != env.expert_action())
        result = env.step(wrong if turn % 2 else "look around")
        assert result.is_valid is bool(turn % 2)
        assert (result.done, result.reward, result.is_success) == (turn == 13, 0.0, False)
    env.reset("Carry-train-5", 0)
    assert env.step(env.expert_action() or "").state != env.step("look").state
