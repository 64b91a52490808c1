"""Laws of a place in the weight plane's groups: real stores and gloo groups.

Files stand for the GPU memory of a transfer by CUDA IPC.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from common.errors import WeightSyncError
from common.weights import transport
from common.weights.buckets import CPU, BucketLayout, lay_out, receive_buckets, send_buckets
from common.weights.messages import WeightsOffer
from common.weights.rendezvous import GroupStore
from common.weights.transport import IpcChannel, TransferCancelled, WeightGroup
from tests.common.weights.meeting import NOWHERE, Meeting

TIMEOUT_S = 30.0


def offer_of(meeting: Meeting | None, *, epoch: int, rank: int) -> WeightsOffer:
    return WeightsOffer(
        version=1,
        group_epoch=epoch,
        rank=rank,
        world_size=2,
        **(meeting.of_offer() if meeting else NOWHERE),
        transport="gloo",
        timeout_s=TIMEOUT_S,
        tensors=[],
        total_bytes=8,
        bucket_bytes=16,
        canary_token_ids=[],
    )


def transfer(sender: WeightGroup, receiver: WeightGroup, offer: WeightsOffer, value: int) -> int:
    """Send eight bytes of `value` in the offered group; return what came."""
    slots = [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]
    came = torch.zeros(8, dtype=torch.uint8)
    has_failed = threading.Event()  # The receiver may end long before the sender sees its own end.

    def receive() -> None:
        try:
            receiver.receive(came, CPU, replace(offer, rank=1))
        except BaseException:
            has_failed.set()
            raise

    engine = threading.Thread(target=receive)
    engine.start()
    sender.send(slots, lambda start, part: part.fill_(value), offer, is_cancelled=has_failed.is_set)
    engine.join(TIMEOUT_S)
    assert came.tolist() == [came[0].item()] * 8
    return int(came[0].item())


def connections_to(port: int) -> set[int]:
    """The local ports of this process's connections to a port."""
    connections = psutil.Process().net_connections()
    return {one.laddr.port for one in connections if one.raddr and one.raddr.port == port}


def test_new_group_reuses_the_store_connections() -> None:
    store = Meeting()
    sender, receiver = WeightGroup(), WeightGroup()
    assert transfer(sender, receiver, offer_of(store, epoch=1, rank=0), 7) == 7
    before = connections_to(store.server.port)
    assert transfer(sender, receiver, offer_of(store, epoch=2, rank=0), 8) == 8
    assert connections_to(store.server.port) == before
    assert len(before) == 2, "the sender's, and the receiver's"
    sender.leave()
    receiver.leave()


def test_weight_group_follows_learner_to_another_store() -> None:
    sender, receiver = WeightGroup(), WeightGroup()
    for value in (7, 8):
        store = Meeting()
        assert transfer(sender, receiver, offer_of(store, epoch=1, rank=0), value) == value
        store.close()  # the learner is gone; the next one counts its epochs from the start


def test_cancelled_offer_is_abandoned_and_next_accepted() -> None:
    store = Meeting()
    sender, receiver = WeightGroup(), WeightGroup()
    came, is_told = torch.zeros(8, dtype=torch.uint8), threading.Event()
    offer = offer_of(store, epoch=1, rank=1)
    threading.Timer(0.2, is_told.set).start()
    with pytest.raises(TransferCancelled, match="epoch=1"):  # No other member joins.
        receiver.receive(came, CPU, offer, is_cancelled=is_told.is_set)
    assert transfer(sender, receiver, offer_of(store, epoch=2, rank=0), 9) == 9


def test_report_of_a_copy_replaces_the_one_before() -> None:
    store = Meeting()
    receiver, follower = WeightGroup(), WeightGroup()
    offers = [replace(offer_of(store, epoch=1, rank=1), copy_key=key) for key in ("a", "b")]
    for offer in offers:
        receiver.report_copy(offer, place=f"place of {offer.copy_key}")
        found = follower.find_copy(offer, is_cancelled=lambda: False)
        assert found == f"place of {offer.copy_key}"
    assert [store.store().check([offer.copy_key]) for offer in offers] == [False, True]
    receiver.report_copy(offers[0], error="damaged")
    with pytest.raises(TransferCancelled, match="receives for this node: damaged"):
        follower.find_copy(offers[0], is_cancelled=lambda: False)


