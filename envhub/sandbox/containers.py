"""Sandboxes in containers of Docker or Podman."""

import asyncio
import contextlib
import json
import os
import posixpath
import re
import secrets
import shutil
import tarfile
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO

from common.config.envs import SandboxOptions
from envhub.sandbox.bubblewrap import find_python
from envhub.sandbox.interface import (
    MIB,
    SMALL_FOLDERS,
    VARIABLES,
    RefusedBySandbox,
    SandboxFailed,
    SandboxRequest,
    run_apart,
)
from envhub.sandbox.process import AgentSandbox, Launch, agent_argv

UID = 1000
PREFIX = "longstride-sandbox-"
OWN_BYTES = 64 << 20  # Memory of the agent.
OWN_PROCESSES = 8
PROBE_TIMEOUT_S = 30.0
REMOVE_TIMEOUT_S = 30.0
PULL_TIMEOUT_S = 1800.0
HOST_PYTHON = "/.longstride"  # Place of the machine's /usr in a container without a Python.
MAX_TEXT = 500  # Characters of an error of the program.
STARTERS = ("sh", "bash", "tini", "dumb-init", "catatonit")  # They only start another program.
# Options by which a folder in memory belongs to the user of the commands, whatever the image has in
# its place. Podman would otherwise copy the image's files with their owners.
OWNERS = {"docker": f"uid={UID},gid={UID}", "podman": "notmpcopyup,U"}
LIBRARY = re.compile(r"=> (/\S+) \(")
LOADER = re.compile(r"^\s*(/\S+) \(", re.M)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerImage:
    """The settings of an image: its work folder ("" without one) and its variables."""

    name: str
    folder: str
    variables: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Python:
    """The Python of a container's first process.

    Attributes:
        words: its command line in the container.
        mounts: arguments of `docker run` that it needs.
    """

    words: Sequence[str]
    mounts: Sequence[str] = ()


