"""Laws of this machine: the GPUs that NVIDIA's driver lists, and the request for AMX tiles."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.host.machine import (
    ARCH_REQ_XCOMP_PERM,
    XFEATURE_XTILEDATA,
    TilePermission,
    cpu_flags,
    request_tiles,
)
from common.repository import ROOT

SHOW = """
from common.host.machine import driver_gpus
for whole in driver_gpus({timeout_s}):
    print(*((gpu.uuid, gpu.name, gpu.memory_bytes >> 20) for gpu in (whole.gpu, *whole.slices)))
"""


@pytest.fixture
def cpu_with_tiles(tmp_path: Path) -> Path:
    path = tmp_path / "cpuinfo"
    path.write_text(
        "processor\t: 0\nflags\t\t: fpu avx512f amx_bf16 amx_tile amx_int8\n", encoding="utf-8"
    )
    return path


def test_cpu_without_tiles_skips_the_kernel_request(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(
        "processor\t: 0\nflags\t\t: fpu avx2\nmodel name\t: amx_tile\n", encoding="utf-8"
    )
    asked: list[tuple[int, int]] = []

    def kernel(code: int, argument: int) -> int:
        asked.append((code, argument))
        return 0

    assert request_tiles(path, kernel) is TilePermission.NOT_NEEDED
    assert request_tiles(tmp_path / "no such file", kernel) is TilePermission.NOT_NEEDED
    assert asked == []


@pytest.mark.parametrize(
    ("answer", "permission"), [(0, TilePermission.GRANTED), (-1, TilePermission.REFUSED)]
)
def test_kernel_answer_is_returned(
    cpu_with_tiles: Path, answer: int, permission: TilePermission
) -> None:
    asked: list[tuple[int, int]] = []

    def kernel(code: int, argument: int) -> int:
        asked.append((code, argument))
        return answer

    assert request_tiles(cpu_with_tiles, kernel) is permission
    assert asked == [(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)]


def test_kernel_grants_tiles_exactly_where_available(cpu_with_tiles: Path) -> None:
    expected = TilePermission.GRANTED if "amx_tile" in cpu_flags() else TilePermission.REFUSED
    assert request_tiles(cpu_with_tiles) is expected


def with_driver(timeout_s: float, **env: str) -> list[str]:
    """Return the listed GPUs of a process whose driver is the stand-in, a line for each GPU."""
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'tests/fake_driver'}:{ROOT}"} | env
    command = [sys.executable, "-c", SHOW.format(timeout_s=timeout_s)]
    done = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_gpus_and_slices_are_listed_with_their_memory() -> None:
    slices = [
        ["MIG-1", "NVIDIA H100 MIG 1g.10gb", 9856],
        ["MIG-2", "NVIDIA H100 MIG 3g.40gb", None],
    ]
    listed = [["GPU-1", "NVIDIA H100", 81559, slices], ["GPU-2", "NVIDIA GB10", None, []]]
    assert with_driver(20, GPUS=json.dumps(listed)) == [
        "('GPU-1', 'NVIDIA H100', 81559) ('MIG-1', 'NVIDIA H100 MIG 1g.10gb', 9856)"
        " ('MIG-2', 'NVIDIA H100 MIG 3g.40gb', 0)",
        "('GPU-2', 'NVIDIA GB10', 0)",
    ]


def test_driver_that_blocks_lists_no_gpu_and_process_ends() -> None:
    assert with_driver(0.1) == []
