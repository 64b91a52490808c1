"""Laws of the bookmark's file."""

from pathlib import Path

from common.store.journal import JournalPosition
from learner.ingest.replay_point import FROM_THE_START, Bookmark, load_bookmark, save_bookmark

BOOKMARK = Bookmark(position=JournalPosition(segment=2, offset=99), closed_below=40, version=25)


def test_bookmark_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "bookmark.json"
    save_bookmark(path, FROM_THE_START)
    save_bookmark(path, BOOKMARK)
    assert load_bookmark(path, version=25) == BOOKMARK
    assert [each.name for each in tmp_path.iterdir()] == ["bookmark.json"]


def test_run_without_a_bookmark_reads_from_the_start(tmp_path: Path) -> None:
    assert load_bookmark(tmp_path / "bookmark.json", version=0) == FROM_THE_START


def test_checkpoint_older_than_the_bookmark_reads_from_the_start(tmp_path: Path) -> None:
    path = tmp_path / "bookmark.json"
    save_bookmark(path, BOOKMARK)
    assert load_bookmark(path, version=24) == FROM_THE_START