class Containers:
    """Creates sandboxes with `docker run` or `podman run`.

    The work folder is a file system in memory with the image's files, which belong to the user of
    the commands. The rest of the image is read-only.
    """

    def __init__(self, options: SandboxOptions) -> None:
        self._options = options
        self._name = options.backend
        self._program = shutil.which(self._name) or ""
        self._images: dict[str, ContainerImage] = {}
        self._without_python: set[str] = set()
        # Archives of work folders by image and folder. They have no names on the disk.
        self._packed: dict[tuple[str, str], IO[bytes]] = {}

    def problem(self) -> str:
        """Return why no container can start here, with the remedy; "" if one can."""
        if not self._program:
            return (
                f"{self._name} is missing; install it, or use another backend"
                " (envs.sandbox.backend=bwrap)"
            )
        code, output = run_apart(_run([self._program, "info"], PROBE_TIMEOUT_S))
        if code == 0:
            return ""
        return f"{self._name} does not answer: {output}; start its daemon, or use another backend"

    async def create(self, request: SandboxRequest) -> AgentSandbox:
        """Return a new sandbox. Raises: SandboxFailed."""
        if not self._program:
            raise SandboxFailed(f"{self._name} is missing; install it")
        name = request.image or self._options.image
        try:
            image = await self._inspected(name, is_of_task=bool(request.image))
            folder = request.folder or image.folder
            if not folder or folder == "/":
                raise SandboxFailed(
                    "it has no WORKDIR; set environment.workdir in the task's settings"
                )
            archive = await self._packed_folder(name, folder, request.limits.disk_bytes)
            async with contextlib.AsyncExitStack() as undo:
                sandbox = await self._started(request, image, folder)
                undo.push_async_callback(sandbox.delete)
                await sandbox.unpack(archive)
                undo.pop_all()
            return sandbox
        except (SandboxFailed, RefusedBySandbox) as error:
            raise SandboxFailed(f"{self._name} image {name}: {error}") from error

    async def _inspected(self, name: str, *, is_of_task: bool) -> ContainerImage:
        """Return the settings of an image; an absent one is pulled. Raises: SandboxFailed."""
        if name in self._images:
            return self._images[name]
        argv = [self._program, "image", "inspect", "--format", "{{json .Config}}", name]
        code, output = await _run(argv, PROBE_TIMEOUT_S)
        if code != 0:
            code, pulled = await _run([self._program, "pull", "--quiet", name], PULL_TIMEOUT_S)
            if code != 0:
                raise SandboxFailed(f"it is absent and cannot be pulled: {pulled}")
            code, output = await _run(argv, PROBE_TIMEOUT_S)
        try:
            settings = json.loads(output)
            entry = settings.get("Entrypoint") or []
            variables = dict(each.split("=", 1) for each in settings.get("Env") or [])
        except (ValueError, AttributeError) as error:
            raise SandboxFailed(f"it cannot be inspected: {output[-MAX_TEXT:]}") from error
        if is_of_task and entry and posixpath.basename(entry[0]) not in STARTERS:
            raise SandboxFailed(
                f"its ENTRYPOINT {entry} is not performed; use an image without one"
            )
        self._images[name] = ContainerImage(
            name=name, folder=settings.get("WorkingDir") or "", variables=variables
        )
        return self._images[name]

    async def _packed_folder(self, image: str, folder: str, disk_bytes: int) -> IO[bytes]:
        """Return an archive of an image's folder; an empty one if it does not exist.

        Raises: SandboxFailed: its files do not fit into the sandbox's folder.
        """
        key = (image, folder)
        if key not in self._packed:
            archive = tempfile.TemporaryFile()  # noqa: SIM115 - It lives as long as this object.
            weakref.finalize(self, archive.close)
            await self._pack(image, folder, archive)
            self._packed[key] = archive
        size = os.fstat(self._packed[key].fileno()).st_size
        if size > disk_bytes:
            raise SandboxFailed(
                f"its folder {folder} has {size / MIB:.0f} MiB, more than a sandbox's"
                f" {disk_bytes / MIB:.0f}; raise envs.sandbox.disk_mib"
            )
        return self._packed[key]

    async def _pack(self, image: str, folder: str, archive: IO[bytes]) -> None:
        """Write an archive of an image's folder. Raises: SandboxFailed."""
        name = f"{PREFIX}{secrets.token_hex(8)}"
        code, output = await _run(
            [self._program, "create", "--name", name, image, "true"], PROBE_TIMEOUT_S
        )
        if code != 0:
            raise SandboxFailed(f"no container can be made of it: {output}")
        try:
            argv = [self._program, "cp", f"{name}:{folder}", "-"]
            code, output = await _run(argv, PULL_TIMEOUT_S, archive)
        finally:
            await _run([self._program, "rm", "--force", name], REMOVE_TIMEOUT_S)
        if code != 0:
            if not re.search(r"could not (be )?f(i|ou)nd|no such", output, re.IGNORECASE):
                raise SandboxFailed(f"its folder {folder} cannot be read: {output}")
            archive.seek(0)
            archive.truncate()
            tarfile.TarFile(fileobj=archive, mode="w").close()  # An archive without files.

    async def _started(
        self, request: SandboxRequest, image: ContainerImage, folder: str
    ) -> AgentSandbox:
        """Return a sandbox with the Python of the image, or else with this machine's.

        Raises: SandboxFailed: both fail.
        """
        errors: list[str] = []
        if image.name not in self._without_python:
            python = Python(words=[self._options.python or "python3"])
            try:
                return await self._started_with(python, request, image, folder)
            except SandboxFailed as error:
                errors.append(f"with its own Python: {error}")
        try:
            sandbox = await self._started_with(await _host_python(), request, image, folder)
        except SandboxFailed as error:
            errors.append(f"with the Python of this machine: {error}")
            raise SandboxFailed("; ".join(errors)) from error
        self._without_python.add(image.name)
        return sandbox

    async def _started_with(
        self, python: Python, request: SandboxRequest, image: ContainerImage, folder: str
    ) -> AgentSandbox:
        """Return a sandbox without the image's files. Raises: SandboxFailed."""
        name = f"{PREFIX}{secrets.token_hex(8)}"
        arguments = container_arguments(
            request, name, image.name, folder=folder, python=python, program=self._name
        )
        launch = Launch(
            argv=[self._program, *arguments],
            options={},
            remove=partial(_run, [self._program, "rm", "--force", name], REMOVE_TIMEOUT_S),
            variables={**VARIABLES, **image.variables},
        )
        return await AgentSandbox.start(
            launch, folder=folder, timeout_s=self._options.start_timeout_s
        )


