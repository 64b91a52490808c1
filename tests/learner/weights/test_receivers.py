"""Laws of routes: the transport of each engine and the broadcast groups."""

import pytest

from common.config.learner import WeightsTransport as Choice
from learner.weights.receivers import (
    EngineMember,
    EnginePlace,
    ReceiverGroup,
    SenderPlace,
    engine_places,
    receiver_groups,
    refusal,
    transport_of,
)


def member(name: str, *devices: str, node: str = "") -> EngineMember:
    return EngineMember(sender=b"", actor=name, incarnation=name, devices=devices, node=node)


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
    assert transport_of(member("a", *devices), SenderPlace(own), Choice.AUTO) == transport


@pytest.mark.parametrize(
    ("choice", "own", "device", "transport"),
    [
        (Choice.NCCL, "GPU-0", "GPU-1", "nccl"),
        (Choice.NCCL, "GPU-0", "GPU-0", ""),
        (Choice.NCCL, "", "", ""),
        (Choice.IPC, "GPU-0", "GPU-1", ""),
        (Choice.IPC, "GPU-0", "GPU-0", "ipc"),
        (Choice.GLOO, "GPU-0", "GPU-1", "gloo"),
    ],
)
def test_chosen_transport_is_used_or_refused(
    choice: Choice, own: str, device: str, transport: str
) -> None:
    assert transport_of(member("a", device), SenderPlace(own), choice) == transport


@pytest.mark.parametrize(
    ("own", "devices", "node", "transport"),
    [
        ("", [""], "here", "memory"),
        ("", [""], "there", "gloo"),
        ("GPU-0", ["", ""], "here", "memory"),
        ("GPU-0", ["GPU-1"], "here", "nccl"),
        ("GPU-0", ["GPU-0"], "here", "ipc"),
    ],
)
def test_engine_on_the_learner_node_maps_its_memory(
    own: str, devices: list[str], node: str, transport: str
) -> None:
    engine = member("a", *devices, node=node)
    assert transport_of(engine, SenderPlace(own, "here"), Choice.AUTO) == transport
    can_map = Choice.MEMORY if node == "here" else ""
    assert transport_of(engine, SenderPlace(own, "here"), Choice.MEMORY) == can_map


def test_memory_reaches_no_engine_without_a_node() -> None:
    assert transport_of(member("a", ""), SenderPlace(""), Choice.AUTO) == "gloo"
    assert refusal(member("a", ""), SenderPlace(""), Choice.MEMORY) == (
        "learner.weights_transport=memory cannot reach a because it cannot map memory of the"
        " learner; use learner.weights_transport=auto"
    )


def test_engines_of_memory_read_the_copy_of_the_learner() -> None:
    members = (member("a", "", "", node="n"), member("b", "", node="n"))
    places, num_copies = engine_places(ReceiverGroup("memory", members))
    assert places == [EnginePlace(0, "", 1)] * 2, "index 0 is the learner"
    assert num_copies == 1


def test_members_of_one_transport_receive_together() -> None:
    near, far, other, cpu = (
        member("near", "GPU-0"),
        member("far", "GPU-1"),
        member("other", "GPU-2"),
        member("cpu", ""),
    )
    groups = receiver_groups(
        [near, far, other, cpu], SenderPlace("GPU-0"), Choice.AUTO, num_parts=1
    )
    assert groups == [
        ReceiverGroup("gloo", (cpu,)),
        ReceiverGroup("ipc", (near,)),
        ReceiverGroup("nccl", (far, other)),
    ]


def test_engines_that_share_gpu_use_gloo() -> None:
    first, second, third = member("1", "GPU-1"), member("2", "GPU-1"), member("3", "GPU-3")
    groups = receiver_groups([first, second, third], SenderPlace("GPU-0"), Choice.AUTO, num_parts=1)
    assert groups == [ReceiverGroup("gloo", (first, second)), ReceiverGroup("nccl", (third,))]


@pytest.mark.parametrize(
    ("num_parts", "sizes"), [(1, [5]), (2, [3, 2]), (3, [2, 2, 1]), (9, [1] * 5)]
)
def test_fleet_parts_are_even_and_complete(num_parts: int, sizes: list[int]) -> None:
    members = [member(str(number), "") for number in range(5)]
    groups = receiver_groups(members, SenderPlace(""), Choice.AUTO, num_parts=num_parts)
    assert [len(wave.members) for wave in groups] == sizes
    assert [each for wave in groups for each in wave.members] == members
    assert receiver_groups([], SenderPlace(""), Choice.AUTO, num_parts=num_parts) == []


def test_parts_of_the_fleet_keep_nodes_together() -> None:
    members = [member(str(number), "", node="nm"[number % 2]) for number in range(4)]
    groups = receiver_groups(members, SenderPlace(""), Choice.AUTO, num_parts=2)
    assert [[each.node for each in part.members] for part in groups] == [["m", "m"], ["n", "n"]]


def test_workers_of_a_node_share_one_rank() -> None:
    members = (
        member("a", "", "", node="n"),
        member("alone", "", node="o"),
        member("b", "", "", node="n"),
        member("unshared", "", "", ""),
        member("c", "", "", node="p"),
    )
    places, num_copies = engine_places(ReceiverGroup("gloo", members))
    # a and b: 1. The only worker of node o: 2. Workers without a node: 3 to 5. c: 6.
    assert [place.rank for place in places] == [1, 2, 1, 3, 6]
    assert [place.copy_index for place in places] == [0, 0, 2, 0, 0]
    assert num_copies == 6
    a, alone, b, unshared, c = (place.copy_key for place in places)
    assert alone == unshared == ""
    assert a == b
    assert len({a, c, ""}) == 3


@pytest.mark.parametrize("transport", ["nccl", "ipc"])
def test_every_gpu_receives_at_its_own_rank(transport: str) -> None:
    members = (member("a", "GPU-1", "GPU-2", node="n"), member("b", "GPU-3", node="n"))
    places, num_copies = engine_places(ReceiverGroup(transport, members))
    assert places == [(1, "", 0), (3, "", 0)]
    assert num_copies == 3
