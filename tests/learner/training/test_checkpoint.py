"""Laws of checkpoints."""

import errno
import shutil
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config.learner import LearnerSection
from common.errors import ConfigError
from learner.training.checkpoint import TENSORS, Checkpoints, load_values, newest_checkpoint
from learner.training.ranks import Ranks
from learner.training.state import StateWriter, read_weights
from tests.full_disk import no_room_beyond


class Saved:
    """Replaces a model or a tokenizer: writes one file."""

    def __init__(self, name: str) -> None:
        self._name = name

    def save_pretrained(self, folder: Path, **_: object) -> None:
        (folder / self._name).write_text(self._name, encoding="utf-8")


class Unsaveable:
    """A full disk."""

    def save_pretrained(self, folder: Path, **_: object) -> None:
        (folder / "half.bin").write_text("ha", encoding="utf-8")
        raise OSError("no space left on device")


class Trained:
    """A trainer of two numbers; `may_end` delays its files."""

    def __init__(self, version: int, *, may_end: threading.Event | None = None) -> None:
        self.tensor = torch.full((2,), float(version))
        self._writer = StateWriter(Ranks())
        self._may_end = may_end

    def values(self) -> dict[str, Any]:
        return {"num_updates": int(self.tensor[0])}

    def save(self, folder: Path) -> Future[Any]:
        written = self._writer.start({"model.moments": self.tensor}, folder)
        if self._may_end is None:
            return written
        may_end, pool = self._may_end, ThreadPoolExecutor(1)
        return pool.submit(lambda: may_end.wait(30) and written.result())


def make(
    root: Path,
    *,
    every_steps: int = 10,
    every_s: float = 1e9,
    keep: int = 2,
    max_redo_s: float = 1e9,
) -> Checkpoints:
    cfg = LearnerSection(
        checkpoint_every_steps=every_steps,
        checkpoint_every_s=every_s,
        keep_checkpoints=keep,
        max_redo_s=max_redo_s,
    )
    return Checkpoints(root, cfg)


def begin(checkpoints: Checkpoints, version: int, *, model: Any = None, **how: Any) -> Path:
    tokenizer = Saved("tokenizer.json")
    trainer = Trained(version, **how)
    model = model or Saved("model.bin")
    return checkpoints.save(version, model=model, tokenizer=tokenizer, trainer=trainer)


def save(checkpoints: Checkpoints, version: int) -> Path:
    folder = begin(checkpoints, version)
    checkpoints.wait()
    return folder


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_saved_checkpoint_loads_unchanged(tmp_path: Path) -> None:
    folder = save(make(tmp_path), 7)
    assert newest_checkpoint(tmp_path) == folder
    assert load_values(folder) == {"version": 7, "num_updates": 7}
    ((name, moments),) = read_weights(folder / TENSORS, "model")
    assert (name, moments.tolist()) == ("moments", [7.0, 7.0])
    assert (folder / "model.bin").read_text(encoding="utf-8") == "model.bin"
    assert (folder / "tokenizer.json").exists()


def test_newest_checkpoint_is_found_by_number_and_old_ones_removed(tmp_path: Path) -> None:
    checkpoints = make(tmp_path)
    for version in (2, 9, 10, 100):
        save(checkpoints, version)
    assert names(tmp_path) == ["step-000010", "step-000100"]
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert load_values(newest)["version"] == 100


def test_newest_checkpoint_is_found_beyond_a_million_steps(tmp_path: Path) -> None:
    checkpoints = make(tmp_path)
    for version in (999_998, 999_999, 1_000_000, 1_000_001):
        save(checkpoints, version)
    assert names(tmp_path) == ["step-1000000", "step-1000001"]
    assert newest_checkpoint(tmp_path) == tmp_path / "step-1000001"
    assert make(tmp_path).oldest_version == 1_000_000


@pytest.mark.parametrize("name", ["step-000001-best", "step-best", "best", "step-000001.bak"])
def test_users_copy_of_checkpoint_is_ignored(tmp_path: Path, name: str) -> None:
    checkpoints = make(tmp_path)
    shutil.copytree(save(checkpoints, 1), tmp_path / name)
    for version in (2, 3, 4):
        save(checkpoints, version)
    assert names(tmp_path) == sorted([name, "step-000003", "step-000004"])
    assert newest_checkpoint(tmp_path) == tmp_path / "step-000004"
    assert make(tmp_path).oldest_version == 3


def test_partial_checkpoint_is_removed_at_the_next_start(tmp_path: Path) -> None:
    partial = tmp_path / ".step-000007.partial"
    (partial / TENSORS).mkdir(parents=True)
    make(tmp_path)
    assert names(tmp_path) == []


