"""Laws of the generated world and of question files in the same format."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from common.config.envs import EnvsSection, SearchqaOptions
from envhub.env import EnvFailure, ItemId, UnknownItem
from envhub.envs.searchqa.env import check, make_spec
from envhub.envs.searchqa.index import MemoryRetriever
from envhub.envs.searchqa.questions import (
    DATASETS,
    SPLITS,
    QuestionFiles,
    SearchQuestion,
    agentgym_item,
    make_question,
)
from envhub.envs.searchqa.world.world import WORLD_SUBSETS, the_world, write_world
from tests.envhub.envs.playing import elsewhere


def digest() -> str:
    """Return a hash of the whole world."""
    world = the_world()
    rows = [world.rows(subset, split) for subset in DATASETS for split in SPLITS]
    facts = [[one.title, one.text] for one in world.passages()]
    return hashlib.sha256(json.dumps([facts, rows]).encode()).hexdigest()


def options(**given: Any) -> EnvsSection:
    return EnvsSection(searchqa=SearchqaOptions(**given))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The world as files."""
    path = tmp_path_factory.mktemp("world")
    write_world(path)
    return path


def test_world_titles_are_unique() -> None:
    passages = the_world().passages()
    assert len(passages) >= 2000
    assert len({passage.title for passage in passages}) == len(passages)


def test_splits_share_no_question_and_no_start() -> None:
    starts: dict[str, set[str]] = {split: set() for split in SPLITS}
    texts: dict[str, set[str]] = {split: set() for split in SPLITS}
    for subset in DATASETS:
        for split in SPLITS:
            for row in the_world().rows(subset, split):
                question = make_question(row)
                texts[split].add(question.text.lower())
                starts[split].add(question.hops[0].title)
    assert not texts["train"] & texts["test"]
    assert not starts["train"] & starts["test"]


def test_query_of_every_hop_finds_passage() -> None:
    retriever = MemoryRetriever(the_world().passages())
    hops = {
        hop
        for subset in DATASETS
        for split in SPLITS
        for row in the_world().rows(subset, split)[:200]
        for hop in make_question(row).hops
    }
    missed = [
        hop
        for hop in sorted(hops, key=lambda hop: hop.query)
        if not any(
            one.title == hop.title and hop.evidence in one.text
            for one in retriever.search(hop.query, 3)
        )
    ]
    assert missed == []


@pytest.mark.parametrize(
    ("subset", "num_hops"),
    [("nq", {1}), ("popqa", {1}), ("bamboogle", {2}), ("musique", {2, 3, 4}), ("2wiki", {2, 4})],
)
def test_subset_has_its_number_of_hops(subset: str, num_hops: set[int]) -> None:
    rows = the_world().rows(subset, "test")
    assert {len(make_question(row).hops) for row in rows} == num_hops


def test_yes_and_no_answers_are_balanced() -> None:
    answers = [make_question(row).golden_answers for row in the_world().rows("hotpotqa", "train")]
    num_yes, num_no = answers.count(("yes",)), answers.count(("no",))
    assert min(num_yes, num_no) > 100
    assert abs(num_yes - num_no) < 0.3 * (num_yes + num_no)


@pytest.mark.slow
def test_world_does_not_depend_on_the_hash_seed() -> None:
    assert elsewhere(__name__, "digest()", hash_seed=77) == digest()


def test_exported_question_files_equal_the_world(folder: Path) -> None:
    bank = QuestionFiles(folder)
    assert bank.subsets() == WORLD_SUBSETS
    for subset in DATASETS:
        item = ItemId(subset=subset, split="test", index=49)
        assert bank.question(item) == the_world().question(item)


@pytest.mark.parametrize(
    "row",
    [
        {"id": "0", "question": " who is it ", "golden_answers": ["A", "B"], "data_source": "nq"},
        {"question": "who is it?", "answers": ["A", "B"], "metadata": None},
        {"question": "who is it", "reward_model": {"ground_truth": {"target": ["A", "B"]}}},
    ],
)
def test_row_of_either_form_is_read(row: dict[str, object]) -> None:
    assert make_question(row) == SearchQuestion("who is it?", ("A", "B"), ())


