"""Laws of the third split: validation records are neither trained nor test records."""

from pathlib import Path

import pytest

from common.errors import ConfigError
from envhub.env import Style, UnknownItem
from envhub.envs.dataset.env import DatasetEnv, make_spec
from envhub.envs.dataset.records import load_dataset
from tests.envhub.envs.dataset.made import GSM8K, make, options_of, run, write_lines

NUMBERED = [{"prompt": f"Add {i} and 1.", "answer": str(i + 1)} for i in range(20)]


def test_validation_records_are_held_out_of_both_other_splits(tmp_path: Path) -> None:
    options = make(tmp_path, NUMBERED, eval_size=3, validation_size=4).dataset
    splits = load_dataset(options).splits
    sizes = {name: len(split.numbers) for name, split in splits.items()}
    assert sizes == {"train": 13, "test": 3, "validation": 4}
    assert len({number for split in splits.values() for number in split.numbers}) == 20


def test_validation_records_do_not_move_the_test_records(tmp_path: Path) -> None:
    one = load_dataset(make(tmp_path, NUMBERED, eval_size=3).dataset)
    two = load_dataset(make(tmp_path, NUMBERED, eval_size=3, validation_size=4).dataset)
    assert one.splits["test"].numbers == two.splits["test"].numbers
    assert one.content["data settings"] != two.content["data settings"]


def test_folder_gives_its_validation_split(tmp_path: Path) -> None:
    for name, part in (
        ("train", NUMBERED[:9]),
        ("validation", NUMBERED[9:11]),
        ("test", NUMBERED[11:14]),
    ):
        write_lines(tmp_path / f"{name}.jsonl", part)
    options = options_of(tmp_path)
    spec = make_spec(options).subsets["data"]
    assert (spec.num_train, spec.num_validation, spec.num_test) == (9, 2, 3)
    dataset = load_dataset(options.dataset)
    assert dataset.question("validation", 0).messages[0]["content"] == "Add 9 and 1."
    assert [*dataset.content] == ["data.train", "data.eval", "data.validation", "data settings"]


def test_folder_whose_test_split_is_validation_has_no_third(tmp_path: Path) -> None:
    for name, part in (("train", NUMBERED[:9]), ("validation", NUMBERED[9:11])):
        write_lines(tmp_path / f"{name}.jsonl", part)
    spec = make_spec(options_of(tmp_path, eval_split="validation")).subsets["data"]
    assert (spec.num_train, spec.num_validation, spec.num_test) == (9, 0, 2)


def test_validation_data_equal_to_test_data_is_refused(tmp_path: Path) -> None:
    held_out = write_lines(tmp_path / "held_out.jsonl", GSM8K)
    options = make(tmp_path, NUMBERED, eval=str(held_out), validation=str(held_out)).dataset
    with pytest.raises(ConfigError, match=r"it is the same data as data\.train or data\.eval"):
        load_dataset(options)


def test_train_size_takes_the_first_records(tmp_path: Path) -> None:
    dataset = load_dataset(make(tmp_path, NUMBERED, train_size=2).dataset)
    assert [dataset.splits["train"].record(i)["answer"] for i in (0, 1)] == ["1", "2"]
    assert len(dataset.splits["train"].numbers) == 2


def test_validation_item_is_played_by_its_id(tmp_path: Path) -> None:
    env = make_spec(make(tmp_path, NUMBERED, validation_size=2)).make(Style.COMPACT)
    assert isinstance(env, DatasetEnv)
    assert run(env.reset("data-validation-1", 0)).startswith("Add ")
    with pytest.raises(UnknownItem, match="out of range"):
        run(env.reset("data-validation-2", 0))
