"""Laws of the limits of a message: the same for its sender, the sockets and the journal."""

import dataclasses
import time
import typing

import numpy as np
import pytest
import zmq

from common.config.horizon import MAX_STAGE
from common.errors import MessageTooLarge, WireError
from common.segments import TOKEN_COLUMNS
from common.weights.messages import TensorSpec, WeightsOffer
from common.wire.access.bounds import (
    MAX_FRAME_BYTES,
    MAX_FRAMES,
    MAX_HEADER_BYTES,
    MAX_MESSAGE_BYTES,
)
from common.wire.access.connections import MAX_UNHEARD_BYTES
from common.wire.codec import MESSAGE_TYPES, decode, encode
from common.wire.messages import EpisodeKind, Lease, LeaseGrant, PolicyKind, Rejected, Trajectory
from common.wire.security import RunKeys, create_keys
from common.wire.sockets import Router, connect_dealer
from learner.journal.journal import MAX_RECORD_BYTES, record_buffers
from scheduler.dispatch.grants import MAX_LEASES
from tests.learner.builders import make_trajectory

HOST = "127.0.0.1"
LONGEST_ID = "\N{GRINNING FACE}" * 300  # four bytes a character


@pytest.fixture
def keys(tmp_path_factory: pytest.TempPathFactory) -> RunKeys:
    return create_keys(tmp_path_factory.mktemp("keys"))


def test_sender_receiver_and_journal_limits_agree() -> None:
    assert MAX_HEADER_BYTES <= MAX_FRAME_BYTES <= MAX_MESSAGE_BYTES
    assert MAX_MESSAGE_BYTES < MAX_UNHEARD_BYTES
    assert MAX_MESSAGE_BYTES + 4 * (1 + MAX_FRAMES) < MAX_RECORD_BYTES


def test_every_message_fits_the_frame_limit() -> None:
    for cls in MESSAGE_TYPES.values():
        kinds = typing.get_type_hints(cls)
        arrays = [each for each in dataclasses.fields(cls) if kinds[each.name] is np.ndarray]
        assert 1 + len(arrays) <= MAX_FRAMES, cls.__name__


def test_longest_configurable_episode_fits_a_message() -> None:
    trajectory = make_trajectory([1, 2], [0, 1])
    sizes = [getattr(trajectory, name).itemsize for name in TOKEN_COLUMNS]
    assert sum(sizes) == 17
    assert MAX_STAGE >= 1_000_000
    assert MAX_STAGE * max(sizes) <= MAX_FRAME_BYTES
    assert MAX_STAGE * sum(sizes) + MAX_HEADER_BYTES <= MAX_MESSAGE_BYTES


@pytest.mark.slow
def test_largest_frame_passes_a_socket_and_journal(keys: RunKeys) -> None:
    router = Router(keys, host=HOST, port=0)
    context = zmq.Context()
    try:
        dealer = connect_dealer(context, keys, address=f"tcp://{HOST}:{router.port}")
        sent = encode(make_trajectory([1], [0], turn_states=np.zeros(1, np.int32)))
        sent[1] = bytes(MAX_FRAME_BYTES)
        dealer.send_multipart(sent)
        deadline = time.monotonic() + 30.0
        received: list[list[bytes]] = []
        while not received and time.monotonic() < deadline:
            received = router.receive_frames(timeout_s=1.0)
        assert [list(map(len, each[1:])) for each in received] == [list(map(len, sent))]
        assert len(record_buffers(received[0][1:])) == 1 + len(sent)
        dealer.close(linger=0)
    finally:
        context.destroy(linger=0)
        router.close()


def large(num_tokens: int) -> Trajectory:
    """Return an episode whose token ids alone are of that length."""
    return dataclasses.replace(make_trajectory([0], [0]), token_ids=np.zeros(num_tokens, np.int32))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Rejected(reason="x" * MAX_HEADER_BYTES), "Rejected: a header of 16777"),
        (large(MAX_FRAME_BYTES // 4 + 1), "Trajectory: an array of 33554436 bytes"),
    ],
)
def test_sender_refuses_oversized_messages_by_name(message: object, reason: str) -> None:
    with pytest.raises(MessageTooLarge, match=reason):
        encode(message)


@pytest.mark.slow
def test_sender_and_receiver_refuse_large_frames_alike() -> None:
    frames = encode(make_trajectory([1], [0]))
    whole = np.zeros(MAX_FRAME_BYTES // 4, np.int32)
    columns = {name: whole for name in (*TOKEN_COLUMNS, "turn_states", "asides", "turn_scores")}
    with pytest.raises(MessageTooLarge, match=r"a total of .* is over the size limit"):
        encode(dataclasses.replace(make_trajectory([1], [0]), **columns))
    with pytest.raises(WireError, match=r"a total of .* is over the size limit"):
        decode([frames[0], *[bytes(MAX_FRAME_BYTES)] * 7])


@pytest.mark.parametrize("text", ["half \udcff", "\ud800"])
def test_sender_refuses_text_with_lone_surrogates(text: str) -> None:
    with pytest.raises(WireError, match="a message cannot contain"):
        encode(Rejected(reason=text))


@pytest.mark.slow
def test_largest_grant_fits_a_message() -> None:
    lease = Lease(
        episode_id=LONGEST_ID,
        group_id=LONGEST_ID,
        member=1,
        attempt=0,
        kind=EpisodeKind.TRAIN,
        policy=PolicyKind.MODEL,
        env=LONGEST_ID,
        item_id=LONGEST_ID,
        seed=2**31 - 1,
        horizon=10**6,
        horizon_stage=0,
        opened_at_version=0,
        lease_mac=LONGEST_ID,
        deadline_s=1.0,
    )
    grant = LeaseGrant(leases=[lease] * MAX_LEASES, retry_after_s=0.0, reason="")
    assert len(decode(encode(grant)).leases) == MAX_LEASES


@pytest.mark.slow
def test_offer_of_100000_tensors_fits_a_message() -> None:
    tensor = TensorSpec(
        name="model.layers.60.mlp.experts.255.down_proj.weight",
        shape=[7168, 2048],
        dtype="bfloat16",
        offset_bytes=10**12,
        num_bytes=10**8,
    )
    offer = WeightsOffer(
        version=1,
        group_epoch=1,
        rank=1,
        world_size=2,
        store_host=HOST,
        store_port=1,
        store_public="",
        store_secret="",
        group_key="",
        transport="gloo",
        folder="",
        timeout_s=1.0,
        tensors=[tensor] * 100_000,
        total_bytes=10**12,
        bucket_bytes=10**8,
        canary_token_ids=[],
    )
    assert len(decode(encode(offer)).tensors) == 100_000
