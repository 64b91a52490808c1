"""Laws of checkpoints."""

import shutil
from pathlib import Path

import pytest
import torch

from common.config.learning import LearnerSection
from common.errors import ConfigError
from learner.training.checkpoint import Checkpoints, load_checkpoint, newest_checkpoint


class Saved:
    """Stands for a model or a tokenizer: writes one file."""

    def __init__(self, name: str) -> None:
        self._name = name

    def save_pretrained(self, folder: Path, **_: object) -> None:
        (folder / self._name).write_text(self._name)


class Unsaveable:
    """A full disk."""

    def save_pretrained(self, folder: Path, **_: object) -> None:
        (folder / "half.bin").write_text("ha")
        raise OSError("no space left on device")


def make(root: Path, *, every_steps: int = 10, every_s: float = 1e9, keep: int = 2) -> Checkpoints:
    cfg = LearnerSection(
        checkpoint_every_steps=every_steps, checkpoint_every_s=every_s, keep_checkpoints=keep
    )
    return Checkpoints(root, cfg)


def save(checkpoints: Checkpoints, version: int) -> Path:
    state = {"model": {}, "step": version, "moments": torch.full((2,), float(version))}
    return checkpoints.save(
        version, model=Saved("model.bin"), tokenizer=Saved("tokenizer.json"), state=state
    )


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    folder = save(make(tmp_path), 7)
    assert newest_checkpoint(tmp_path) == folder
    restored = load_checkpoint(folder)
    assert restored.version == 7
    assert restored.state["step"] == 7
    assert restored.state["moments"].tolist() == [7.0, 7.0]
    assert (folder / "model.bin").read_text() == "model.bin"
    assert (folder / "tokenizer.json").exists()


def test_the_newest_is_found_by_number_and_only_so_many_are_kept(tmp_path: Path) -> None:
    checkpoints = make(tmp_path)
    for version in (2, 9, 10, 100):
        save(checkpoints, version)
    assert names(tmp_path) == ["step-000010", "step-000100"]
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert load_checkpoint(newest).version == 100


def test_an_incomplete_folder_is_never_read_and_never_counted(tmp_path: Path) -> None:
    checkpoints = make(tmp_path)
    save(checkpoints, 1)
    torn = tmp_path / "step-000002"
    torn.mkdir()
    assert newest_checkpoint(tmp_path) == tmp_path / "step-000001"
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        load_checkpoint(torn)
    save(checkpoints, 3)
    assert names(tmp_path) == ["step-000001", "step-000002", "step-000003"]


def test_a_failed_save_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    checkpoints = make(tmp_path)
    save(checkpoints, 1)
    with pytest.raises(OSError, match="no space"):
        checkpoints.save(2, model=Unsaveable(), tokenizer=Saved("t"), state={"model": {}})
    assert newest_checkpoint(tmp_path) == tmp_path / "step-000001"
    save(checkpoints, 2)
    assert names(tmp_path) == ["step-000001", "step-000002"]


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None


def test_a_save_is_due_by_steps_or_by_time_and_not_twice(tmp_path: Path) -> None:
    checkpoints = make(tmp_path)
    assert [v for v in range(1, 31) if checkpoints.is_due(v)] == [10, 20, 30]
    save(checkpoints, 10)
    assert not checkpoints.is_due(10)
    assert make(tmp_path, every_s=0.0).is_due(3)


def test_the_same_version_is_written_once_per_process_and_replaced_by_the_next(
    tmp_path: Path,
) -> None:
    checkpoints = make(tmp_path)
    folder = save(checkpoints, 1)
    (folder / "model.bin").write_text("mark")
    assert save(checkpoints, 1) == folder
    assert (folder / "model.bin").read_text() == "mark"
    save(make(tmp_path), 1)
    assert (folder / "model.bin").read_text() == "model.bin"


def test_the_old_checkpoint_counts_until_its_replacement_is_in_place(tmp_path: Path) -> None:
    folder = save(make(tmp_path), 1)
    aside = folder.rename(tmp_path / "step-000001.old")  # as a crash between two renames leaves it
    assert newest_checkpoint(tmp_path) == aside
    assert load_checkpoint(aside).version == 1
    save(make(tmp_path), 1)
    assert newest_checkpoint(tmp_path) == folder
    assert names(tmp_path) == ["step-000001"]


def test_a_replacement_wins_over_what_was_set_aside(tmp_path: Path) -> None:
    folder = save(make(tmp_path), 1)
    shutil.copytree(folder, tmp_path / "step-000001.old")
    assert newest_checkpoint(tmp_path) == folder
    save(make(tmp_path), 1)
    assert names(tmp_path) == ["step-000001"]


def test_a_save_that_cannot_set_the_old_checkpoint_aside_leaves_it(tmp_path: Path) -> None:
    folder = save(make(tmp_path), 1)
    (folder / "model.bin").write_text("mark")
    (tmp_path / "step-000001.old").write_text("in the way")
    with pytest.raises(OSError, match=r"step-000001"):
        save(make(tmp_path), 1)
    assert newest_checkpoint(tmp_path) == folder
    assert (folder / "model.bin").read_text() == "mark"
