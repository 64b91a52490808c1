"""Laws of the replay point's file."""

from pathlib import Path

import pytest

from learner.ingest.journal_index import (
    FROM_THE_START,
    ReplayPoint,
    load_replay_point,
    save_replay_point,
)
from learner.journal.journal import JournalPosition

POINT = ReplayPoint(position=JournalPosition(file=2, offset=99), closed_below=40, version=25)


def test_saved_replay_point_loads_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "replay_point.json"
    save_replay_point(path, FROM_THE_START)
    save_replay_point(path, POINT)
    assert load_replay_point(path, version=25) == POINT
    assert [each.name for each in tmp_path.iterdir()] == ["replay_point.json"]


def test_missing_replay_point_reads_from_start(tmp_path: Path) -> None:
    assert load_replay_point(tmp_path / "replay_point.json", version=0) == FROM_THE_START


def test_checkpoint_older_than_the_replay_point_reads_everything(tmp_path: Path) -> None:
    path = tmp_path / "replay_point.json"
    save_replay_point(path, POINT)
    assert load_replay_point(path, version=24) == FROM_THE_START


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\0\xff", b"[]", b"5", b'{"position":{"segment":"a"}}']
)
def test_damaged_replay_point_is_done_without(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "replay_point.json"
    path.write_bytes(content)
    assert load_replay_point(path, version=25) == FROM_THE_START
