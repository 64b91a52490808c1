"""Laws of the run directory."""

import os
import threading
from fnmatch import fnmatch
from pathlib import Path

import pytest

from common.errors import LongstrideError
from common.store.run_dir import RunDir, remove_partial_files, write_atomically
from tests.end_to_end.runs import bounded, unbounded


def test_published_address_reaches_the_waiting_thread(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    found: list[str] = []
    waiting = threading.Thread(
        target=lambda: found.append(run_dir.wait_for_address("learner", timeout_s=60.0))
    )
    waiting.start()
    run_dir.publish_address("learner", "tcp://127.0.0.1:5")
    waiting.join(timeout=60.0)
    assert found == ["tcp://127.0.0.1:5"]


def test_missing_role_is_named_after_the_wait(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    run_dir.publish_address("learner", "old")
    run_dir.forget_address("learner")
    with pytest.raises(LongstrideError, match=r"no learner within 0\.01 s"):
        run_dir.wait_for_address("learner", timeout_s=0.01)


def test_file_is_replaced_atomically_without_remains(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_atomically(path, "one")
    write_atomically(path, "two")
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]
    assert path.read_text(encoding="utf-8") == "two"


def test_partial_files_of_dead_writers_are_removed(tmp_path: Path) -> None:
    names = [f".status.json.{os.getpid()}", ".status.json.4194399", ".hidden", "a.4194399"]
    for name in names:
        (tmp_path / name).touch()
    remove_partial_files(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[:1] + names[2:])


def test_every_named_run_file_has_documented_bound() -> None:
    names = [name for name in vars(RunDir) if name[0] != "_" and name != "root"]
    named = {name: getattr(RunDir(root=Path()), name) for name in names}
    paths = {name: str(path) for name, path in named.items() if isinstance(path, Path)}
    assert len(paths) > 20
    patterns = bounded()
    folders = {pattern.rpartition("/")[0] for pattern in patterns}
    untold = [p for p in paths.values() if not any(fnmatch(p, each) for each in patterns)]
    assert [path for path in untold if path not in folders] == []


def test_unbounded_run_file_is_found(tmp_path: Path) -> None:
    for name in ("status.json", "logs/actor-0.log.1", "journal/000001.log.gz", "grows.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert unbounded(tmp_path) == ["grows.jsonl"]


def test_private_file_is_private_from_creation(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    left = tmp_path / f".config.yaml.{os.getpid()}"
    left.write_text("left by a process of the same number", encoding="utf-8")
    left.chmod(0o666)
    with left.open(encoding="utf-8") as stranger:
        write_atomically(path, "token: geheim\n", mode=0o600)
        assert "geheim" not in stranger.read()  # It is another file, not that one.
    assert (path.read_text(encoding="utf-8"), path.stat().st_mode & 0o777) == (
        "token: geheim\n",
        0o600,
    )
