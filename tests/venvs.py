"""Environments of their own for packages that the project itself does not install."""

import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

UNREACHABLE = ("ConnectionError", "No matching distribution found for uv", "Failed to fetch")
CLIENTS = ("openai==3.52.0", "anthropic==2.12.0")  # Several tests use these clients.
OURS = ("accelerate", "numpy", "safetensors", "tokenizers", "torch", "transformers")  # are large
INSTALL_S = 280.0


def python_with(*requirements: str, sees_ours: bool = False) -> str:
    """Return the interpreter of an environment that holds these packages; it is made once.

    It lies in a folder of the system's temporary files, named by what it holds. With `sees_ours`
    it also finds what the project's environment has. Skips the test if the index has no answer.
    """
    wanted = [*sorted(requirements), str(sees_ours), sys.version, sys.prefix]
    mark = hashlib.sha256("\n".join(wanted).encode()).hexdigest()[:16]
    root = Path(tempfile.gettempdir()) / f"longstride-venvs-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    folder, python = root / mark, root / mark / "bin" / "python"
    with (root / f"{mark}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "whole").exists():
            _make(folder, python, requirements, sees_ours=sees_ours)
            (folder / "whole").write_text("\n".join(wanted), encoding="utf-8")
    return str(python)


def _make(folder: Path, python: Path, requirements: tuple[str, ...], *, sees_ours: bool) -> None:
    uv = _uv(folder.parent)
    subprocess.run([uv, "venv", "-q", "--clear", "--python", sys.executable, folder], check=True)
    options: list[str] = []
    if sees_ours:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        own = folder / "lib" / version / "site-packages"
        (own / "ours.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
        (folder / "ours.txt").write_text("\n".join(OURS), encoding="utf-8")
        options = ["--excludes", str(folder / "ours.txt")]
    # Without bytecode, each start of a package would compile it again.
    install = [uv, "pip", "install", "-q", "--python", str(python), "--compile-bytecode"]
    _install([*install, *options, *requirements])


def _uv(root: Path) -> str:
    """Return the program uv, which resolves packages in seconds. It is installed once."""
    program = root / "uv" / "bin" / "uv"
    with (root / "uv.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            _install([*pip, "--upgrade", "--target", str(root / "uv"), "uv"])
    return str(program)


def _install(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=INSTALL_S)
    if done.returncode and any(mark in done.stderr for mark in UNREACHABLE):
        pytest.skip(f"the package index does not answer: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr[-3000:]
