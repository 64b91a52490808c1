"""Laws of the rendezvous and of gloo's ports: strangers learn, change and end nothing."""

import contextlib
import socket
import struct
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch

from common.errors import WeightSyncError
from common.weights.messages import StoreOp
from common.weights.rendezvous import (
    MAX_GROUP_BYTES,
    MAX_GROUPS,
    GroupStore,
    StoreConnection,
    StorePlace,
)
from common.weights.transport import BroadcastGroup, CollectiveMember
from tests.common.weights.meeting import HOST, Meeting


def test_store_keys_are_awaited_counted_and_deleted() -> None:
    meeting = Meeting()
    ours, theirs = meeting.store(), meeting.store(timeout_s=0.2)
    threading.Timer(0.2, lambda: ours.set("here", b"\0value")).start()
    assert meeting.store().get("here") == b"\0value"
    assert (ours.add("count", 2), theirs.add("count", 3)) == (2, 5)
    assert ours.check(["here", "count"])
    assert ours.delete_key("here")
    assert not theirs.check(["here"])
    with pytest.raises(WeightSyncError, match=r"no process set \['here'\]"):
        theirs.get("here")
    with pytest.raises(WeightSyncError, match="no process set"):
        theirs.wait(["here"], timedelta(seconds=0.1))
    meeting.close()


def test_rendezvous_requires_key_and_group_membership() -> None:
    meeting = Meeting()
    member, place = meeting.store(), meeting.server.place
    member.set("rank_0", b"address")
    stranger = StorePlace(HOST, place.port, place.public, "0" * 40)
    with pytest.raises(WeightSyncError, match="no rendezvous"):
        GroupStore(StoreConnection(stranger, answer_s=0.1), meeting.group, timeout_s=0.1).get(
            "rank_0"
        )
    former = GroupStore(StoreConnection(place), "a group that it left", timeout_s=1.0)
    for reach in (lambda: former.get("rank_0"), lambda: former.set("rank_0", b"mine")):
        with pytest.raises(WeightSyncError, match="this group is not open"):
            reach()
    assert member.get("rank_0") == b"address"
    meeting.close()


def test_sum_without_a_number_is_refused_and_the_store_continues() -> None:
    meeting = Meeting()
    store = meeting.store()
    store.set("word", "abc")
    for keys in (["word"], [], ["a", "b"]):
        with pytest.raises(WeightSyncError, match="needs one key, and a number"):
            store.connection.ask(meeting.group, StoreOp.ADD, keys, amount=1)
    block = b"x" * (2 << 20)
    for number in range(MAX_GROUP_BYTES // len(block) - 1):
        store.set(str(number), block)
    store.set("rest", b"x" * (len(block) - 200))
    with pytest.raises(WeightSyncError, match="this group is full"):
        store.add("counter" * 30, 1)
    assert store.delete_key("rest")
    assert store.add("counter" * 30, 1) == 1
    meeting.close()


def test_group_storage_is_bounded_and_expires() -> None:
    meeting = Meeting()
    store, block = meeting.store(), b"x" * (2 << 20)
    num = MAX_GROUP_BYTES // len(block) - 1  # with their keys
    for number in range(num):
        store.set(str(number), block)
    with pytest.raises(WeightSyncError, match="this group is full"):
        store.set(str(num), block)
    for _ in range(MAX_GROUPS):
        meeting.server.open_group()
    with pytest.raises(WeightSyncError, match="this group is not open"):
        store.get("0")
    meeting.close()


@pytest.mark.parametrize("how", ["left", "server closed"])
def test_leaving_frees_an_incomplete_process_group_immediately(how: str) -> None:
    """A thread that comes back from torch while the interpreter ends aborts the process."""
    meeting = Meeting()
    store = meeting.store(timeout_s=30.0)
    with ThreadPoolExecutor(1) as pool:
        place = CollectiveMember(0, 2, "gloo", 30.0, HOST)
        joining = pool.submit(BroadcastGroup, store, place, epoch=1)
        with pytest.raises(TimeoutError):
            joining.result(timeout=0.5)
        began = time.monotonic()
        (store.leave if how == "left" else meeting.close)()
        with pytest.raises(WeightSyncError):
            joining.result(timeout=60.0)
        assert time.monotonic() - began < 20.0  # Less than the deadline of the group.
    meeting.close()


SECRET = b"\x07weights" * 8_192


def test_garbage_on_the_port_disturbs_no_rendezvous() -> None:
    meeting = Meeting()
    noise = [socket.create_connection((HOST, meeting.server.port), timeout=5) for _ in range(50)]
    for each in noise:
        each.sendall(b"\0" * 10_000)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(take_part, meeting, rank, epoch=1) for rank in range(2)]
        assert [each.result(timeout=60) for each in both] == [SECRET] * 2
    for each in noise:
        each.close()
    meeting.close()


@pytest.mark.slow
def test_gloo_impostor_reads_and_writes_nothing() -> None:
    """gloo accepts the first connection that sends a number: then this transfer fails."""
    meeting, before = Meeting(), listening()
    for epoch in range(1, 3):
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(take_part, meeting, 0, epoch=epoch)]
            deadline = time.monotonic() + 30.0
            while not (ports := listening() - before) and time.monotonic() < deadline:
                time.sleep(0.001)
            strangers = [impostor(port, number) for port in ports for number in range(16)]
            both.append(pool.submit(take_part, meeting, 1, epoch=epoch))
            came = [outcome_of(each) for each in both]
        told = b"".join(read_all(each) for each in strangers)
        assert ports
        assert b"weights" not in told
        assert set(came) <= {SECRET, b""}, "all of it or nothing"
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(take_part, meeting, rank, epoch=9) for rank in range(2)]
        assert [each.result(timeout=60) for each in both] == [SECRET] * 2
    meeting.close()


def listening() -> set[int]:
    found = psutil.Process().net_connections()
    return {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}


def impostor(port: int, number: int) -> socket.socket:
    """Connect like gloo's pairs: the first eight bytes identify the pair."""
    connection = socket.create_connection((HOST, port), timeout=5)
    connection.sendall(struct.pack("<q", number))
    return connection


def read_all(connection: socket.socket) -> bytes:
    connection.settimeout(0.01)
    told = b""
    with connection, contextlib.suppress(OSError):
        while part := connection.recv(1 << 16):
            told += part
    return told


def outcome_of(taking: Future[bytes]) -> bytes:
    try:
        return taking.result(timeout=60)
    except WeightSyncError:
        return b""


def take_part(meeting: Meeting, rank: int, *, epoch: int) -> bytes:
    """Send, or receive, a secret among two members; return what this one has then."""
    group = BroadcastGroup(
        meeting.store(), CollectiveMember(rank, 2, "gloo", 5.0, HOST), epoch=epoch
    )
    content = bytes(len(SECRET)) if rank else SECRET
    buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    group.broadcast(buffer)
    group.close()
    return bytes(buffer.numpy())
