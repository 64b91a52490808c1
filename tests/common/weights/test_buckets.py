"""Laws of buckets: their bytes arrive, verified, over every channel of a CPU."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.errors import WeightSyncError
from common.weights.buckets import (
    NUM_SLOTS,
    PIECE_BYTES,
    BucketDamaged,
    BucketLayout,
    Pending,
    receive_buckets,
    send_buckets,
    write_buckets,
)
from common.weights.collective import CPU, lay_out
from common.weights.digest import checksum
from common.weights.mailbox import remove_files
from common.weights.messages import WeightsOffer
from common.weights.transport import WeightGroup
from tests.common.weights.meeting import Meeting
from tests.full_disk import no_room_beyond

TIMEOUT_S = 30.0
BUCKET = 1_024
SPECS, TOTAL = lay_out([("first", torch.empty(700)), ("second", torch.empty(301))])


class Now:
    """A part that is there."""

    def wait(self) -> None: ...


class Line:
    """A channel within one thread: it stores the sent parts and applies the given fault."""

    device = CPU

    def __init__(self, damage: int = -1) -> None:
        self.parts: list[Tensor] = []
        self._damage = damage

    def send(self, index: int, part: Tensor) -> Pending:
        self.parts.append(part.clone())
        if index == self._damage:
            self.parts[-1][3] ^= 1
        return Now()

    def receive(self, index: int, part: Tensor) -> Pending:
        part.copy_(self.parts[index])
        return Now()


class Wire:
    """A channel that records when parts are sent and when the sender waits for them."""

    device = CPU

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def send(self, index: int, part: Tensor) -> Pending:
        self._events.append(f"send {index}")
        return Sent(self._events, index)

    def receive(self, index: int, part: Tensor) -> Pending:
        raise NotImplementedError


class Sent:
    """A part on its way."""

    def __init__(self, events: list[str], index: int) -> None:
        self._events = events
        self._index = index

    def wait(self) -> None:
        self._events.append(f"wait {self._index}")


def slots_of(cut: BucketLayout) -> list[Tensor]:
    return [torch.zeros(cut.slot_bytes, dtype=torch.uint8) for _ in range(NUM_SLOTS)]


def random_bytes() -> Tensor:
    return torch.randint(0, 256, (TOTAL,), dtype=torch.uint8)


@pytest.mark.parametrize("bucket_bytes", [16, BUCKET, TOTAL, 10 * TOTAL])
def test_weights_arrive_with_any_bucket_size(bucket_bytes: int) -> None:
    sent, came, line = random_bytes(), torch.zeros(TOTAL, dtype=torch.uint8), Line()
    cut = BucketLayout(TOTAL, bucket_bytes)
    send_buckets(line, cut, slots_of(cut), lambda at, part: part.copy_(sent[at : at + len(part)]))
    receive_buckets(line, cut, came, SPECS)
    assert torch.equal(came, sent)
    assert [len(part) for part in line.parts[:-1]] == [
        stop - start for start, stop in map(cut.span, range(cut.num))
    ]


def test_next_bucket_is_filled_while_one_is_sent() -> None:
    events: list[str] = []
    cut = BucketLayout(4 * BUCKET, BUCKET)

    def fill(start: int, part: Tensor) -> None:
        events.append(f"fill {start // BUCKET}")

    send_buckets(Wire(events), cut, slots_of(cut), fill)
    assert events[:5] == ["fill 0", "send 0", "fill 1", "send 1", "wait 0"]
    assert events[5:9] == ["fill 2", "send 2", "wait 1", "fill 3"]


def test_piece_is_checked_while_the_next_one_is_filled() -> None:
    has_next = threading.Event()

    def fill(start: int, part: Tensor) -> None:
        if start > 0:
            has_next.set()

    def check(start: int, part: Tensor) -> None:
        assert has_next.wait(TIMEOUT_S)

    cut = BucketLayout(2 * BUCKET, BUCKET)
    write_buckets(torch.zeros(cut.total_bytes, dtype=torch.uint8), cut, [], fill, check=check)
    has_next.clear()
    cut = BucketLayout(PIECE_BYTES + 16, 2 * PIECE_BYTES)
    send_buckets(Line(), cut, slots_of(cut), fill, check=check)


def test_refused_bucket_is_not_sent() -> None:
    line = Line()
    cut = BucketLayout(4 * BUCKET, BUCKET)

    def refuse(start: int, part: Tensor) -> None:
        if part[0] == 2:
            raise WeightSyncError(f"the part at {start} is refused")

    with pytest.raises(WeightSyncError, match=f"the part at {2 * BUCKET} is refused"):
        send_buckets(
            line, cut, slots_of(cut), lambda at, part: part.fill_(at // BUCKET), check=refuse
        )
    assert [each[0].item() for each in line.parts] == [0, 1]


@pytest.mark.parametrize(
    ("damage", "words"), [(1, r"bucket 1 of 4 \(first to first\)"), (3, r"second to second")]
)
def test_damaged_bucket_is_named_with_its_tensors(damage: int, words: str) -> None:
    cut, line = BucketLayout(TOTAL, BUCKET), Line(damage)
    send_buckets(line, cut, slots_of(cut), lambda at, part: part.fill_(7))
    with pytest.raises(BucketDamaged, match=words):
        receive_buckets(line, cut, torch.zeros(TOTAL, dtype=torch.uint8), SPECS)


@pytest.mark.parametrize("has_slots", [False, True])
def test_written_buckets_have_the_bytes_and_their_checksum(has_slots: bool) -> None:
    cut = BucketLayout(TOTAL, BUCKET)
    target = torch.zeros(TOTAL, dtype=torch.uint8)
    slots = slots_of(cut) if has_slots else []
    digest = write_buckets(target, cut, slots, lambda at, part: part.fill_(1 + at // BUCKET))
    assert torch.equal(target, (1 + torch.arange(TOTAL) // BUCKET).to(torch.uint8))
    assert digest == checksum(target)


@pytest.mark.parametrize("transport", ["gloo", "file"])
def test_three_receivers_get_two_versions_in_turn(transport: str, tmp_path: Path) -> None:
    store = Meeting()
    sender, *receivers = [WeightGroup() for _ in range(4)]
    for version in (1, 2):
        offer = offer_of(store, version, transport, str(tmp_path))
        came = [torch.zeros(TOTAL, dtype=torch.uint8) for _ in receivers]
        with ThreadPoolExecutor(3) as pool:
            receiving = [
                pool.submit(group.receive, each, CPU, replace(offer, rank=1 + index))
                for index, (group, each) in enumerate(zip(receivers, came, strict=True))
            ]
            sender.send(
                slots_of(BucketLayout(TOTAL, BUCKET)),
                lambda at, part, version=version: part.fill_(version + at // BUCKET),
                offer,
                is_cancelled=lambda: False,
            )
        for task in receiving:
            assert task.result() >= 0
        expected = version + torch.arange(TOTAL) // BUCKET
        assert all(torch.equal(each, expected.to(torch.uint8)) for each in came)
    for group in [sender, *receivers]:
        group.leave()
    remove_files(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_unshared_folder_is_named(tmp_path: Path) -> None:
    store = Meeting()
    sender, receiver, gone = WeightGroup(), WeightGroup(), threading.Event()
    offer = replace(offer_of(store, 1, "file", str(tmp_path)), world_size=2)
    elsewhere = replace(offer, rank=1, folder=str(tmp_path / "elsewhere"))
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(
            sender.send,
            slots_of(BucketLayout(TOTAL, BUCKET)),
            lambda at, part: part.zero_(),
            offer,
            is_cancelled=gone.is_set,
        )
        with pytest.raises(WeightSyncError, match=r"elsewhere.*learner and actor must share"):
            receiver.receive(torch.zeros(TOTAL, dtype=torch.uint8), CPU, elsewhere)
        gone.set()
        assert isinstance(sending.exception(), WeightSyncError)


@pytest.mark.parametrize("is_given_up", [False, True])
def test_full_disk_delays_version_until_space_frees(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_given_up: bool
) -> None:
    store, gone = Meeting(), threading.Event()
    sender, receiver, came = WeightGroup(), WeightGroup(), torch.zeros(TOTAL, dtype=torch.uint8)
    offer = replace(offer_of(store, 1, "file", str(tmp_path)), world_size=2)
    cut = BucketLayout(TOTAL, BUCKET)
    with ThreadPoolExecutor(2) as pool:
        own = replace(offer, rank=1)
        receiving = pool.submit(receiver.receive, came, CPU, own, is_cancelled=gone.is_set)
        with no_room_beyond(BUCKET // 2):
            sending = pool.submit(
                sender.send,
                slots_of(cut),
                lambda at, part: part.fill_(7),
                offer,
                is_cancelled=gone.is_set,
            )
            deadline = time.monotonic() + TIMEOUT_S
            while "disk full: no room for" not in caplog.text:
                assert time.monotonic() < deadline, "nothing is said"
                time.sleep(0.01)
            if is_given_up:
                gone.set()
                assert isinstance(sending.exception(TIMEOUT_S), WeightSyncError)
        if is_given_up:
            assert isinstance(receiving.exception(TIMEOUT_S), WeightSyncError)
        else:
            assert sending.result(TIMEOUT_S) >= 0
            assert receiving.result(TIMEOUT_S) >= 0
            assert bool((came == 7).all())
            assert "disk has room again" in caplog.text
    for group in (sender, receiver):
        group.leave()


def offer_of(meeting: Meeting, version: int, transport: str, folder: str) -> WeightsOffer:
    return WeightsOffer(
        version=version,
        group_epoch=1,
        rank=0,
        world_size=4,
        **meeting.of_offer(),
        transport=transport,
        folder=folder,
        timeout_s=TIMEOUT_S,
        tensors=SPECS,
        total_bytes=TOTAL,
        bucket_bytes=BUCKET,
        canary_token_ids=[],
    )
