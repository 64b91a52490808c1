"""By which way a version goes to which engines, and which of them get it at the same time."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.config.compute import WeightsTransport
from common.wire.collective import SLICE
from learner.weights.membership import SILENT_AFTER_S, Member


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishSettings:
    """How versions travel."""

    host: str  # of the rendezvous store
    timeout_s: float  # most seconds of each part of a transfer, when nobody is known to be gone
    silent_after_s: float = SILENT_AFTER_S  # without a heartbeat an engine is waited for by nobody
    max_canary_delta: float  # mean |difference| in nats that is no alarm
    bucket_bytes: int = 256 << 20
    transport: WeightsTransport = WeightsTransport.AUTO
    num_parts: int = 1  # of the fleet, one after the other
    folder: str = ""  # of the transport "file"


class Wave(NamedTuple):
    """Engines that receive together."""

    transport: str  # "gloo", "nccl", "ipc" or "file"
    members: tuple[Member, ...]


def transport_of(member: Member, own_device: str, choice: WeightsTransport) -> str:
    """Return what carries weights to an engine; "" if the one chosen cannot.

    NCCL needs a whole GPU of its own for every rank, the learner's included; CUDA IPC needs the
    learner's GPU on the other side, too; else the bytes go through host memory.

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


def waves(
    members: Iterable[Member], own_device: str, choice: WeightsTransport, *, num_parts: int
) -> list[Wave]:
    """Return who receives together, in order; no member of another transport holds one up.

    Engines that share a GPU with each other go by gloo, unless NCCL was chosen by name.

    Args:
        num_parts: into which the fleet is cut; the later ones wait for the earlier ones.
    """
    members = list(members)
    size = -(-len(members) // num_parts) or 1
    return [
        wave
        for start in range(0, len(members), size)
        for wave in _by_transport(members[start : start + size], own_device, choice)
    ]


def _by_transport(
    members: Sequence[Member], own_device: str, choice: WeightsTransport
) -> list[Wave]:
    found: dict[str, list[Member]] = {}
    num_uses = Counter(device for member in members for device in member.devices)
    for member in members:
        transport = transport_of(member, own_device, choice)
        is_shared = any(num_uses[device] > 1 for device in member.devices)
        if transport == "nccl" and is_shared:
            transport = "gloo"
        found.setdefault(transport, []).append(member)
    return [Wave(transport, tuple(each)) for transport, each in sorted(found.items()) if transport]