def test_folder_is_synced_after_the_rename(tmp_path: Path) -> None:
    events: list[tuple[str, str]] = []
    is_listening = [True]

    def listen(event: str, arguments: tuple[Any, ...]) -> None:
        if is_listening[0] and event in ("os.rename", "open"):
            events.append((event, str(arguments[1 if event == "os.rename" else 0])))

    sys.addaudithook(listen)
    folder = save(make(tmp_path), 1)
    is_listening[0] = False
    renamed = events.index(("os.rename", str(folder)))
    assert ("open", str(tmp_path)) in events[renamed:]


@pytest.mark.parametrize("content", [b"", b"{", b"\0\xff\x80", b"[]", b"5", b'{"version":"a"}'])
@pytest.mark.parametrize("file", ["COMPLETE", "trainer.json"])
def test_damaged_checkpoint_file_is_named_with_a_remedy(
    tmp_path: Path, file: str, content: bytes
) -> None:
    path = save(make(tmp_path), 1) / file
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"step-000001/{file}: damaged.*move .*step-000001 away"):
        load_values(newest_checkpoint(tmp_path) or tmp_path)


class Full:
    """A disk without room, then with."""

    def __init__(self) -> None:
        self.is_full = True

    def save_pretrained(self, folder: Path, **_: object) -> None:
        (folder / "half.bin").write_text("ha", encoding="utf-8")
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")


def test_full_disk_costs_a_checkpoint_but_not_the_run(tmp_path: Path) -> None:
    checkpoints, disk = make(tmp_path), Full()
    save(checkpoints, 1)
    begin(checkpoints, 2, model=disk)
    checkpoints.wait()
    assert checkpoints.poll() is None
    assert not checkpoints.has(2)
    assert names(tmp_path) == ["step-000001"]  # The partial files are removed.
    disk.is_full = False
    begin(checkpoints, 2, model=disk)
    checkpoints.wait()
    assert checkpoints.has(2)
    assert names(tmp_path) == ["step-000001", "step-000002"]


def test_tensors_beyond_disk_cost_checkpoint_only(tmp_path: Path) -> None:
    checkpoints, trainer = make(tmp_path), Trained(1)
    trainer.tensor = torch.zeros(100_000)
    parts: dict[str, Any] = {"model": Saved("model.bin"), "tokenizer": Saved("tokenizer.json")}
    with no_room_beyond(200_000):
        checkpoints.save(1, **parts, trainer=trainer)
        checkpoints.wait()
    assert checkpoints.poll() is None
    assert names(tmp_path) == []
    checkpoints.save(1, **parts, trainer=trainer)
    checkpoints.wait()
    assert names(tmp_path) == ["step-000001"]


def test_incomplete_folder_is_never_read(tmp_path: Path) -> None:
    checkpoints = make(tmp_path)
    save(checkpoints, 1)
    torn = tmp_path / "step-000002"
    torn.mkdir()
    assert newest_checkpoint(tmp_path) == tmp_path / "step-000001"
    with pytest.raises(ConfigError, match="not a complete checkpoint"):
        load_values(torn)
    save(checkpoints, 3)
    assert names(tmp_path) == ["step-000001", "step-000002", "step-000003"]


def test_a_failed_save_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    checkpoints = make(tmp_path)
    save(checkpoints, 1)
    begin(checkpoints, 2, model=Unsaveable())
    with pytest.raises(OSError, match="no space"):
        checkpoints.wait()
    with pytest.raises(OSError, match="no space"):
        checkpoints.poll()
    assert newest_checkpoint(tmp_path) == tmp_path / "step-000001"
    save(make(tmp_path), 2)  # The restarted learner saves again.
    assert names(tmp_path) == ["step-000001", "step-000002"]


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None


def test_save_is_due_by_steps_or_time_and_once(tmp_path: Path) -> None:
    checkpoints = make(tmp_path)
    assert [v for v in range(1, 31) if checkpoints.is_due(v)] == [10, 20, 30]
    save(checkpoints, 10)
    assert not checkpoints.is_due(10)
    assert make(tmp_path, every_s=0.0).is_due(3)


def test_cheap_saves_are_frequent_and_keep_one_more_checkpoint(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, max_redo_s=1e-9)
    for version in (10, 20, 21, 23, 30, 31):
        for dear, is_due in ((1e6, version % 10 == 0), (0.0, True)):
            checkpoints._stood_s, checkpoints._took_s = dear, dear  # pyright: ignore[reportPrivateUsage]
            assert checkpoints.is_due(version) == is_due
        save(checkpoints, version)
    assert names(tmp_path) == ["step-000020", "step-000030", "step-000031"]
    assert make(tmp_path).oldest_version == 20


