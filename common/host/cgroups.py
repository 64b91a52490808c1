"""Limits of this process's control groups: memory and processor time, in versions 1 and 2.

Every group on the path from the process's own group to the visible root can set a limit, and the
smallest limit applies. Groups above a container's visible root are not counted. The exception is
the memory limit of v1, which the kernel also reports for the whole path.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

PROC = Path("/proc/self")
NO_LIMIT_BYTES = 1 << 60  # v1 reports at least this number if there is no limit.
# Version -> (file of the memory limit, file of the used memory, key of the droppable cache).
_FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlGroup:
    """One control group of this process, as a folder."""

    folder: Path
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One mounted hierarchy of control groups."""

    version: int
    root: PurePosixPath  # The group that is mounted, as a path in its hierarchy.
    point: Path
    options: frozenset[str]  # They include the controllers of v1.


def groups_of(controller: str, proc: Path = PROC) -> Iterator[ControlGroup]:
    """Yield the groups of a controller that this process is in, its own first.

    Args:
        controller: such as "memory", "cpu" or "cpuacct".
        proc: the folder of the process with the files `cgroup` and `mountinfo`.
    """
    paths = _own_paths(proc)
    for mount in _mounts(proc):
        name = "" if mount.version == 2 else controller
        if name not in paths or (name and controller not in mount.options):
            continue
        folder = mount.point / _below(paths[name], mount.root)
        for folder_above in (folder, *folder.parents):
            if not folder_above.is_relative_to(mount.point):
                break
            yield ControlGroup(folder=folder_above, version=mount.version)


def memory_limit(proc: Path = PROC) -> tuple[int, int] | None:
    """Return the smallest memory limit and the smallest remaining memory, in bytes.

    Page cache that the kernel drops on demand counts as remaining. None means no limit.
    """
    limits: list[int] = []
    left: list[int] = []
    for group in groups_of("memory", proc):
        stat = _numbers(group.folder / "memory.stat")
        limit = _memory_limit_of(group, stat)
        if limit is None:
            continue
        limits.append(limit)
        used = _used_bytes(group, stat)
        if used is not None:
            left.append(max(0, limit - used))
    return (min(limits), min(left, default=min(limits))) if limits else None


def _memory_limit_of(group: ControlGroup, stat: Mapping[str, int]) -> int | None:
    """Return a group's own memory limit in bytes; None: it has none."""
    name, _, _ = _FILES[group.version]
    limits = [_number(group.folder / name), stat.get("hierarchical_memory_limit")]
    return min(
        (each for each in limits if each is not None and each < NO_LIMIT_BYTES), default=None
    )


def _used_bytes(group: ControlGroup, stat: Mapping[str, int]) -> int | None:
    """Return the memory of a group without its cache of files; None if not reported."""
    _, name, cache = _FILES[group.version]
    used = _number(group.folder / name)
    return None if used is None else used - stat.get(cache, 0)


def cpu_quotas(proc: Path = PROC) -> Iterator[tuple[ControlGroup, float]]:
    """Yield the groups of this process that have a quota of processor time, with their cores."""
    for group in groups_of("cpu", proc):
        with suppress(OSError, ValueError):  # "max": there is no quota.
            if group.version == 2:
                quota, period = (int(each) for each in _text(group.folder / "cpu.max").split())
            else:
                quota = int(_text(group.folder / "cpu.cfs_quota_us"))
                period = int(_text(group.folder / "cpu.cfs_period_us"))
            if quota > 0 and period > 0:
                yield group, quota / period


def cpu_used_s(group: ControlGroup, proc: Path = PROC) -> float | None:
    """Return the processor seconds that a group with a quota has used, None if not reported."""
    if group.version == 2:
        used_us = _numbers(group.folder / "cpu.stat").get("usage_usec")
        return None if used_us is None else used_us / 1e6
    depths = [each.folder for each in groups_of("cpu", proc) if each.version == 1]
    usage_folders = [each.folder for each in groups_of("cpuacct", proc) if each.version == 1]
    with suppress(ValueError, IndexError):
        # Container runtimes give both hierarchies the same tree.
        used_ns = _number(usage_folders[depths.index(group.folder)] / "cpuacct.usage")
        return None if used_ns is None else used_ns / 1e9
    return None


def _own_paths(proc: Path) -> dict[str, PurePosixPath]:
    """Return the path of this process in each hierarchy, by controller; v2 has the name ""."""
    paths: dict[str, PurePosixPath] = {}
    with suppress(OSError):
        for line in _text(proc / "cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            paths |= dict.fromkeys(controllers.split(","), PurePosixPath(path))
    return paths


def _mounts(proc: Path) -> Iterator[Mount]:
    """Yield the mounted hierarchies of control groups."""
    with suppress(OSError):
        for line in _text(proc / "mountinfo").splitlines():
            before, _, after = line.partition(" - ")
            kind, _, options = [*after.split(" "), "", "", ""][:3]
            if kind not in ("cgroup", "cgroup2"):
                continue
            root, point = (_unescaped(each) for each in before.split(" ")[3:5])
            yield Mount(
                version=2 if kind == "cgroup2" else 1,
                root=PurePosixPath(root),
                point=Path(point),
                options=frozenset(options.split(",")),
            )


def _unescaped(path: str) -> str:
    """Return a path of mountinfo with its escapes decoded; a space is written as \\040 there."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def _below(path: PurePosixPath, root: PurePosixPath) -> PurePosixPath:
    """Return a group's path below the mounted group; "." for a group outside of it."""
    is_below = path.is_relative_to(root) and ".." not in path.parts
    return path.relative_to(root) if is_below else PurePosixPath(".")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _number(path: Path) -> int | None:
    """Return a file's number; None if it has none, such as "max", or is missing."""
    with suppress(OSError, ValueError):
        return int(_text(path))
    return None


def _numbers(path: Path) -> dict[str, int]:
    """Return the lines "name number" of a file; {} if it is missing."""
    numbers: dict[str, int] = {}
    with suppress(OSError):
        for line in _text(path).splitlines():
            name, _, number = line.partition(" ")
            if number.isdigit():
                numbers[name] = int(number)
    return numbers


def cores_here(proc: Path = PROC) -> float:
    """Return the usable cores: the smaller of the CPU affinity and the container's quota."""
    num = float(len(os.sched_getaffinity(0)))
    return min((num, *(quota for _, quota in cpu_quotas(proc))))


def num_cores(proc: Path = PROC) -> int:
    """Return the usable whole cores, at least 1. It is the number of threads to start."""
    return max(1, int(cores_here(proc)))
