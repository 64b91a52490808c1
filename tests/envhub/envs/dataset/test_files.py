"""Laws of the dataset's files: formats, splits, and errors that name file and line."""

import gzip
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from common.errors import ConfigError
from envhub.envs.dataset.files import find_data, read_records
from tests.envhub.envs.dataset.made import write_lines

RECORDS = [{"question": "1+1, or so?", "answer": "2"}, {"question": 'a "b"', "answer": "c"}]


def read(path: Path, split: str = "train") -> list[dict[str, object]]:
    return read_records("data.train", path, split)


def test_json_lines_are_read_with_empty_lines_between(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n".join(map(json.dumps, RECORDS)), encoding="utf-8-sig")
    assert read(path) == RECORDS


@pytest.mark.parametrize("held", [RECORDS, {"data": RECORDS, "version": 1}])
def test_json_list_is_read_also_below_a_name(tmp_path: Path, held: object) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(held), encoding="utf-8")
    assert read(path) == RECORDS


def test_json_file_may_hold_lines_and_lines_file_a_list(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.json", RECORDS)
    assert read(tmp_path / "a.json") == RECORDS
    (tmp_path / "a.jsonl").write_text("\n" + json.dumps(RECORDS, indent=1), encoding="utf-8")
    assert read(tmp_path / "a.jsonl") == RECORDS
    (tmp_path / "b.json").write_text('{"a": 1}\n\n{"a": \n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"b\.json line 3: not JSON"):
        read(tmp_path / "b.json")


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv"])
def test_compressed_text_is_read(tmp_path: Path, ending: str) -> None:
    rows = 'question,answer\n"1+1, or so?",2\n"a ""b""",c\n'
    text = rows if ending == "csv" else json.dumps(RECORDS)
    path = tmp_path / f"a.{ending}.gz"
    path.write_bytes(gzip.compress(text.encode()))
    assert read(path) == RECORDS
    assert read(tmp_path) == RECORDS
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ConfigError, match="cannot be read as UTF-8 text"):
        read(path)


@pytest.mark.parametrize(("ending", "separator"), [("csv", ","), ("tsv", "\t")])
def test_table_is_read_by_its_header(tmp_path: Path, ending: str, separator: str) -> None:
    path = tmp_path / f"a.{ending}"
    rows = [("question", "answer"), ('"1+1, or so?"', "2"), ('"a ""b"""', "c")]
    path.write_text("".join(separator.join(row) + "\n" for row in rows), encoding="utf-8")
    assert read(path) == RECORDS


def test_folder_gives_the_files_of_a_split(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data" / "train-00000-of-00002.jsonl", RECORDS[:1])
    write_lines(tmp_path / "data" / "train-00001-of-00002.jsonl", RECORDS[1:])
    write_lines(tmp_path / "data" / "test-00000-of-00001.jsonl", RECORDS[1:])
    assert read(tmp_path) == RECORDS
    assert read(tmp_path, "test") == RECORDS[1:]
    with pytest.raises(ConfigError, match="no file of the split 'dev'; the files are data/test-0"):
        read(tmp_path, "dev")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": 1\n', r"data\.train=.*a\.jsonl line 2: not JSON"),
        ("a.jsonl", "[1]\n", "line 1: the record is list, not an object"),
        ("a.jsonl", "", "the file has no records"),
        ("a.json", "{", "not JSON"),
        ("a.json", '{"a": 1}', "expects a list of objects"),
        ("a.json", "[1]", "record 1: the record is int"),
        ("a.json", '{"a": 1, "b": [{"role": "user"}]}', "is one record with the column 'b'"),
        ("a.json", '{"a": 1, "b": [{"a": 2}]}', "is one record with the column 'b'"),
        ("a.csv", "a,b,b\n1,2,3\n", "the first line has the column 'b' twice"),
        ("a.csv", "a,b\n1\n", "line 2: the row has not the 2 fields of the first line"),
        ("a.xls", "x", r"the format '\.xls' is unknown; known are \.jsonl"),
    ],
)
def test_malformed_file_is_refused_with_its_place(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        read(tmp_path / name)


def test_text_in_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": "\xff"}\n')
    with pytest.raises(ConfigError, match="cannot be read as UTF-8 text"):
        read(tmp_path / "a.jsonl")


def test_folder_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the folder has no file of a known format"):
        read(tmp_path)


@pytest.mark.skipif(find_spec("datasets") is not None, reason="the package is installed")
def test_parquet_and_hub_without_datasets_name_the_package(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    for path in (tmp_path / "a.parquet", find_data("data.train", "owner/name:part")):
        with pytest.raises(ConfigError, match=r"needs the package datasets\. Install it with: pip"):
            read(path)


def test_missing_path_is_refused_unless_it_is_a_name_of_the_hub() -> None:
    for given in ("missing", "missing/a.jsonl", "/a/b", "a/b/c"):
        with pytest.raises(ConfigError, match=f"data.train={given}: no such file or folder"):
            find_data("data.train", given)


@pytest.mark.parametrize(
    "name", ["gsm8k_{}.jsonl", "data.{}.jsonl", "{}/test_cases.jsonl", "{}-0.jsonl", "my {}2.jsonl"]
)
def test_file_belongs_to_the_first_split_of_its_name(tmp_path: Path, name: str) -> None:
    for split, records in (("Train", RECORDS[:1]), ("test", RECORDS[1:])):
        path = tmp_path / name.format(split)
        path.parent.mkdir(exist_ok=True)
        write_lines(path, records)
    assert read(tmp_path) == RECORDS[:1]
    assert read(tmp_path, "test") == RECORDS[1:]


def test_folder_of_other_split_names_is_refused(tmp_path: Path) -> None:
    for name in ("training", "testing"):
        write_lines(tmp_path / f"{name}.jsonl", RECORDS)
    with pytest.raises(ConfigError, match=r"no file of the split 'train'.*Set data\.train_split"):
        read(tmp_path)
    assert read(tmp_path, "training") == RECORDS


def test_folder_with_two_datasets_is_refused_by_name(tmp_path: Path) -> None:
    for name in ("main", "socratic"):
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "train-00000-of-00001.jsonl", RECORDS)
    with pytest.raises(ConfigError) as caught:
        read_records("data.train", tmp_path, "train")
    assert "several folders have the split 'train': main, socratic; name one" in str(caught.value)
    assert read_records("data.train", tmp_path / "main", "train") == RECORDS


def test_split_in_a_folder_of_its_own_may_have_several_files(tmp_path: Path) -> None:
    for part in ("train/a", "train/b"):
        (tmp_path / part).mkdir(parents=True)
        write_lines(tmp_path / part / "0.jsonl", RECORDS[:1])
    assert read_records("data.train", tmp_path, "train") == [RECORDS[0], RECORDS[0]]
