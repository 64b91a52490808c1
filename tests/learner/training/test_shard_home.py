"""Laws of checkpoint files on the disk of their node."""

import errno
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from common.config.learner import LearnerSection
from common.errors import ConfigError, LongstrideError
from learner.training.checkpoint import TENSORS, Checkpoints, newest_checkpoint
from learner.training.shard_home import ShardNotWritten
from learner.training.shards import read_manifest
from learner.training.state import restore
from tests.full_disk import no_room_beyond
from tests.learner.training.split_shards import SplitTrainer, home_at, save_split
from tests.learner.training.test_checkpoint import Saved


def model_of(value: float) -> nn.Module:
    model = nn.Linear(2, 2, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def save(tmp_path: Path, version: int, *, value: float = 1.0, start: str = "a1") -> Path:
    home = home_at(tmp_path / "disk", start=start)
    model: Any = model_of(value)
    return save_split(tmp_path / "run", version, model, Saved("tokenizer.json"), home)


def load(folder: Path, tmp_path: Path) -> float:
    """Return the number that a checkpoint has."""
    model: Any = model_of(0.0)
    trainer = SplitTrainer(model, home_at(tmp_path / "disk"))
    restore(folder / TENSORS, {"model": model}, [], ranks=trainer.ranks)
    return model.weight[0, 0].item()


def test_split_checkpoint_loads_from_the_disk_of_its_node(tmp_path: Path) -> None:
    folder = save(tmp_path, 3, value=5.0)
    (file,) = read_manifest(folder)
    assert Path(file.path) == tmp_path / "disk" / "step-000003-a1" / file.name
    assert sorted(each.name for each in (folder / TENSORS).iterdir()) == ["tensors.json"]
    assert newest_checkpoint(tmp_path / "run") == folder
    assert load(folder, tmp_path) == 5.0


def test_file_of_another_save_is_never_loaded(tmp_path: Path) -> None:
    """The newer file has the same name and size."""
    folder = save(tmp_path, 3, value=5.0)
    (file,) = read_manifest(folder)
    (newer,) = read_manifest(save(tmp_path, 4, value=6.0))
    Path(file.path).write_bytes(Path(newer.path).read_bytes())
    with pytest.raises(ConfigError, match=r"gpu-b\): .*gather run.name=.* step=3 FOLDER"):
        load(folder, tmp_path)


def test_moved_folder_of_a_node_is_found(tmp_path: Path) -> None:
    folder = save(tmp_path, 3, value=5.0)
    (tmp_path / "disk").rename(tmp_path / "other")
    with pytest.raises(ConfigError, match="no node of this learner has 1 file"):
        load(folder, tmp_path)
    model: Any = model_of(0.0)
    trainer = SplitTrainer(model, home_at(tmp_path / "other"))
    restore(folder / TENSORS, {"model": model}, [], ranks=trainer.ranks)
    assert model.weight[0, 0].item() == 5.0


def test_node_keeps_the_files_of_kept_checkpoints(tmp_path: Path) -> None:
    for version in range(1, 6):
        save(tmp_path, version)
    kept = {each.name for each in (tmp_path / "run").iterdir()}
    assert kept == {"step-000004", "step-000005"}
    found = {each.name.removesuffix("-a1") for each in (tmp_path / "disk").iterdir()}
    assert found - kept == {"step-000003"}, "removed when the next checkpoint is written"


def test_repeated_save_leaves_the_files_of_the_first(tmp_path: Path) -> None:
    """A crash in the second save of a version must leave the first one."""
    first = read_manifest(save(tmp_path, 3, value=5.0))
    trainer = SplitTrainer(model_of(6.0), home_at(tmp_path / "disk", start="b2"))
    partial = tmp_path / "run" / ".step-000003.partial"
    partial.mkdir()
    trainer.save(partial / TENSORS).result(60)
    assert load(tmp_path / "run" / "step-000003", tmp_path) == 5.0
    assert read_manifest(partial) != first


def test_error_of_a_full_disk_names_its_node(tmp_path: Path) -> None:
    home = home_at(tmp_path / "disk")
    with no_room_beyond(0), pytest.raises(ShardNotWritten) as failed:
        home.write(tmp_path / ".step-000001.partial" / "state" / "__2_0.bin", [memoryview(b"ab")])
    assert failed.value.errno in (errno.EFBIG, errno.ENOSPC)
    (tmp_path / "disk2").write_text("a file", encoding="utf-8")
    with pytest.raises(LongstrideError, match=r"learner node 1 \(gpu-b\): learner.shard_folder"):
        home_at(tmp_path / "disk2").check()


class FullTrainer(SplitTrainer):
    """A trainer whose node has no room."""

    def save(self, folder: Path) -> Any:
        with no_room_beyond(0):
            written = super().save(folder)
            written.exception(60)
        return written


def test_checkpoint_waits_for_room_on_a_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path / "run", LearnerSection(checkpoint_every_steps=1))
    model = model_of(1.0)
    trainer = FullTrainer(model, home_at(tmp_path / "disk"))
    checkpoints.save(1, model=model, tokenizer=Saved("t"), trainer=trainer)
    checkpoints.wait()
    assert "learner node 1 (gpu-b)" in caplog.text
    assert newest_checkpoint(tmp_path / "run") is None
    assert not checkpoints.has(1)
