"""Batches are done once they are on disk, in order; one sync serves all that wait for it."""

import threading

import pytest

from learner.ingest.intake import JournalSync, PendingCommit
from learner.journal.journal import JournalPosition

TIMEOUT_S = 60.0


class Disk:
    """A disk with syncs that the test starts and ends."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Semaphore(0), threading.Semaphore(0)
        self.done = threading.Semaphore(0)
        self.error: OSError | None = None

    def sync(self) -> None:
        self.begun.release()
        assert self.may_end.acquire(timeout=TIMEOUT_S)
        if self.error is not None:
            raise self.error


def batch(offset: int) -> PendingCommit:
    return PendingCommit(answers=[], accepted=[], end=JournalPosition(offset=offset))


def start(disk: Disk) -> JournalSync:
    commit = JournalSync(disk.sync, on_done=disk.done.release)
    commit.start()
    return commit


def test_submissions_during_a_sync_share_the_next_one() -> None:
    disk = Disk()
    commit = start(disk)
    commit.submit(batch(1))
    assert disk.begun.acquire(timeout=TIMEOUT_S)
    commit.submit(batch(2))
    commit.submit(batch(3))
    assert commit.take_done() == []  # not even the first: its sync has not ended
    disk.may_end.release()
    assert disk.done.acquire(timeout=TIMEOUT_S)
    assert [each.end.offset for each in commit.take_done()] == [1]
    disk.may_end.release()
    assert disk.done.acquire(timeout=TIMEOUT_S)
    assert [each.end.offset for each in commit.take_done()] == [2, 3]
    commit.stop(timeout_s=TIMEOUT_S)
    assert not commit.is_alive()
    assert not disk.may_end.acquire(blocking=False)


def test_stop_syncs_all_submissions() -> None:
    disk = Disk()
    disk.may_end.release()
    commit = start(disk)
    commit.submit(batch(1))
    commit.stop(timeout_s=TIMEOUT_S)
    assert [each.end.offset for each in commit.take_done()] == [1]


def test_failed_sync_acknowledges_nothing_and_raises() -> None:
    disk = Disk()
    disk.error = OSError(5, "the disk is gone")
    disk.may_end.release()
    commit = start(disk)
    commit.submit(batch(1))
    assert disk.done.acquire(timeout=TIMEOUT_S)
    with pytest.raises(OSError, match="the disk is gone"):
        commit.take_done()
    commit.stop(timeout_s=TIMEOUT_S)
    assert not commit.is_alive()
