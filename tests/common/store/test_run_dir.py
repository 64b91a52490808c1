"""Laws of the run directory."""

import os
import threading
from pathlib import Path

import pytest

from common.errors import LongstrideError
from common.store.run_dir import RunDir, remove_partial_files, write_atomically


def test_an_address_is_found_by_who_waits_for_it(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    found: list[str] = []
    waiting = threading.Thread(
        target=lambda: found.append(run_dir.wait_for_address("learner", timeout_s=5.0))
    )
    waiting.start()
    run_dir.publish_address("learner", "tcp://127.0.0.1:5")
    waiting.join(timeout=5.0)
    assert found == ["tcp://127.0.0.1:5"]


def test_a_missing_role_is_named_after_the_wait(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    run_dir.publish_address("learner", "old")
    run_dir.forget_address("learner")
    with pytest.raises(LongstrideError, match=r"no learner within 0\.01s"):
        run_dir.wait_for_address("learner", timeout_s=0.01)


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_atomically(path, "one")
    write_atomically(path, "two")
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]
    assert path.read_text() == "two"


def test_what_dead_writers_left_half_written_is_removed_and_nothing_else(tmp_path: Path) -> None:
    names = [f".status.json.{os.getpid()}", ".status.json.4194399", ".hidden", "a.4194399"]
    for name in names:
        (tmp_path / name).touch()
    remove_partial_files(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[:1] + names[2:])
