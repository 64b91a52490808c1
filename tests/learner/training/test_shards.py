"""Laws of the manifest of a checkpoint on several nodes."""

from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.repository import ROOT
from learner.training.shards import (
    MANIFEST,
    ShardFile,
    check_whole,
    gather_command,
    is_whole,
    missing_text,
    read_manifest,
    write_manifest,
)

FILE = ShardFile(
    name="__2_0.bin",
    node=1,
    host="gpu-b",
    address="10.0.0.2",
    path="/data/my shards/step-000050-a1/__2_0.bin",
    num_bytes=7,
    sha256="ab" * 32,
)
OTHER = replace(FILE, name="__1_0.bin")


def test_manifest_keeps_its_files(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) == []
    write_manifest(tmp_path, [FILE, OTHER])
    assert read_manifest(tmp_path) == [OTHER, FILE]
    assert not is_whole(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        '{"files": [{"name": "a"}]}',
        '{"files": [{"name": "../a", "node": 1, "host": "b", "address": "c", "path": "/d",'
        ' "num_bytes": 1, "sha256": "e"}]}',
        '{"files": [{"name": "..", "node": 1, "host": "b", "address": "c", "path": "/d/a",'
        ' "num_bytes": 1, "sha256": "e"}]}',
        '{"files": [{"name": "a", "node": 1, "host": "b", "address": "c", "path": "/d/../a",'
        ' "num_bytes": 1, "sha256": "e"}]}',
    ],
)
def test_damaged_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"shards\.json: damaged"):
        read_manifest(tmp_path)


def test_gather_command_names_run_folder_and_step(tmp_path: Path) -> None:
    usual = ROOT / "runs" / "a" / "checkpoints" / "step-000050"
    assert gather_command(usual) == "python run.py gather run.name=a step=50"
    other = tmp_path / "b" / "checkpoints" / "step-000007.old"
    expected = f"python run.py gather run.name=b run.dir={tmp_path} step=7"
    assert gather_command(other) == expected


def test_readers_refuse_a_split_checkpoint(tmp_path: Path) -> None:
    check_whole(tmp_path, key="model.path", shown="x")
    write_manifest(tmp_path, [FILE])
    with pytest.raises(ConfigError, match=r"model\.path=x: .*gather run\.name="):
        check_whole(tmp_path, key="model.path", shown="x")


def test_copy_command_quotes_its_paths(tmp_path: Path) -> None:
    line = f"scp '10.0.0.2:{FILE.path}' {tmp_path}/state/"
    assert FILE.scp_line(tmp_path) == line
    assert "'[fd00::2]:" in replace(FILE, address="fd00::2").scp_line(tmp_path)


def test_error_for_missing_files_names_a_few(tmp_path: Path) -> None:
    text = missing_text(tmp_path, [FILE] * 6)
    assert text.count("node 1 (gpu-b): /data") == 4
    assert "and 2 more" in text
