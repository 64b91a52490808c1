"""Laws of short keys: `data.*` and `reward` name options of the dataset environment."""

from pathlib import Path
from typing import Any

import pytest

from common.config.load import load_config
from common.errors import ConfigError


def dataset_of(text: str, *overrides: str, folder: Path) -> Any:
    path = folder / "mine.yaml"
    path.write_text(f"defaults: quickstart\n{text}", encoding="utf-8")
    return load_config(str(path), overrides).envs.dataset


def test_short_keys_work_in_files_and_overrides(tmp_path: Path) -> None:
    text = "data: {train: a.jsonl, shuffle: 3}\nreward: exact_number\n"
    found = dataset_of(text, "data.eval=b.jsonl", folder=tmp_path)
    assert (found.train, found.eval, found.shuffle) == ("a.jsonl", "b.jsonl", 3)
    assert found.reward == "exact_number"
    assert dataset_of(text, "reward=m:f", folder=tmp_path).reward == "m:f"


def test_several_rewards_form_a_map(tmp_path: Path) -> None:
    text = "reward: {a: m:f, b: {function: m:g, weight: 0.5}}\n"
    expected = {"a": "m:f", "b": {"function": "m:g", "weight": 0.25}}
    assert dataset_of(text, "reward.b.weight=0.25", folder=tmp_path).reward == expected
    given = dataset_of("", "reward={a: m:f}", "data.train=x", folder=tmp_path)
    assert given.reward == {"a": "m:f"}


def test_short_and_whole_keys_are_the_same_key(tmp_path: Path) -> None:
    both = ("data.train=a", "envs.dataset.train=b")
    with pytest.raises(ConfigError, match=r"envs\.dataset\.train is given twice"):
        dataset_of("", *both, folder=tmp_path)


def test_short_and_whole_sections_of_a_file_are_merged(tmp_path: Path) -> None:
    text = "envs: {dataset: {reward: {a: m:f}}}\ndata: {reward: {c: m:h}}\nreward: {b: m:g}\n"
    found = dataset_of(text, folder=tmp_path)
    assert found.reward == {"a": "m:f", "b": "m:g", "c": "m:h"}
    assert dataset_of("envs:\ndata: {train: a}\n", folder=tmp_path).train == "a"


@pytest.mark.parametrize(
    "text",
    [
        "data: {reward: m:f}\nreward: m:g\n",
        "envs: {dataset: {reward: m:f}}\nreward: {a: m:g}\n",
        "envs: {dataset: {reward: {a: m:f}}}\ndata: {reward: {a: m:g}}\n",
    ],
)
def test_two_values_of_a_key_in_a_file_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine\.yaml: envs\.dataset\.reward\S* is given twice"):
        dataset_of(text, folder=tmp_path)


def test_wrong_short_key_names_the_nearest_short_key(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.trian=x: no such key; the nearest is data\.train$"
    ):
        dataset_of("", "data.trian=x", folder=tmp_path)