def test_first_step_alone_needs_no_checkpoint(tmp_path: Path) -> None:
    seconds = [0.0]
    cfg = LearnerSection(checkpoint_every_steps=100, checkpoint_every_s=1e9, max_redo_s=60.0)
    checkpoints = Checkpoints(tmp_path, cfg, now=lambda: seconds[0])
    due = []
    for version, at_s in ((1, 300.0), (2, 340.0), (3, 361.0)):  # The start took 260 s.
        seconds[0] = at_s
        due.append(checkpoints.is_due(version))
    assert due == [False, False, True]
    save(checkpoints, 3)
    seconds[0] = 420.0
    assert not checkpoints.is_due(4)
    seconds[0] = 421.0
    assert checkpoints.is_due(4)


def test_version_is_written_once_per_process(tmp_path: Path) -> None:
    checkpoints = make(tmp_path)
    folder = save(checkpoints, 1)
    (folder / "model.bin").write_text("mark", encoding="utf-8")
    assert save(checkpoints, 1) == folder
    assert (folder / "model.bin").read_text(encoding="utf-8") == "mark"
    save(make(tmp_path), 1)
    assert (folder / "model.bin").read_text(encoding="utf-8") == "model.bin"


def test_old_checkpoint_counts_until_its_replacement_is_complete(tmp_path: Path) -> None:
    folder = save(make(tmp_path), 1)
    aside = folder.rename(tmp_path / "step-000001.old")  # A crash between two renames leaves it.
    assert newest_checkpoint(tmp_path) == aside
    assert load_values(aside)["version"] == 1
    save(make(tmp_path), 1)
    assert newest_checkpoint(tmp_path) == folder
    assert names(tmp_path) == ["step-000001"]


def test_replacement_supersedes_the_old_copy(tmp_path: Path) -> None:
    folder = save(make(tmp_path), 1)
    shutil.copytree(folder, tmp_path / "step-000001.old")
    assert newest_checkpoint(tmp_path) == folder
    save(make(tmp_path), 1)
    assert names(tmp_path) == ["step-000001"]


def test_failed_replacement_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    folder = save(make(tmp_path), 1)
    (folder / "model.bin").write_text("mark", encoding="utf-8")
    (tmp_path / "step-000001.old").write_text("in the way", encoding="utf-8")
    with pytest.raises(OSError, match=r"step-000001"):
        save(make(tmp_path), 1)
    assert newest_checkpoint(tmp_path) == folder
    assert (folder / "model.bin").read_text(encoding="utf-8") == "mark"


def test_training_continues_during_a_save_without_changing_it(tmp_path: Path) -> None:
    checkpoints, may_end = make(tmp_path), threading.Event()
    trainer = Trained(1, may_end=may_end)
    parts: dict[str, Any] = {"model": Saved("model.bin"), "tokenizer": Saved("tokenizer.json")}
    folder = checkpoints.save(1, **parts, trainer=trainer)
    trainer.tensor.fill_(9.0)  # the next step
    assert checkpoints.poll() is None
    assert newest_checkpoint(tmp_path) is None
    may_end.set()
    checkpoints.wait()
    took_s = checkpoints.poll()
    assert took_s is not None
    assert took_s < 30
    assert checkpoints.poll() is None  # It is reported once.
    assert newest_checkpoint(tmp_path) == folder
    ((_, tensor),) = read_weights(folder / TENSORS, "model")
    assert tensor.tolist() == [1.0, 1.0]


def test_next_checkpoint_waits_for_current_one(tmp_path: Path) -> None:
    checkpoints, may_end = make(tmp_path), threading.Event()
    begin(checkpoints, 1, may_end=may_end)
    second = threading.Thread(target=begin, args=(checkpoints, 2))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    assert names(tmp_path) == [".step-000001.partial"]
    may_end.set()
    second.join(30)
    checkpoints.wait()
    assert names(tmp_path) == ["step-000001", "step-000002"]


def test_single_file_checkpoint_is_refused_with_a_remedy(tmp_path: Path) -> None:
    folder = save(make(tmp_path), 1)
    (folder / "trainer.json").unlink()
    (folder / "trainer.pt").touch()  # Older versions wrote this file.
    with pytest.raises(ConfigError, match=r"older version.*model\.path=.*step-000001"):
        load_values(folder)
