"""Installs a harness: an agent of others with its own interpreter, in one folder.

The folder needs no other program of the machine, so a sandbox or a container can show it.
"""

import contextlib
import fcntl
import json
import logging
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError

logger = logging.getLogger(__name__)

SOCKETS = "sockets"  # Folder of the sockets below that of the harnesses.
WHOLE = "installed"  # File that marks a complete installation.
INSTALL_S = 1800.0  # Limit of an installation.
READABLE = 0o555
NODE_VERSION = "22.22.0"
MACHINE = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
NODE_PACKAGE = f"node-linux-{MACHINE}"
PYTHONS = ("python3.11", "python3.12", "python3.13")  # Versions that a harness may need.
LEFT_OUT = (
    *("test", "site-packages", "dist-packages", "config-*", "__pycache__"),
    *("idlelib", "*tkinter*"),
)
# Libraries that the system of the sandbox has, in the version of its own loader.
SYSTEM_LIBRARY = re.compile(r"(ld-linux.*|lib(c|m|dl|rt|pthread|util|resolv|crypt))\.so\..*")
LINKED = re.compile(r"(?:(\S+) => )?(/\S+) \(0x")
ABOUT = """
import json, os, sys, sysconfig
paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
program = os.path.realpath(sys.executable)
print(json.dumps({"version": sys.version_info[:2], "program": program, "libraries": paths}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessPackage:
    """A package of npm or the Python index with a fixed version.

    Attributes:
        name: name of the harness in `actor.agent`.
        python: lowest and first excluded version of its Python; None: it is one of npm.
        extras: further packages, with their versions.
    """

    name: str
    package: str
    version: str
    python: tuple[tuple[int, int], tuple[int, int]] | None = None
    extras: tuple[str, ...] = ()

    @property
    def is_npm(self) -> bool:
        return self.python is None


def node_of(folder: str) -> str:
    """Return the Node of an installation."""
    return f"{folder}/node_modules/{NODE_PACKAGE}/bin/node"


def python_of(folder: str) -> str:
    """Return the Python of an installation."""
    return f"{folder}/python/run"


def folder_of(package: HarnessPackage, root: Path) -> Path:
    """Return the folder of a harness below the folder of all harnesses."""
    return root / f"{package.name}-{package.version}"


def install(package: HarnessPackage, root: Path) -> Path:
    """Install a harness with its fixed version, unless it is there; return its folder.

    Raises: ConfigError: another user can change the folder, its interpreter is missing, or npm or
        pip failed; the message has its last output.
    """
    root.mkdir(parents=True, exist_ok=True)
    status = root.stat()
    if status.st_uid != os.getuid() or status.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"actor.harnesses={root}: another user can change its programs; name a folder that "
            "only this user can write"
        )
    folder = folder_of(package, root)
    (root / SOCKETS).mkdir(exist_ok=True)
    if (folder / WHOLE).exists():
        return folder
    if package.is_npm and shutil.which("npm") is None:
        raise ConfigError(f"actor.agent={package.name}: npm is missing; install Node 20 or newer")
    with (root / f"{folder.name}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Another actor may install it now.
        if not (folder / WHOLE).exists():
            _install(package, folder)
    return folder


def _install(package: HarnessPackage, folder: Path) -> None:
    """Install a harness into its folder. Raises: ConfigError."""
    logger.info("installing harness=%s version=%s folder=%s", package.name, package.version, folder)
    shutil.rmtree(folder, ignore_errors=True)  # The rest of an interrupted installation.
    folder.mkdir()
    if package.python is None:
        argv = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", f"{folder}"]
        argv += [f"{package.package}@{package.version}", f"{NODE_PACKAGE}@{NODE_VERSION}"]
    else:
        interpreter = find_python(package)
        copy_python(interpreter, folder / "python")
        argv = [interpreter, "-m", "pip", "install", "-q", "--target", f"{folder}/packages"]
        argv += [f"{package.package}=={package.version}", *package.extras]
    _run(argv, package)
    # Sandboxes have another user, which reads the files also with a closed umask here.
    python = folder / "python"
    folders = [path for path in (python, *python.rglob("*")) if path.is_dir()]
    for path in (folder.parent, folder.parent / SOCKETS, folder, *folders):
        path.chmod(path.stat().st_mode | READABLE)
    (folder / WHOLE).write_text(f"{package.package} {package.version}\n", encoding="utf-8")


def _run(argv: list[str], package: HarnessPackage) -> None:
    """Run npm or pip. Raises: ConfigError."""
    wanted = f"{package.package} {package.version}"
    try:
        done = subprocess.run(
            argv, capture_output=True, encoding="utf-8", check=False, timeout=INSTALL_S, umask=0o022
        )
    except subprocess.TimeoutExpired as error:
        text = f"the installation of {wanted} took longer than {INSTALL_S:g} s"
        raise ConfigError(f"actor.agent={package.name}: {text}") from error
    if done.returncode:
        text = f"{done.stdout}{done.stderr}"[-1_000:]
        raise ConfigError(f"actor.agent={package.name}: cannot install {wanted}: {text}")


def find_python(package: HarnessPackage) -> str:
    """Return a Python of the machine that a harness can use. Raises: ConfigError: there is none."""
    assert package.python is not None
    lowest, excluded = package.python
    if lowest <= sys.version_info[:2] < excluded:
        return sys.executable
    names = [name for name in PYTHONS if lowest <= (3, int(name.partition(".")[2])) < excluded]
    for name in names:
        if (path := shutil.which(name)) and _version_of(path) is not None:
            return path
    raise ConfigError(
        f"actor.agent={package.name}: it needs Python {lowest[0]}.{lowest[1]} or newer, below "
        f"{excluded[0]}.{excluded[1]}; no {' or '.join(names)} is on PATH"
    )


def _version_of(path: str) -> list[int] | None:
    """Return the version of a Python, None if it does not start."""
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        return json.loads(subprocess.check_output([path, "-c", ABOUT], timeout=60))["version"]
    return None


def _output(argv: list[str]) -> str:
    return subprocess.run(argv, capture_output=True, encoding="utf-8", check=False).stdout


def copy_python(interpreter: str, target: Path) -> None:
    """Copy a Python without its packages, with the libraries that it loads.

    `target/run` starts it with its own libraries; other programs do not see them.
    """
    about = json.loads(_output([interpreter, "-c", ABOUT]))
    name = "python{}.{}".format(*about["version"])
    shutil.rmtree(target, ignore_errors=True)
    (target / "bin").mkdir(parents=True)
    program = target / "bin" / name
    shutil.copy(about["program"], program)
    for path in dict.fromkeys(about["libraries"]):
        shutil.copytree(
            path,
            target / "lib" / name,
            ignore=shutil.ignore_patterns(*LEFT_OUT),
            dirs_exist_ok=True,
        )
    folder = target / "libraries"
    folder.mkdir()
    loader = ""
    for file in (program, *sorted((target / "lib" / name / "lib-dynload").glob("*.so"))):
        listed = subprocess.run(
            ["ldd", f"{file}"], capture_output=True, encoding="utf-8", check=False
        )
        for short, path in LINKED.findall(listed.stdout):
            if not short:
                loader = path
            elif not SYSTEM_LIBRARY.fullmatch(short) and not (folder / short).exists():
                shutil.copy(path, folder / short)
    start = [loader, "--library-path", f"{folder}"] if loader else []  # None: a static program.
    run = target / "run"
    words = shlex.join([*start, f"{program}"])
    run.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
    run.chmod(0o755)
