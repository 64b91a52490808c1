"""Routes of a version: the transport for each engine, and the engines that receive together."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.config.compute import WeightsTransport
from common.wire.collective import SLICE
from learner.weights.membership import SILENT_AFTER_S, EngineMember


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
    folder: str = ""  # Folder of the transport "file".
    keeps_versions: bool = False  # Send changes where an engine has the version before.


class ReceiverGroup(NamedTuple):
    """Engines that receive together."""

    transport: str  # "gloo", "nccl", "ipc" or "file"
    members: tuple[EngineMember, ...]


def transport_of(member: EngineMember, own_device: str, choice: WeightsTransport) -> str:
    """Return the transport to an engine; "" if the chosen one cannot reach it.

    NCCL needs a separate whole GPU for every rank, the learner's included. CUDA IPC needs the
    engine on the learner's GPU. All other cases use host memory.

    Args:
        own_device: `device_id` of the learner's weights.
    """
    devices = set(member.devices)
    can_share = bool(own_device) and devices == {own_device}
    has_own = len(devices) == len(member.devices) and own_device not in devices
    has_own &= not any(each.startswith(SLICE) for each in (own_device, *devices))
    has_gpus = bool(own_device) and all(devices)
    match choice:
        case WeightsTransport.AUTO:
            return "ipc" if can_share else "nccl" if has_gpus and has_own else "gloo"
        case WeightsTransport.IPC:
            return "ipc" if can_share else ""
        case WeightsTransport.NCCL:
            return "nccl" if has_gpus and has_own else ""
        case _:
            return choice.value


def receiver_groups(
    members: Iterable[EngineMember], own_device: str, choice: WeightsTransport, *, num_parts: int
) -> list[ReceiverGroup]:
    """Return the engines that receive together, in order; each group has one transport.

    Engines that share a GPU with each other use gloo, unless NCCL was chosen explicitly.

    Args:
        num_parts: parts of the fleet; each part waits for the part before it.
    """
    members = list(members)
    size = -(-len(members) // num_parts) or 1
    return [
        receivers
        for start in range(0, len(members), size)
        for receivers in _by_transport(members[start : start + size], own_device, choice)
    ]


def _by_transport(
    members: Sequence[EngineMember], own_device: str, choice: WeightsTransport
) -> list[ReceiverGroup]:
    """Return the engines by transport; NCCL needs a GPU of its own for each."""
    found: dict[str, list[EngineMember]] = {}
    num_uses = Counter(device for member in members for device in member.devices)
    for member in members:
        transport = transport_of(member, own_device, choice)
        is_shared = any(num_uses[device] > 1 for device in member.devices)
        if transport == "nccl" and is_shared:
            transport = "gloo"
        found.setdefault(transport, []).append(member)
    return [
        ReceiverGroup(transport, tuple(each))
        for transport, each in sorted(found.items())
        if transport
    ]
