"""Laws of the formats and rewards that need packages, each in an environment that has them."""

import subprocess
from pathlib import Path

import pytest

from common.repository import ROOT
from tests.venvs import python_with

PARQUET = """
import sys
from pathlib import Path

sys.path.insert(0, "ROOT")
import datasets
import pyarrow
import pyarrow.parquet as parquet

from common.errors import ConfigError
from envhub.envs.dataset.files import has_split, read_records
from envhub.envs.dataset.records import load_dataset
from tests.envhub.envs.dataset.made import DAPO, GSM8K, options_of, played

folder = Path(sys.argv[1])


def read(path, split="train"):
    return read_records("data.train", path, split)


def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(records), path)


def dataset_of(records):
    write(folder / f"{len(records)}.parquet", records)
    return datasets.Dataset.from_parquet(str(folder / f"{len(records)}.parquet"))


for part in ("main", "socratic"):  # The layout of openai/gsm8k.
    write(folder / "gsm8k" / part / "train-00000-of-00001.parquet", GSM8K)
    write(folder / "gsm8k" / part / "test-00000-of-00001.parquet", GSM8K[:1])
gsm8k = options_of(folder / "gsm8k" / "main")
assert load_dataset(gsm8k.dataset).question("test", 0).ground_truth == "7"
assert [played(gsm8k, text, item=2).reward for text in ("#### 2.5", "#### 2")] == [1.0, 0.0]
write(folder / "dapo" / "data" / "dapo-math-17k.parquet", DAPO)
dapo = options_of(folder / "dapo", eval_size=0)
assert load_dataset(dapo.dataset).question("train", 1).messages == DAPO[1]["prompt"]
assert [played(dapo, text, item=1).reward for text in ("Answer: 16", "Answer: 4")] == [1.0, 0.0]
write(folder / "dapo.parquet", DAPO)
assert read(folder / "dapo.parquet") == DAPO
# Arrow gives a tool the arguments of all others, as nulls.
kind = {"type": "string"}
tools = [{"name": n, "parameters": {"type": "object", "properties": {n: kind}}} for n in "ab"]
calls = [{"name": n, "arguments": {n: None, "of": [n]}} for n in "ab"]
row = {"prompt": "?", "tools": tools, "tool_calls": calls, "more": None}
write(folder / "tools.parquet", [row])
(record,) = read(folder / "tools.parquet")
assert record["tools"] == tools and record["more"] is None
assert [each["arguments"] for each in record["tool_calls"]] == [{"of": ["a"]}, {"of": ["b"]}]
dataset_of(GSM8K).save_to_disk(folder / "one", num_shards=2)
assert read(folder / "one") == GSM8K
splits = {"train": GSM8K, "test": GSM8K[:1]}
both = {name: dataset_of(records) for name, records in splits.items()}
datasets.DatasetDict(both).save_to_disk(folder / "two")
assert read(folder / "two") == GSM8K
assert read(folder / "two", "test") == GSM8K[:1]
assert has_split("k", folder / "two", "test") and not has_split("k", folder / "one", "test")
for path, split, words in (
    (folder / "two", "dev", "no split 'dev'; the splits are train, test"),
    (folder / "broken.parquet", "train", "cannot be read by datasets"),
):
    (folder / "broken.parquet").write_bytes(b"PAR1")
    try:
        read(path, split)
    except ConfigError as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)
print("equal")
"""
MATH = r"""
import asyncio
import sys
from pathlib import Path

sys.path.insert(0, "ROOT")
from tests.envhub.envs.dataset.made import make, play

folder = Path(sys.argv[1])
answers = (r"\frac{1}{2}", "x = 3", "10000", "3.5", r"2\sqrt{3}")
records = [{"problem": "?", "solution": answer} for answer in answers]
options = make(folder, records, reward="math")


def paid(text, item):
    return asyncio.run(play(options, text, item=item)).reward


assert paid(r"It is $0.5$.", 0) == 1.0
assert paid(r"It is \boxed{\frac{2}{4}}.", 0) == 1.0
assert paid(r"It is $\frac{1}{3}$.", 0) == 0.0
assert paid("I do not know.", 0) == 0.0
assert paid("$3$", 1) == 1.0
# Signs before the formula or the box of a number.
for text in ("-$3$", "- 3", "negative 3", r"$x = -\boxed{3}$"):
    assert paid(text, 1) == 0.0, text
assert paid(r"\boxed{10\,000}", 2) == paid(r"\boxed{3 1/2}", 3) == 1.0
# A formula without marks is read as a whole: 3 is not 3 times a root.
assert paid(r"3\sqrt{2}", 1) == paid("3√2", 1) == 0.0
assert paid(r"2\sqrt{3}", 4) == paid("2√3", 4) == 1.0
print("equal")
"""


def _run(python: str, code: str, folder: Path) -> None:
    argv = [python, "-c", code.replace("ROOT", str(ROOT)), str(folder)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=120)
    assert done.stdout.endswith("equal\n"), done.stderr[-3000:]


@pytest.mark.long
@pytest.mark.slow
def test_parquet_and_saved_datasets_load_by_path(tmp_path: Path) -> None:
    _run(python_with("datasets", sees_ours=True), PARQUET, tmp_path)


@pytest.mark.long
@pytest.mark.slow
def test_math_verify_accepts_equal_answers(tmp_path: Path) -> None:
    _run(python_with("math-verify==0.9.0", sees_ours=True), MATH, tmp_path)
