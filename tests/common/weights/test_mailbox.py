"""Laws of the end of a transfer through shared memory: the sender outlives the receivers' use."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from common.errors import WeightSyncError
from common.weights import mailbox
from common.weights.mailbox import FolderStorage, Mailbox
from common.weights.rendezvous_client import GroupStore, StoreConnection
from common.weights.transport import place_of
from tests.common.weights.meeting import Meeting
from tests.common.weights.test_buckets import TIMEOUT_S, offer_of


class LeasedShelf(FolderStorage):
    """A shelf whose receiver lets go of the memory when the test allows it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), 1)
        self.may_release = threading.Event()

    def release(self) -> None:
        assert self.may_release.wait(TIMEOUT_S)


def mailbox_of(meeting: Meeting, folder: Path, *, rank: int, shelf: FolderStorage) -> Mailbox:
    offer = offer_of(meeting, 1, "file", str(folder))
    store = GroupStore(StoreConnection(place_of(offer)), offer.group_key, timeout_s=TIMEOUT_S)
    return Mailbox(
        store,
        shelf,
        name="1/1",
        rank=rank,
        world_size=2,
        timeout_s=TIMEOUT_S,
        is_left=lambda: False,
    )


def test_member_cannot_name_a_file_outside_the_folder(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "secret").write_bytes(b"1234")
    part = torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(WeightSyncError, match="not the name of a bucket"):
        FolderStorage(str(tmp_path / "shared"), 1).fetch("../secret", part)
    assert not part.any()


def test_sender_ends_after_its_receiver_lets_go(tmp_path: Path) -> None:
    meeting = Meeting()
    shelf = LeasedShelf(tmp_path)
    sender = mailbox_of(meeting, tmp_path, rank=0, shelf=FolderStorage(str(tmp_path), 1))
    receiver = mailbox_of(meeting, tmp_path, rank=1, shelf=shelf)
    with ThreadPoolExecutor(2) as pool:
        letting_go = pool.submit(receiver.finish)
        ending = pool.submit(sender.finish)
        with pytest.raises(TimeoutError):
            ending.result(timeout=0.3)
        shelf.may_release.set()
        ending.result(timeout=TIMEOUT_S)
        letting_go.result(timeout=TIMEOUT_S)


def test_receiver_that_keeps_memory_delays_the_sender_for_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mailbox, "RELEASE_S", 0.1)
    sender = mailbox_of(Meeting(), tmp_path, rank=0, shelf=FolderStorage(str(tmp_path), 1))
    sender.finish()
    assert "an engine has not closed shared memory transfer=1/1" in caplog.text
