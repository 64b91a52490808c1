"""Laws of routes: the transport of each engine and the broadcast groups."""

import pytest

from common.config.compute import WeightsTransport as Choice
from learner.weights.membership import EngineMember
from learner.weights.routes import ReceiverGroup, receiver_groups, transport_of


def member(name: str, *devices: str) -> EngineMember:
    return EngineMember(sender=b"", actor=name, incarnation=name, devices=devices)


@pytest.mark.parametrize(
    ("own", "devices", "transport"),
    [
        ("", [""], "gloo"),
        ("", ["GPU-1"], "gloo"),
        ("GPU-0", [""], "gloo"),
        ("GPU-0", ["GPU-1"], "nccl"),
        ("GPU-0", ["GPU-1", "GPU-2"], "nccl"),
        ("GPU-0", ["GPU-0"], "ipc"),
        ("GPU-0", ["GPU-0", "GPU-1"], "gloo"),  # NCCL takes no two ranks on one GPU
        ("GPU-0", ["GPU-1", "GPU-1"], "gloo"),
        ("MIG-1", ["MIG-2"], "gloo"),  # NCCL takes no two slices of one GPU.
        ("GPU-0", ["MIG-2"], "gloo"),
        ("MIG-1", ["MIG-1"], "ipc"),
    ],
)
def test_auto_transport_is_ipc_nccl_or_gloo_by_location(
    own: str, devices: list[str], transport: str
) -> None:
    assert transport_of(member("a", *devices), own, Choice.AUTO) == transport


@pytest.mark.parametrize(
    ("choice", "own", "device", "transport"),
    [
        (Choice.NCCL, "GPU-0", "GPU-1", "nccl"),
        (Choice.NCCL, "GPU-0", "GPU-0", ""),
        (Choice.NCCL, "", "", ""),
        (Choice.IPC, "GPU-0", "GPU-1", ""),
        (Choice.IPC, "GPU-0", "GPU-0", "ipc"),
        (Choice.GLOO, "GPU-0", "GPU-1", "gloo"),
        (Choice.FILE, "", "", "file"),
    ],
)
def test_chosen_transport_is_used_or_refused(
    choice: Choice, own: str, device: str, transport: str
) -> None:
    assert transport_of(member("a", device), own, choice) == transport


def test_members_of_one_transport_receive_together() -> None:
    near, far, other, cpu = (
        member("near", "GPU-0"),
        member("far", "GPU-1"),
        member("other", "GPU-2"),
        member("cpu", ""),
    )
    found = receiver_groups([near, far, other, cpu], "GPU-0", Choice.AUTO, num_parts=1)
    assert found == [
        ReceiverGroup("gloo", (cpu,)),
        ReceiverGroup("ipc", (near,)),
        ReceiverGroup("nccl", (far, other)),
    ]


def test_engines_that_share_gpu_use_gloo() -> None:
    first, second, third = member("1", "GPU-1"), member("2", "GPU-1"), member("3", "GPU-3")
    found = receiver_groups([first, second, third], "GPU-0", Choice.AUTO, num_parts=1)
    assert found == [ReceiverGroup("gloo", (first, second)), ReceiverGroup("nccl", (third,))]


@pytest.mark.parametrize(
    ("num_parts", "sizes"), [(1, [5]), (2, [3, 2]), (3, [2, 2, 1]), (9, [1] * 5)]
)
def test_fleet_parts_are_even_and_complete(num_parts: int, sizes: list[int]) -> None:
    members = [member(str(number), "") for number in range(5)]
    found = receiver_groups(members, "", Choice.AUTO, num_parts=num_parts)
    assert [len(wave.members) for wave in found] == sizes
    assert [each for wave in found for each in wave.members] == members
    assert receiver_groups([], "", Choice.AUTO, num_parts=num_parts) == []
