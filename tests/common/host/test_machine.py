"""Laws of this machine: the request for AMX tiles."""

from pathlib import Path

import pytest

from common.host.machine import (
    ARCH_REQ_XCOMP_PERM,
    XFEATURE_XTILEDATA,
    TilePermission,
    cpu_flags,
    request_tiles,
)


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