@pytest.mark.parametrize(
    "row",
    [
        {"question": "who?"},
        {"question": " ", "golden_answers": ["A"]},
        {"question": "who?", "golden_answers": []},
        {"question": "who?", "golden_answers": [" "]},
        {"golden_answers": ["A"]},
        [],
    ],
)
def test_row_without_question_or_answer_is_refused(row: object) -> None:
    with pytest.raises(ValueError, match="question"):
        make_question(row)


def test_bad_row_raises_an_error_with_file_and_question(tmp_path: Path) -> None:
    (tmp_path / "nq_train.jsonl").write_text(
        '\n{"question": "a?", "answer": 5}\n\n{"x": 1}\n', encoding="utf-8"
    )
    bank = QuestionFiles(tmp_path)
    assert (bank.subsets()["nq"].num_train, bank.subsets()["nq"].num_test) == (2, 0)
    assert bank.question(ItemId(subset="nq", split="train", index=0)).golden_answers == ("5",)
    with pytest.raises(EnvFailure, match=r"nq_train\.jsonl, question 1"):
        bank.question(ItemId(subset="nq", split="train", index=1))


@pytest.mark.parametrize(
    ("index", "item_id"),
    [
        (0, "nq-test-0"),
        (3609, "nq-test-9"),
        (3610, "triviaqa-test-0"),
        (29189, "popqa-test-66"),
        (51588, "bamboogle-test-0"),
        (51713, "nq-train-0"),
        (221327, "hotpotqa-train-446"),
    ],
)
def test_agentgym_index_maps_to_a_question_of_its_dataset(index: int, item_id: str) -> None:
    assert agentgym_item(index, WORLD_SUBSETS, wrap=True) == item_id


@pytest.mark.parametrize("index", [-1, 221328])
def test_agentgym_index_out_of_range_is_unknown(index: int) -> None:
    with pytest.raises(UnknownItem, match="0 to 221327"):
        agentgym_item(index, WORLD_SUBSETS, wrap=True)


def test_agentgym_index_beyond_a_file_is_unknown() -> None:
    with pytest.raises(UnknownItem, match="100 questions, so no 100"):
        agentgym_item(100, WORLD_SUBSETS, wrap=False)


def test_check_finds_nothing_when_all_is_there(folder: Path) -> None:
    assert check(options()) == []
    given = options(questions_dir=str(folder), corpus=str(folder / "corpus.jsonl"))
    assert check(given) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"questions_dir": "/no/such", "retriever_url": "http://h:1"}, "is not a folder"),
        ({"questions_dir": "{empty}", "retriever_url": "http://h:1"}, "holds no questions"),
        ({"questions_dir": "{folder}"}, "set envs.searchqa.corpus"),
        ({"corpus": "{folder}/corpus.jsonl"}, "set envs.searchqa.questions_dir"),
        ({"questions_dir": "{folder}", "corpus": "/no/such.jsonl"}, "No such file"),
        ({"questions_dir": "{folder}", "corpus": "{folder}/nq_test.jsonl"}, "a passage must have"),
        ({"questions_dir": "{folder}", "corpus": "{folder}"}, "directory"),
        ({"questions_dir": "{folder}", "retriever_url": "ftp://h"}, "http://HOST:PORT"),
    ],
)
def test_check_names_each_fault_in_one_line(
    given: dict[str, str], words: str, folder: Path, tmp_path: Path
) -> None:
    filled = {key: value.format(folder=folder, empty=tmp_path) for key, value in given.items()}
    lines = check(options(**filled))
    assert len(lines) == 1
    assert words in lines[0]
    assert "\n" not in lines[0]


def test_tasks_have_the_papers_test_sizes() -> None:
    spec = make_spec(options())
    sizes = {task.subset: len(task.test) for task in spec.tasks.values()}
    assert sizes == {name: 100 if name == "musique" else 50 for name in DATASETS}
    assert all(len(set(task.train)) == 500 for task in spec.tasks.values())


def test_tasks_omit_datasets_without_files(tmp_path: Path) -> None:
    row = json.dumps({"question": "a?", "golden_answers": ["b"]}) + "\n"
    (tmp_path / "popqa_test.jsonl").write_text(row * 3, encoding="utf-8")
    spec = make_spec(options(questions_dir=str(tmp_path), retriever_url="http://h:1"))
    assert list(spec.tasks) == ["PopQA"]
    assert spec.tasks["PopQA"].train == ()
    assert spec.tasks["PopQA"].test == ("popqa-test-0", "popqa-test-1", "popqa-test-2")
