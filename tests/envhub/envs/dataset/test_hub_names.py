"""Laws of datasets by their name on the Hub, offline, from a cache that `datasets` has written."""

import os
import subprocess
from pathlib import Path

import pytest

from common.repository import ROOT
from envhub.catalogue.content import changed_content, record_content
from tests.venvs import python_with

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB = r"""
import json
import sys
from pathlib import Path

sys.path.insert(0, "ROOT")
import datasets
from datasets.packaged_modules.json.json import Json

from common.errors import ConfigError
from common.config.envs import DatasetOptions
from envhub.envs.dataset.records import load_dataset
from tests.envhub.envs.dataset.made import GSM8K, write_lines

folder = Path(sys.argv[1])
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cache(name, part, **files):
    # Writes the cache that load_dataset leaves for a repository of JSON files.
    paths = {split: [str(path)] for split, path in files.items()}
    data_files = datasets.data_files.DataFilesDict.from_patterns(paths, download_config=None)
    Json(
        dataset_name=name, config_name=part, hash=COMMIT, data_files=data_files
    ).download_and_prepare()
    home = Path(datasets.config.HF_DATASETS_CACHE)
    (made,) = (home / name).iterdir()
    (home / f"org___{name}").mkdir(exist_ok=True)
    made.rename(home / f"org___{name}" / part)
    (home / name).rmdir()


for part in ("main", "easy"):
    cache(
        "sums",
        part,
        train=write_lines(folder / f"{part}-train.jsonl", [{**r, "part": part} for r in GSM8K]),
        test=write_lines(folder / f"{part}-test.jsonl", [{**GSM8K[0], "part": f"{part} test"}]),
    )


def loaded(train, **options):
    return load_dataset(DatasetOptions(train=train, reward="exact_number", **options))


def part_of(dataset, split):
    return dataset.splits[split].record(0)["part"]


main = loaded("org/sums:main")
assert (part_of(main, "train"), part_of(main, "test")) == ("main", "main test")
assert main.content["revision of data.train"] == COMMIT, main.content
assert main.content["revision of data.eval"] == COMMIT
both = loaded(
    "org/sums:easy:train", eval="org/sums:main:test"
)
assert (part_of(both, "train"), part_of(both, "test")) == ("easy", "main test")
turned = loaded("org/sums:easy:test", eval="org/sums:easy:train")
assert (part_of(turned, "train"), part_of(turned, "test")) == ("easy test", "easy")
pinned = loaded(f"org/sums@{COMMIT[:8]}:main:train")
assert part_of(pinned, "train") == "main"
cache("one", "default", train=folder / "main-train.jsonl", dev=folder / "main-test.jsonl")
one = loaded("org/one:train", validation="org/one:dev", eval_size=1)
assert (part_of(one, "train"), part_of(one, "validation")) == ("main", "main test")
assert one.content["revision of data.validation"] == COMMIT
for name, words in (
    ("org/one:nosuch", "'nosuch' is no configuration and no split of org/one; the splits are"),
    ("org/sums:nosuch:train", "nosuch"),
    ("org/absent:train", "org/absent"),
    (f"org/sums@{'f' * 40}:main", f"the cache of datasets has the revision {COMMIT}, not ffff"),
    ("org/sums@v1:main", f"the cache of datasets has the revision {COMMIT}, not v1"),
):
    try:
        loaded(name)
    except ConfigError as error:
        assert words in str(error), (name, error)
    else:
        raise AssertionError(name)
print("equal")
"""


@pytest.mark.long
@pytest.mark.slow
def test_dataset_of_the_hub_loads_offline_by_configuration_and_split(tmp_path: Path) -> None:
    python = python_with("datasets==5.2.0", "pyarrow==26.0.1", sees_ours=True)
    done = subprocess.run(
        [python, "-c", HUB.replace("ROOT", str(ROOT)), str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        encoding="utf-8",
        timeout=200,
    )
    assert done.stdout.endswith("equal\n"), done.stderr[-3000:]


def test_other_commit_with_equal_records_continues_a_run(tmp_path: Path) -> None:
    record_content(tmp_path, {"dataset": {"data.train": "a", "revision of data.train": COMMIT}})
    moved = {"dataset": {"data.train": "a", "revision of data.train": "f" * 40}}
    assert changed_content(tmp_path, moved) == []
    (line,) = changed_content(tmp_path, {"dataset": {"data.train": "b"}})
    assert line.startswith("dataset: data.train changed since the run began")
