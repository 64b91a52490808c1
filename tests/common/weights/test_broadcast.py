"""Laws of the weight broadcast. Two threads stand for two processes: each has its own store."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import WeightSyncError
from common.weights.buckets import ALIGN_BYTES, check_layout, lay_out, views
from common.weights.messages import WeightsOffer
from common.weights.rendezvous import choose_interface, interface_of
from common.weights.transport import BroadcastGroup, CollectiveMember
from common.wire.addresses import local_address_towards
from tests.common.weights.meeting import NOWHERE, Meeting

HOST = "127.0.0.1"


def join(
    store: Any, rank: int, *, epoch: int = 1, world_size: int = 2, timeout_s: float = 60.0
) -> BroadcastGroup:
    return BroadcastGroup(
        store, CollectiveMember(rank, world_size, "gloo", timeout_s, HOST), epoch=epoch
    )


def random_bytes(num: int, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num,), dtype=torch.uint8, generator=generator)


def test_broadcast_delivers_rank_0_bytes_every_epoch() -> None:
    server = Meeting()
    sent = [random_bytes(4096, seed=seed) for seed in range(3)]

    def send() -> None:
        store = server.store()
        group = join(store, 0)
        group.broadcast(sent[0].clone())
        group.broadcast(sent[1].clone())
        group.close()
        other = join(store, 0, epoch=2)
        other.broadcast(sent[2].clone())
        other.close()

    def receive() -> list[Tensor]:
        store = server.store()
        got = [torch.zeros(4096, dtype=torch.uint8) for _ in sent]
        group = join(store, 1)
        group.broadcast(got[0])
        group.broadcast(got[1])
        group.close()
        other = join(store, 1, epoch=2)
        other.broadcast(got[2])
        other.close()
        return got

    with ThreadPoolExecutor(2) as pool:
        sending, receiving = pool.submit(send), pool.submit(receive)
        sending.result(timeout=60)
        got = receiving.result(timeout=60)
    for received, original in zip(got, sent, strict=True):
        assert torch.equal(received, original)


def test_missing_member_fails_all_others_in_time() -> None:
    server = Meeting()

    def enter(rank: int) -> None:
        store = server.store(timeout_s=0.5)
        join(store, rank, world_size=3, timeout_s=0.5).broadcast(random_bytes(64))

    with ThreadPoolExecutor(2) as pool:
        for entered in [pool.submit(enter, rank) for rank in range(2)]:
            with pytest.raises(WeightSyncError):
                entered.result(timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("silent", [0, 1])
def test_silent_member_fails_the_other_in_time(silent: int) -> None:
    server = Meeting()
    buffer = random_bytes(32 << 20)  # more than the kernel would take in silence

    def enter(rank: int) -> BroadcastGroup:
        return join(server.store(), rank, timeout_s=4.0)  # Both must join within this time.

    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(enter, range(2)))
    with pytest.raises(WeightSyncError, match="broadcast failed epoch=1"):
        groups[1 - silent].broadcast(buffer)
    for group in groups:
        group.close()


def test_tensors_of_any_dtype_survive_the_buffer() -> None:
    named = [
        ("weight", torch.randn(3, 5).to(torch.bfloat16)),
        ("scale", torch.tensor(0.125)),
        ("index", torch.arange(7, dtype=torch.int64)),
        ("flags", torch.tensor([True, False, True])),
        ("half", torch.randn(2, 2, 2).to(torch.float16)),
        ("none", torch.zeros(0, 4)),
    ]
    specs, num_bytes = lay_out(named)
    assert [spec.num_bytes for spec in specs] == [30, 4, 56, 3, 16, 0]
    assert [spec.offset_bytes for spec in specs] == [0, 32, 48, 112, 128, 144]
    assert num_bytes == 144
    assert all(spec.offset_bytes % ALIGN_BYTES == 0 for spec in specs)
    buffer = torch.zeros(num_bytes, dtype=torch.uint8)
    for (_, tensor), (_, view) in zip(named, views(buffer, specs), strict=True):
        view.copy_(tensor)
    for (name, tensor), (other_name, view) in zip(named, views(buffer, specs), strict=True):
        assert name == other_name
        assert view.dtype == tensor.dtype
        assert torch.equal(view, tensor)


def test_tensor_view_is_no_copy() -> None:
    specs, num_bytes = lay_out([("w", torch.zeros(2))])
    buffer = torch.zeros(num_bytes, dtype=torch.uint8)
    ((_, view),) = views(buffer, specs)
    view.fill_(1.0)
    assert buffer.view(torch.float32).tolist() == [1.0, 1.0, 0.0, 0.0]


def test_address_towards_this_machine_is_local() -> None:
    assert local_address_towards(HOST) == HOST


def test_nccl_uses_the_peer_interface_unless_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    choose_interface(HOST)
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    own = local_address_towards("192.0.2.77")
    choose_interface(own)
    assert os.environ["NCCL_SOCKET_IFNAME"] == f"={interface_of(own)}"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "chosen")
    choose_interface(own)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "chosen"


def test_store_listens_only_on_its_given_host() -> None:
    meeting = Meeting()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", meeting.server.port), timeout=5)
    meeting.store().set("key", "value")
    assert meeting.store().get("key") == b"value"
    meeting.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "load"}, "impossible tensor"),
        ({"dtype": "nothing"}, "impossible tensor"),
        ({"shape": [-2, -2]}, "impossible tensor"),
        ({"num_bytes": 12}, "impossible tensor"),
        ({"offset_bytes": 8}, "impossible tensor"),
        ({"offset_bytes": 1 << 40}, "tensors of 1099511627792 bytes in 16"),
    ],
)
def test_offer_with_an_impossible_tensor_is_refused(change: dict[str, Any], reason: str) -> None:
    specs, num_bytes = lay_out([("weight", torch.zeros(2, 2))])
    offer = WeightsOffer(
        **NOWHERE,
        version=1,
        group_epoch=1,
        rank=1,
        world_size=2,
        transport="gloo",
        folder="",
        timeout_s=1.0,
        tensors=specs,
        total_bytes=num_bytes,
        bucket_bytes=64,
        canary_token_ids=[],
    )
    check_layout(offer)
    with pytest.raises(WeightSyncError, match=reason):
        check_layout(replace(offer, tensors=[replace(specs[0], **change)]))
    with pytest.raises(WeightSyncError, match="buckets of 0 bytes"):
        check_layout(replace(offer, bucket_bytes=0))
