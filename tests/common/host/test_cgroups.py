"""Laws of the limits of control groups, read from trees as containers show them."""

import os
from pathlib import Path

import pytest

from common.host.cgroups import cores_here, cpu_quotas, cpu_used_s, memory_limit, num_cores
from common.host.machine import memory_bytes

MIB = 1 << 20


def write(path: Path, text: str | int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="utf-8")


def make_proc(folder: Path, *, cgroup: str, mounts: list[str]) -> Path:
    """Return the folder of a process whose files `cgroup` and `mountinfo` hold these lines."""
    proc = folder / "proc"
    write(proc / "cgroup", cgroup)
    lines = [f"{30 + i} 23 0:{i} {line}" for i, line in enumerate(mounts)]
    write(proc / "mountinfo", "\n".join(["22 1 0:1 / / rw - ext4 /dev/vda rw", *lines]))
    return proc


@pytest.fixture
def unified(tmp_path: Path) -> Path:
    """A process in /pod/app of a v2 tree below `tmp_path`/fs."""
    mount = f"/ {tmp_path}/fs rw - cgroup2 cgroup2 rw,nsdelegate"
    return make_proc(tmp_path, cgroup="0::/pod/app", mounts=[mount])


@pytest.fixture
def legacy(tmp_path: Path) -> Path:
    """A process of a v1 container, which sees its own group as the root of each mount."""
    own = "/docker/0123"
    names = ("memory", "cpu", "cpuacct")
    mounts = [f"{own} {tmp_path}/fs/{name} ro - cgroup cgroup rw,{name}" for name in names]
    lines = [f"{i}:{name}:{own}" for i, name in enumerate(names, 2)]
    return make_proc(
        tmp_path, cgroup="\n".join([*lines, "1:name=systemd:/x", "0::/"]), mounts=mounts
    )


def test_memory_limit_is_smallest_along_cgroup_path(unified: Path, tmp_path: Path) -> None:
    root = tmp_path / "fs"
    write(root / "pod/app/memory.max", "max")
    assert memory_limit(unified) is None
    write(root / "pod/memory.max", 2048 * MIB)
    write(root / "pod/memory.current", 1500 * MIB)
    write(root / "pod/memory.stat", f"file {900 * MIB}\ninactive_file {600 * MIB}")
    assert memory_limit(unified) == (2048 * MIB, (2048 - 900) * MIB)
    write(root / "pod/app/memory.max", 1024 * MIB)
    write(root / "pod/app/memory.current", 24 * MIB)
    assert memory_limit(unified) == (1024 * MIB, 1000 * MIB)


def test_cgroup_v1_memory_limit_includes_parent_groups(legacy: Path, tmp_path: Path) -> None:
    memory = tmp_path / "fs" / "memory"
    write(memory / "memory.limit_in_bytes", 9223372036854771712)  # No limit.
    write(memory / "memory.usage_in_bytes", 700 * MIB)
    write(memory / "memory.stat", "hierarchical_memory_limit 9223372036854771712")
    assert memory_limit(legacy) is None
    stat = f"hierarchical_memory_limit {4096 * MIB}\ntotal_inactive_file {100 * MIB}"
    write(memory / "memory.stat", stat)
    assert memory_limit(legacy) == (4096 * MIB, (4096 - 600) * MIB)
    write(memory / "memory.limit_in_bytes", 2048 * MIB)
    assert memory_limit(legacy) == (2048 * MIB, (2048 - 600) * MIB)


def test_memory_is_minimum_of_machine_and_container(unified: Path, tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    write(meminfo, "MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 1048576 kB")
    assert memory_bytes(unified, meminfo) == (8192 * MIB, 1024 * MIB)
    write(tmp_path / "fs/pod/app/memory.max", 2048 * MIB)
    write(tmp_path / "fs/pod/app/memory.current", 48 * MIB)
    assert memory_bytes(unified, meminfo) == (2048 * MIB, 1024 * MIB)  # The machine has less left.
    write(tmp_path / "fs/pod/app/memory.max", 16384 * MIB)
    assert memory_bytes(unified, meminfo) == (8192 * MIB, 1024 * MIB)


def test_cpu_quota_is_smallest_along_cgroup_path(unified: Path, tmp_path: Path) -> None:
    all_cores = len(os.sched_getaffinity(0))
    write(tmp_path / "fs/pod/app/cpu.max", "max 100000")
    assert cores_here(unified) == all_cores
    write(tmp_path / "fs/pod/cpu.max", "50000 100000")
    assert (cores_here(unified), num_cores(unified)) == (0.5, 1)
    write(tmp_path / "fs/pod/app/cpu.max", "20000 100000")
    assert cores_here(unified) == 0.2


def test_cgroup_v1_quota_is_read_with_usage(legacy: Path, tmp_path: Path) -> None:
    cpu = tmp_path / "fs" / "cpu"
    write(cpu / "cpu.cfs_period_us", 100000)
    write(cpu / "cpu.cfs_quota_us", -1)
    assert list(cpu_quotas(legacy)) == []
    write(cpu / "cpu.cfs_quota_us", 75000)
    write(tmp_path / "fs/cpuacct/cpuacct.usage", 7_250_000_000)
    ((group, cores),) = cpu_quotas(legacy)
    assert (cores, cpu_used_s(group, legacy)) == (0.75, 7.25)


def test_mount_path_with_a_space_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "my fs"
    point = str(folder).replace(" ", "\\040")
    proc = make_proc(tmp_path, cgroup="0::/../other", mounts=[f"/ {point} rw - cgroup2 cgroup2 rw"])
    write(folder / "memory.max", 512 * MIB)
    assert memory_limit(proc) == (512 * MIB, 512 * MIB)


def test_machine_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None
    assert cores_here(tmp_path) == len(os.sched_getaffinity(0))
