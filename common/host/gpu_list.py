"""NVIDIA GPUs and their slices (MIG), from the output of nvidia-smi, in CUDA's order."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.errors import ConfigError

GIB = 1 << 30
_SLICE = re.compile(
    r"\s+MIG ((?:\d+c\.)?\d+g\.(\d+)gb\S*)\s+Device\s+(\d+):\s+\(UUID: (MIG-[^)]+)\)"
)
_WHOLE = re.compile(r"GPU \d+: (.*) \(UUID: (GPU-[^)]+)\)")
_OLD_SLICE = re.compile(r"MIG-(GPU-[^/]+)/(\d+)/(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU, or one slice of it."""

    name: str
    memory_bytes: int  # 0 if unknown.
    uuid: str = ""  # "GPU-..." or "MIG-...", an entry for CUDA_VISIBLE_DEVICES.

    @property
    def is_slice(self) -> bool:
        """Whether it is a part of a GPU. CUDA shows at most one slice to a process."""
        return self.uuid.startswith("MIG-")


@dataclass(frozen=True, slots=True, kw_only=True)
class _GpuEntry:
    """A whole GPU and its slices."""

    gpu: Gpu
    slices: list[Gpu] = field(default_factory=list[Gpu])

    @property
    def shown(self) -> list[Gpu]:
        """The usable GPUs: the slices, or the whole GPU if it is not divided."""
        return self.slices or [self.gpu]


def shown_gpus(
    lines: Sequence[str], visible: str | None, order: str = "PCI_BUS_ID"
) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA would show, in its order.

    Args:
        lines: "uuid, name, MiB" for each GPU in the order of the bus; with slices, the output of
            `nvidia-smi -L` follows.
        visible: comma-separated numbers, uuid prefixes or slice names; None shows all GPUs. As in
            CUDA, entries after an invalid entry are ignored.
        order: the value of CUDA_DEVICE_ORDER, which defines CUDA's numbers.

    Raises: ConfigError: `visible` contains numbers, and different GPUs are ordered by speed.
    """
    listed = _read(lines)
    if visible is None:
        return tuple(gpu for each in listed for gpu in each.shown)
    entries = [part.strip() for part in visible.split(",")]
    _check_order(listed, entries, order)
    shown: list[Gpu] = []
    for entry in entries:
        named = _named(entry, listed)
        if named is None:
            break
        shown.append(named)
    return tuple(shown)


def _check_order(listed: Sequence[_GpuEntry], entries: Sequence[str], order: str) -> None:
    """Check that GPU numbers are unambiguous. Raises: ConfigError."""
    kinds = {each.gpu.name for each in listed}
    numbers = [entry for entry in entries if entry.isdigit() and int(entry) < len(listed)]
    if order == "FASTEST_FIRST" and len(kinds) > 1 and numbers:
        raise ConfigError(
            f"CUDA_DEVICE_ORDER=FASTEST_FIRST: the GPUs differ ({', '.join(sorted(kinds))}), so the"
            f" numbers in CUDA_VISIBLE_DEVICES={','.join(entries)} are ambiguous. Unset"
            " CUDA_DEVICE_ORDER to use the numbers of nvidia-smi, or give the uuids of the GPUs"
        )


def _named(entry: str, listed: Sequence[_GpuEntry]) -> Gpu | None:
    """Return the GPU of one entry of CUDA_VISIBLE_DEVICES; None for an invalid entry."""
    if entry.isdigit():
        number = int(entry)
        return listed[number].shown[0] if number < len(listed) else None
    if entry.startswith("MIG-"):
        return _named_slice(entry, listed)
    if not entry.startswith("GPU-"):
        return None
    matching = [each.shown[0] for each in listed if each.gpu.uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def _named_slice(entry: str, listed: Sequence[_GpuEntry]) -> Gpu | None:
    """Return the slice with a name. Its size is 0 if nvidia-smi does not list the slice."""
    slices = [gpu for each in listed for gpu in each.slices]
    matching = [gpu for gpu in slices if gpu.uuid.startswith(entry)]
    if matching:
        return matching[0] if len(matching) == 1 else None
    old = _OLD_SLICE.fullmatch(entry)
    if old is None:  # A container may list one slice without the others.
        return None if slices else Gpu(name="slice of a GPU", memory_bytes=0, uuid=entry)
    wholes = [each for each in listed if each.gpu.uuid.startswith(old[1])]
    if len(wholes) != 1:
        return None
    sizes = {gpu.memory_bytes for gpu in wholes[0].slices}
    size = sizes.pop() if len(sizes) == 1 else 0
    return Gpu(name=f"slice of {wholes[0].gpu.name}", memory_bytes=size, uuid=entry)


def _read(lines: Sequence[str]) -> list[_GpuEntry]:
    """Return the whole GPUs in nvidia-smi's lines, each with its slices."""
    wholes: dict[str, _GpuEntry] = {}
    whole_uuid = ""  # The uuid of the whole GPU whose slices follow.
    for line in lines:
        if match := _SLICE.match(line):
            if whole_uuid in wholes:
                wholes[whole_uuid].slices.append(_slice(match, wholes[whole_uuid].gpu))
        elif match := _WHOLE.match(line):
            whole_uuid = match[2]
        elif gpu := _whole(line):
            wholes[gpu.uuid] = _GpuEntry(gpu=gpu)
    return list(wholes.values())


def _slice(match: re.Match[str], whole: Gpu) -> Gpu:
    """Return a slice of a whole GPU from its line."""
    return Gpu(name=f"{whole.name} MIG {match[1]}", memory_bytes=int(match[2]) * GIB, uuid=match[4])


def _whole(line: str) -> Gpu | None:
    """Return the GPU of a line "uuid, name, MiB"; None for any other line."""
    uuid, comma, rest = line.partition(",")
    name, _, mib = (part.strip() for part in rest.rpartition(","))
    if not comma:
        return None
    return Gpu(name=name, memory_bytes=int(mib) << 20 if mib.isdigit() else 0, uuid=uuid.strip())
