"""Laws of which of a server's items are for training and which for tests, and of their lists."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.config.env import RemoteOptions
from common.config.envs import EnvsSection, ItemFiles
from common.errors import ConfigError
from envhub.agentgym.dialects import DIALECTS
from envhub.agentgym.item_lists import indices_of, read_list, spread
from envhub.agentgym.remote import make_spec
from envhub.catalogue.registry import Registry
from envhub.env import Env, Style
from envhub.envs.searchqa.questions import AGENTGYM_RANGES

SIZES = {  # training and test items without a file
    "textcraft": (444, 100),
    "babyai": (810, 90),
    "alfworld": (2420, 200),
    "sqlgym": (9428, 1534),
    "searchqa": (169_615, 51_713),
    "webarena": (762, 50),
    "weather": (323, 20),
    "academia": (0, 20),
}


def numbers(dialect: str, **options: Any) -> dict[str, Any]:
    return indices_of(DIALECTS[dialect], RemoteOptions(dialect=dialect, url="http://h", **options))


def listed(path: Path, *entries: object) -> str:
    path.write_text(json.dumps(entries), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_training_and_test_items_of_a_server_are_disjoint(name: str):
    found = numbers(name)
    held_out = {*found["test"]}
    assert held_out
    assert held_out.isdisjoint(found["train"])
    known = DIALECTS[name].num_items
    assert known is None or max([*found["train"], *held_out]) < known
    assert (len(found["train"]), len(found["test"])) == SIZES.get(
        name, (len(found["train"]), len(held_out))
    )


def test_search_splits_hold_training_questions_and_all_test_sets():
    found = numbers("searchqa", num_train=500, num_test=350)
    assert min(found["train"]) >= 51_713

    def sets(split: str) -> set[str]:
        return {
            name
            for number in found[split]
            for first, end, name, _ in AGENTGYM_RANGES
            if first <= number < end
        }

    assert sets("train") == {"nq", "hotpotqa"}
    assert len(sets("test")) >= 6


def test_sciworld_splits_hold_every_task_and_the_test_variations():
    found = numbers("sciworld", num_train=200)
    assert min(found["train"]) < 30  # boiling
    assert max(found["train"]) > 4_490  # life spans
    assert numbers("sciworld")["test"][0] == 21  # Boiling has variations 0 to 29.


@pytest.mark.parametrize("num", [0, 1, 7, 100, -1])
def test_items_are_taken_at_even_distances(num: int):
    places = spread(range(100), num)
    assert len(places) == (100 if num < 0 else num)
    assert len({*places}) == len(places)


def test_item_lists_load_in_all_published_forms(tmp_path: Path):
    plain = listed(tmp_path / "a.json", {"item_id": "textcraft_533"}, {"item_id": "textcraft_0"})
    trajectories = {"conversations": None, "item_id": "textcraft_140"}
    folder = tmp_path / "textcraft"
    folder.mkdir()
    listed(folder / "textcraft_test.json", trajectories)
    assert read_list(plain, DIALECTS["textcraft"]) == [533, 0]
    assert read_list(str(folder), DIALECTS["textcraft"]) == [140]
    assert read_list(listed(tmp_path / "b.json", "nq_3"), DIALECTS["searchqa"]) == [3]
    assert read_list(listed(tmp_path / "c.json", 7), DIALECTS["maze"]) == [7]
    assert read_list(
        listed(tmp_path / "d.json", "lmrlgym_maze_1", "lmrlgym_maze_26"), DIALECTS["maze"]
    ) == [1]


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        (["babyai_3"], "'babyai_3' is an item of babyai, not of textcraft"),
        (["textcraft_x"], "'textcraft_x' is not of the form textcraft_<number>"),
        (["textcraft_600"], "textcraft has no item of this list"),
        ([], "must be a list of items"),
        ([{"id": 3}], "is not of the form"),
        (["pick-and-place-trial_T2019_043461"], "is not of the form"),
    ],
)
def test_malformed_list_is_refused_by_name(tmp_path: Path, entries: list[Any], told: str):
    path = listed(tmp_path / "list.json", *entries)
    with pytest.raises(ConfigError, match=told) as refused:
        read_list(path, DIALECTS["textcraft"])
    assert path in str(refused.value)


def test_missing_list_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        make_spec(RemoteOptions(dialect="maze", url="http://h", test_items="nowhere.json"))


def test_listed_test_items_are_excluded_from_training(tmp_path: Path):
    tests = listed(tmp_path / "t.json", *(f"sciworld_{i}" for i in range(0, 4639, 50)))
    found = numbers("sciworld", test_items=tests)
    assert [*found["test"]] == list(range(0, 4639, 50))
    assert {*found["train"]} == {*range(4639)} - {*found["test"]}


def test_listed_training_items_exclude_the_default_test_items(tmp_path: Path):
    tests = [*numbers("textcraft")["test"]]
    trains = listed(tmp_path / "t.json", *(f"textcraft_{i}" for i in range(544)))
    found = numbers("textcraft", train_items=trains)
    assert [*found["test"]] == tests
    assert {*found["train"]} == {*range(544)} - {*tests}
    both = numbers("textcraft", train_items=trains, test_items=trains)
    assert [*both["train"]] == [*both["test"]] == [*range(544)]
    only = listed(tmp_path / "o.json", *(f"textcraft_{i}" for i in tests))
    with pytest.raises(ConfigError, match=r"env\.train_items=.*all items are test items"):
        numbers("textcraft", train_items=only)


@pytest.mark.parametrize("name", ["maze", "babyai", "textcraft", "wordle"])
def test_published_list_becomes_a_subset_of_our_environment(tmp_path: Path, name: str):
    path = listed(tmp_path / "list.json", *(f"{name}_{i}" for i in (7, 3, 11)))
    options = EnvsSection()
    section = replace(getattr(options, name), test_items=path)
    spec = Registry([name], replace(options, **{name: section})).spec(name)
    assert (spec.subsets["agentgym"].num_train, spec.subsets["agentgym"].num_test) == (0, 3)
    assert spec.tasks["AgentGym"].test == tuple(f"agentgym-test-{i}" for i in range(3))
    assert spec.from_agentgym is not None
    for i, number in enumerate((7, 3, 11)):
        env: Any = spec.make(Style.AGENTGYM)
        twin: Env = Registry([name]).spec(name).make(Style.AGENTGYM)  # pyright: ignore
        assert env.reset(f"agentgym-test-{i}", 0) == twin.reset(spec.from_agentgym(number), 0)
        assert env.fingerprint() == twin.fingerprint()
        env.close()


def test_environment_without_a_list_has_no_agentgym_subset():
    spec = Registry(["maze"], EnvsSection(maze=ItemFiles())).spec("maze")
    assert "agentgym" not in spec.subsets
    assert asyncio.iscoroutinefunction(spec.make(Style.AGENTGYM).reset) is False