def container_arguments(
    request: SandboxRequest, name: str, image: str, *, folder: str, python: Python, program: str
) -> list[str]:
    """Return the arguments of `docker run` for a sandbox.

    Args:
        program: docker or podman.
    """
    limits = request.limits
    small = max(1 << 20, limits.disk_bytes // 4)
    memory = limits.memory_bytes + OWN_BYTES + 3 * limits.disk_bytes
    argv = ["run", "--rm", "--interactive", "--name", name, "--hostname", "sandbox"]
    argv += ["--network", "none", "--ipc", "private", "--read-only"]
    argv += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    argv += ["--user", f"{UID}:{UID}", "--workdir", "/"]
    argv += ["--memory", str(memory), "--memory-swap", str(memory)]
    argv += ["--pids-limit", str(limits.processes + OWN_PROCESSES)]
    argv += ["--shm-size", str(small), *python.mounts]
    for variable, value in VARIABLES.items():
        argv += ["--env", f"{variable}={value}"]
    sizes = dict.fromkeys(SMALL_FOLDERS, small) | {"/tmp": limits.disk_bytes}
    sizes |= {folder: limits.disk_bytes}
    owner = OWNERS[program]
    for path, size in sizes.items():
        argv += ["--tmpfs", f"{path}:rw,exec,nosuid,nodev,size={size},mode=1777,{owner}"]
    start, *words = python.words
    _, *agent = agent_argv(start, limits, folder)
    return [*argv, "--entrypoint", start, image, *words, *agent]


async def _host_python() -> Python:
    """Return this machine's Python with its own libraries, for an image of any distribution.

    Raises: SandboxFailed: it does not lie in /usr.
    """
    program = os.path.realpath(find_python(""))
    # A library that this process preloads, as engines do on a CPU, is none of the program's.
    listing = ["env", "--unset=LD_PRELOAD", "ldd", program]
    code, output = await _run(listing, PROBE_TIMEOUT_S)
    loader = LOADER.search(output)
    if code != 0 or loader is None:
        raise SandboxFailed(f"the libraries of {program} are unknown: {output[-MAX_TEXT:]}")
    paths = [os.path.realpath(each) for each in LIBRARY.findall(output)]
    libraries = list(dict.fromkeys(os.path.dirname(path) for path in paths))
    files = [program, os.path.realpath(loader[1]), *libraries]
    if outside := [path for path in files if not path.startswith("/usr/")]:
        raise SandboxFailed(f"{outside[0]} is not in /usr")
    here, start, *folders = (f"{HOST_PYTHON}{path}" for path in files)
    return Python(
        words=[start, "--library-path", ":".join(folders), here],
        mounts=["--volume", f"/usr:{HOST_PYTHON}/usr:ro"],
    )


async def _run(
    argv: list[str], timeout_s: float, output: IO[bytes] | None = None
) -> tuple[int, str]:
    """Return the exit code of a command, and its output as text.

    Args:
        output: receives the standard output; the text is then that of errors.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=pipe if output is None else output,
        stderr=asyncio.subprocess.STDOUT if output is None else pipe,
    )
    try:
        async with asyncio.timeout(timeout_s):
            text, errors = await process.communicate()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        return 1, f"no answer within {timeout_s:g} s"
    shown = (text if output is None else errors).decode("utf-8", errors="replace").strip()
    code = process.returncode or 0
    return code, shown if code == 0 else shown[-MAX_TEXT:]
