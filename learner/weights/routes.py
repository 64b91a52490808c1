"""Routes of a version: the transport for each engine, and the engines that receive together.

Workers of one node share a copy. On the learner's node they map the learner's own copy. NCCL is the
exception: its ring of GPUs enters each node once, and every GPU receives. So is CUDA IPC, whose
receivers are on the learner's GPU.
"""

import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.config.learner import WeightsTransport
from common.weights.transport import SLICE
from learner.weights.receivers import SILENT_AFTER_S, EngineMember

MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishSettings:
    """Settings of the transfer of versions."""

    host: str  # Host of the rendezvous store.
    timeout_s: float  # Most seconds of each part of a transfer, if all members are alive.
    # Seconds without a heartbeat after which an engine is removed.
    silent_after_s: float = SILENT_AFTER_S
    max_canary_delta: float  # Largest mean |difference| in nats without an alarm.
    bucket_bytes: int = 256 << 20
    transport: WeightsTransport = WeightsTransport.AUTO
    num_parts: int = 1  # Parts of the fleet that are updated one after the other.
    keeps_versions: bool = False  # Send changes where an engine has the version before.


class ReceiverGroup(NamedTuple):
    """Engines that receive together."""

    transport: str  # The name of the transport in an offer.
    members: tuple[EngineMember, ...]


class SenderPlace(NamedTuple):
    """The place of the learner's weights."""

    device: str  # `device_id` of the weights.
    node: str = ""  # Engines with this node map memory of the learner; "": none can.

    def host_transport(self, member: EngineMember) -> str:
        """Return the transport by host memory to an engine."""
        return MEMORY if self.node and member.node == self.node else "gloo"


class EnginePlace(NamedTuple):
    """Fields of the offer to one engine."""

    rank: int
    copy_key: str
    copy_index: int


def engine_places(receivers: ReceiverGroup) -> tuple[list[EnginePlace], int]:
    """Return the place of each engine, in order, and the number of copies that are sent.

    Example: engines a and b on node n with two workers each, and c elsewhere with two workers.
    a's first worker receives rank 1 for all of n. c's workers share rank 2.

    On the learner's node no worker is the first one: the copy is the learner's.
    """
    if receivers.transport == MEMORY:
        return [EnginePlace(0, "", 1)] * len(receivers.members), 1
    num_workers = Counter[str]()
    for member in receivers.members:
        num_workers[member.node] += len(member.devices)
    copies: dict[str, EnginePlace] = {}  # The next free place of each shared copy, by node.
    places: list[EnginePlace] = []
    num_copies = 0
    for member in receivers.members:
        node = member.node
        if not node or num_workers[node] == 1 or receivers.transport != "gloo":
            places.append(EnginePlace(1 + num_copies, "", 0))
            num_copies += len(member.devices)
            continue
        if node not in copies:
            num_copies += 1
            copies[node] = EnginePlace(num_copies, f"copy/{secrets.token_hex(8)}", 0)
        place = copies[node]
        places.append(place)
        copies[node] = place._replace(copy_index=place.copy_index + len(member.devices))
    return places, num_copies


def transport_of(member: EngineMember, sender: SenderPlace, choice: WeightsTransport) -> str:
    """Return the transport to an engine; "" if the chosen one cannot reach it.

    NCCL needs a separate whole GPU for every rank, the learner's included. CUDA IPC needs the
    engine on the learner's GPU. All other cases use host memory.
    """
    own_device = sender.device
    devices = set(member.devices)
    can_share = bool(own_device) and devices == {own_device}
    has_own = len(devices) == len(member.devices) and own_device not in devices
    has_own &= not any(each.startswith(SLICE) for each in (own_device, *devices))
    has_gpus = bool(own_device) and all(devices)
    match choice:
        case WeightsTransport.AUTO:
            if can_share:
                return "ipc"
            return "nccl" if has_gpus and has_own else sender.host_transport(member)
        case WeightsTransport.IPC:
            return "ipc" if can_share else ""
        case WeightsTransport.NCCL:
            return "nccl" if has_gpus and has_own else ""
        case WeightsTransport.MEMORY:
            return MEMORY if sender.host_transport(member) == MEMORY else ""
        case _:
            return choice.value


def refusal(member: EngineMember, sender: SenderPlace, choice: WeightsTransport) -> str:
    """Return the reason why the chosen transport cannot reach an engine; "" if it can."""
    if transport_of(member, sender, choice):
        return ""
    devices = ", ".join(each or "the CPU" for each in member.devices)
    where = f"on {devices} from {sender.device or 'the CPU'}"
    if choice is WeightsTransport.MEMORY:
        where = "because it cannot map memory of the learner"
    return (
        f"learner.weights_transport={choice.value} cannot reach {member.actor} {where}; use"
        " learner.weights_transport=auto"
    )


def receiver_groups(
    members: Iterable[EngineMember],
    sender: SenderPlace,
    choice: WeightsTransport,
    *,
    num_parts: int,
) -> list[ReceiverGroup]:
    """Return the engines that receive together, in order; each group has one transport.

    Engines that share a GPU with each other use host memory.

    Args:
        num_parts: parts of the fleet; each part waits for the part before it.
    """
    members = sorted(members, key=lambda member: member.node)  # A node belongs to few parts.
    size = -(-len(members) // num_parts) or 1
    return [
        receivers
        for start in range(0, len(members), size)
        for receivers in _by_transport(members[start : start + size], sender, choice)
    ]


def _by_transport(
    members: Sequence[EngineMember], sender: SenderPlace, choice: WeightsTransport
) -> list[ReceiverGroup]:
    """Return the engines by transport; NCCL needs a GPU of its own for each."""
    found: dict[str, list[EngineMember]] = {}
    num_uses = Counter(device for member in members for device in member.devices)
    for member in members:
        transport = transport_of(member, sender, choice)
        is_shared = any(num_uses[device] > 1 for device in member.devices)
        if transport == "nccl" and is_shared:
            transport = sender.host_transport(member)
        found.setdefault(transport, []).append(member)
    return [
        ReceiverGroup(transport, tuple(each))
        for transport, each in sorted(found.items())
        if transport
    ]