def test_worker_without_a_report_gives_up_in_time() -> None:
    store = Meeting()
    offer = replace(offer_of(store, epoch=1, rank=1), copy_key="a", timeout_s=0.1)
    with pytest.raises(WeightSyncError, match=r"version 1 .* has not reported within 0\.2 s"):
        WeightGroup().find_copy(offer, is_cancelled=lambda: False)
    with pytest.raises(TransferCancelled, match="epoch=1"):
        WeightGroup().find_copy(offer, is_cancelled=lambda: True)


def test_offer_with_an_unknown_transport_is_refused_by_name() -> None:
    offer = replace(offer_of(Meeting(), epoch=1, rank=1), transport="file")
    with pytest.raises(WeightSyncError, match="no transport 'file'; use learner"):
        WeightGroup().receive(torch.zeros(8, dtype=torch.uint8), CPU, offer)


class FileChannel(IpcChannel):
    """Parts in files, which their receivers may release when the test allows it."""

    def __init__(self, store: GroupStore, folder: Path, *, rank: int, world_size: int) -> None:
        super().__init__(
            store,
            CPU,
            name="1/1",
            rank=rank,
            world_size=world_size,
            timeout_s=TIMEOUT_S,
            is_left=lambda: False,
        )
        self._folder = folder
        self.may_release = threading.Event()
        self.may_release.set()

    def share(self, part: Tensor) -> str:
        path = self._folder / str(part.data_ptr())
        path.write_bytes(bytes(part.tolist()))
        return str(path)

    def copy(self, shared: str, part: Tensor) -> None:
        part.copy_(torch.frombuffer(bytearray(Path(shared).read_bytes()), dtype=torch.uint8))

    def release(self) -> None:
        assert self.may_release.wait(TIMEOUT_S)


def test_shared_part_changes_only_after_every_receiver_has_copied_it(tmp_path: Path) -> None:
    meeting = Meeting()
    specs, total = lay_out([("first", torch.empty(700)), ("second", torch.empty(301))])
    cut = BucketLayout(total, 1_024)
    sender, *receivers = [
        FileChannel(meeting.store(), tmp_path, rank=rank, world_size=3) for rank in range(3)
    ]
    came = [torch.zeros(total, dtype=torch.uint8) for _ in receivers]
    slots = [torch.zeros(1_024, dtype=torch.uint8) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        receiving = [
            pool.submit(receive_buckets, channel, cut, staging, specs)
            for channel, staging in zip(receivers, came, strict=True)
        ]
        send_buckets(sender, cut, slots, lambda at, part: part.fill_(1 + at // 1_024))
        for task in receiving:
            task.result(timeout=TIMEOUT_S)
    expected = (1 + torch.arange(total) // 1_024).to(torch.uint8)
    assert all(torch.equal(staging, expected) for staging in came)
    keys = [f"mail/1/1/{index}{end}" for index in range(cut.num + 1) for end in ("", "/1", "/2")]
    assert not any(meeting.store().check([key]) for key in keys), "the store does not grow"


def test_sender_ends_after_its_receiver_has_released_shared_memory(tmp_path: Path) -> None:
    meeting = Meeting()
    sender, receiver = [
        FileChannel(meeting.store(), tmp_path, rank=rank, world_size=2) for rank in range(2)
    ]
    receiver.may_release.clear()
    with ThreadPoolExecutor(2) as pool:
        releasing = pool.submit(receiver.finish)
        ending = pool.submit(sender.finish)
        with pytest.raises(TimeoutError):
            ending.result(timeout=0.3)
        receiver.may_release.set()
        ending.result(timeout=TIMEOUT_S)
        releasing.result(timeout=TIMEOUT_S)


def test_receiver_that_keeps_memory_delays_the_sender_for_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transport, "RELEASE_S", 0.1)
    FileChannel(Meeting().store(), tmp_path, rank=0, world_size=2).finish()
    assert "an engine has not closed shared memory transfer=1/1" in caplog.text
