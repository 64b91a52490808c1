"""Laws of the test sets of AgentGym-RL's tables."""

import json
from collections import Counter
from pathlib import Path

import pytest

from common.config.envs import EnvsSection, SciworldOptions, SearchqaOptions, own_tasks
from common.config.load import load_config
from envhub.agentgym.dialects import DIALECTS
from envhub.agentgym.paper import PAPER
from envhub.catalogue.registry import Registry
from envhub.env import PaperSet, Style, parse_item
from envhub.envs.babyai import levels
from envhub.envs.searchqa.questions import AGENTGYM_RANGES
from tools.evaluate.config import EvalConfig

SIZES = {  # the denominators of Tables 1 to 5
    "webarena": [15, 15, 10, 5, 5],
    "searchqa": [50, 50, 50, 50, 50, 100, 50],
    "textcraft": [31, 41, 25, 3],
    "babyai": [55, 15, 5, 5, 5, 5],
    "sciworld": [53, 83, 44, 5, 15],
}


def paper_of(name: str, options: EnvsSection | None = None) -> PaperSet:
    spec = Registry([name], options).spec(name)
    assert spec.paper is not None
    for items in spec.paper.items.values():
        for item_id in items:
            parse_item(item_id, spec.subsets)
    return spec.paper


@pytest.mark.parametrize("name", SIZES)
def test_sets_have_the_sizes_of_the_tables(name: str):
    assert [*PAPER[name]["sizes"].values()] == SIZES[name]
    if name == "webarena":  # without its sites they are those of minisites
        name = "minisites"
    paper = paper_of(name)
    assert {s: len(items) for s, items in paper.items.items()} == PAPER[name]["sizes"]
    items = [item for some in paper.items.values() for item in some]
    assert len(set(items)) == len(items)


def test_search_numbers_are_the_published_four_hundred():
    numbers = PAPER["searchqa"]["numbers"]
    assert len(set(numbers)) == 400
    sets = Counter(
        name
        for number in numbers
        for first, end, name, split in AGENTGYM_RANGES
        if first <= number < end and split == "test"
    )
    assert sets == PAPER["searchqa"]["sizes"]


def test_babyai_is_the_papers_to_the_item():
    paper = paper_of("babyai")
    assert paper.note == ""
    found = {
        levels.locate(parse_item(item, levels.subsets()))
        for some in paper.items.values()
        for item in some
    }
    meant = {
        (levels.AGENTGYM_LEVELS[number % 40], number // 40)
        for first, end, step in DIALECTS["babyai"].test_items
        for number in range(first, end, step)
    }
    assert found == meant


def test_own_test_sets_are_marked_and_published_files_are_not(tmp_path: Path):
    assert paper_of("textcraft").note == own_tasks("textcraft", EnvsSection()) != ""
    assert "envs.sciworld.test_items" in paper_of("sciworld").note
    file = tmp_path / "sciworld_test.json"
    file.write_text(
        json.dumps([{"item_id": f"sciworld_{n}"} for n in (606, 121, 0)]), encoding="utf-8"
    )
    options = EnvsSection(sciworld=SciworldOptions(test_items=str(file)))
    paper = paper_of("sciworld", options)
    assert paper.note == ""
    assert [len(items) for items in paper.items.values()] == [2, 1]
    assert list(paper.items) == ["Measure", "all"]


def test_search_set_loads_from_question_files_and_reports_gaps(tmp_path: Path):
    row = json.dumps({"question": "who?", "golden_answers": ["me"]})
    (tmp_path / "bamboogle_test.jsonl").write_text(f"{row}\n" * 125, encoding="utf-8")
    options = EnvsSection(searchqa=SearchqaOptions(questions_dir=str(tmp_path)))
    paper = paper_of("searchqa", options)
    first = min(number for number in PAPER["searchqa"]["numbers"] if number >= 51_588)
    assert f"bamboogle-test-{first - 51_588}" in paper.items["bamboogle"]
    assert [*map(len, paper.items.values())] == [50]
    assert paper.note == "50 of the paper's 400 items"


def test_config_of_the_tables_plays_every_set():
    cfg = load_config("agentgym-paper-tables", ["model.path=unset"], schema=EvalConfig)
    assert (cfg.eval.items, cfg.eval.num_items, cfg.envs.agentgym_rules) == ("paper", -1, True)
    assert cfg.envhub.style == Style.AGENTGYM
    subsets = {(task.env, task.subset) for task in cfg.tasks}
    names = ("minisites", "searchqa", "textcraft", "babyai", "sciworld")
    assert subsets == {(name, subset) for name in names for subset in PAPER[name]["sizes"]}


def test_babyai_level_three_matches_agentgyms_numbers_and_rules():
    item = levels.from_agentgym(3 + 40 * 7)
    assert item == "GoToObjS4-train-7"
    assert levels.make_level("GoToObjS4").room_size == 4
    assert levels.make_level("GoToObjS6").room_size == 6
    spec = Registry(["babyai"], EnvsSection(agentgym_rules=True)).spec("babyai")
    env = spec.make(Style.AGENTGYM)
    assert env.reset("GoTo-test-3", 0) == env.reset("GoToObjS4-train-45", 0)


@pytest.mark.parametrize("split", ["train", "test"])
def test_crafting_items_of_a_task_differ_in_more_than_order(split: str):
    spec = Registry(["textcraft"]).spec("textcraft")
    env = spec.make(Style.AGENTGYM)
    for task in spec.tasks.values():
        items = getattr(task, split)
        shown = {tuple(sorted(str(env.reset(item, 0)).splitlines())) for item in items}
        assert len(shown) == len(items), task.subset
