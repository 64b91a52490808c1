"""Laws of buckets: their bytes arrive, verified, over every channel of a CPU."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import xxhash
from torch import Tensor

from common.errors import WeightSyncError
from common.weights.buckets import (
    CPU,
    NUM_SLOTS,
    PIECE_BYTES,
    ROW_WORDS,
    BucketDamaged,
    BucketLayout,
    Checksum,
    Pending,
    bytes_of,
    checksum,
    digest,
    hexadecimal,
    lay_out,
    receive_buckets,
    send_buckets,
    word_sums,
    write_buckets,
)
from common.weights.messages import WeightsOffer
from common.weights.transport import WeightGroup
from tests.common.weights.meeting import Meeting

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


def test_three_receivers_get_two_versions_in_turn() -> None:
    store = Meeting()
    sender, *receivers = [WeightGroup() for _ in range(4)]
    for version in (1, 2):
        offer = offer_of(store, version)
        came = [torch.zeros(TOTAL, dtype=torch.uint8) for _ in receivers]
        with ThreadPoolExecutor(3) as pool:
            receiving = [
                pool.submit(group.receive, staging, CPU, replace(offer, rank=1 + index))
                for index, (group, staging) in enumerate(zip(receivers, came, strict=True))
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
        assert all(torch.equal(staging, expected.to(torch.uint8)) for staging in came)
    for group in [sender, *receivers]:
        group.leave()


def offer_of(meeting: Meeting, version: int) -> WeightsOffer:
    return WeightsOffer(
        version=version,
        group_epoch=1,
        rank=0,
        world_size=4,
        **meeting.of_offer(),
        transport="gloo",
        timeout_s=TIMEOUT_S,
        tensors=SPECS,
        total_bytes=TOTAL,
        bucket_bytes=BUCKET,
        canary_token_ids=[],
    )


MATRIX_BYTES = 8 * ROW_WORDS  # of one row


def seeded_bytes(num: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (num,), dtype=torch.uint8, generator=generator)


def sums(buffer: Tensor) -> str:
    """What a GPU computes."""
    return hexadecimal(word_sums(buffer).view(torch.uint8))


on_both = pytest.mark.parametrize("of", [checksum, sums], ids=["cpu", "gpu"])


@on_both
@pytest.mark.parametrize("num_bytes", [1, 16, 1_000, MATRIX_BYTES, 3 * MATRIX_BYTES + 24])
def test_flipped_bit_changes_the_digest_anywhere(of, num_bytes: int) -> None:
    buffer = seeded_bytes(num_bytes)
    before = of(buffer)
    for place in {0, num_bytes // 2, num_bytes - 1}:
        for bit in (0, 7):
            damaged = buffer.clone()
            damaged[place] ^= 1 << bit
            assert of(damaged) != before
    assert of(buffer.clone()) == before
    assert len(before) == 32


@on_both
@pytest.mark.parametrize(
    "places", [(0, 1), (0, ROW_WORDS), (5, ROW_WORDS + 5), (7, 2 * ROW_WORDS + 2)]
)
def test_swapped_words_change_the_digest(of, places: tuple[int, int]) -> None:
    words = torch.zeros(2 * ROW_WORDS + 4, dtype=torch.int64)
    words[list(places)] = torch.tensor([3, -7])
    before = of(words.view(torch.uint8))
    words[list(places)] = torch.tensor([-7, 3])
    assert of(words.view(torch.uint8)) != before


def test_word_sums_include_plain_and_positional_parts() -> None:
    words = torch.arange(2 * ROW_WORDS + 3)
    row, column = words // ROW_WORDS + 1, words % ROW_WORDS + 1
    expected = [int(words.sum()), int((words * (row * ROW_WORDS + column)).sum())]
    assert word_sums(words.view(torch.uint8)).tolist() == expected


def test_large_buffer_digest_equals_the_whole_hash() -> None:
    buffer = seeded_bytes((4 << 20) + 5)
    assert bytes(digest(buffer).tolist()) == xxhash.xxh3_128(buffer.numpy().tobytes()).digest()


@pytest.mark.parametrize("num_bytes", [0, 5, PIECE_BYTES, 2 * PIECE_BYTES + 5])
@pytest.mark.parametrize("step", [PIECE_BYTES // 3, PIECE_BYTES, 2 * PIECE_BYTES])
def test_checksum_in_parts_equals_that_of_the_whole(num_bytes: int, step: int) -> None:
    buffer = seeded_bytes(num_bytes)
    hashed = Checksum()
    for start in range(0, num_bytes, step):
        hashed.update(bytes_of(buffer[start : start + step]))
    assert hashed.text() == checksum(buffer)


def test_checksum_depends_on_each_piece_and_their_order() -> None:
    buffer = seeded_bytes(2 * PIECE_BYTES + 5)
    swapped = torch.cat([buffer[PIECE_BYTES : 2 * PIECE_BYTES], buffer[:PIECE_BYTES], buffer[-5:]])
    found = {checksum(buffer), checksum(swapped)}
    for place in (0, PIECE_BYTES, 2 * PIECE_BYTES + 4):
        damaged = buffer.clone()
        damaged[place] ^= 1
        found.add(checksum(damaged))
    assert len(found) == 5
