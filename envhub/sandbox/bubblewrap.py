"""Sandboxes of bubblewrap: namespaces of Linux without a daemon and without root."""

import os
import shutil
from pathlib import Path
from typing import Any

from common.config.envs import SandboxOptions
from envhub.sandbox.cgroup import Cgroup
from envhub.sandbox.interface import (
    HOME,
    LOGS,
    PATH,
    SMALL_FOLDERS,
    SOLUTION,
    TESTS,
    VARIABLES,
    RefusedBySandbox,
    SandboxFailed,
    SandboxRequest,
    run_apart,
    work_folder,
)
from envhub.sandbox.process import AgentSandbox, Launch, agent_argv, agent_text

NAME = "bwrap"
UID = 1000  # User and group inside the sandbox.
LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")  # Links into /usr on most systems.
# Files of the system's configuration that programs need. None of them holds a secret.
ETC = (
    *("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types"),
    *("bash.bashrc", "debian_version", "os-release", "profile", "services", "protocols"),
)
ACCOUNTS = {
    "/etc/passwd": f"root:x:0:0:root:/root:/bin/sh\nagent:x:{UID}:{UID}:agent:{HOME}:/bin/sh\n",
    "/etc/group": f"root:x:0:\nagent:x:{UID}:\n",
    "/etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
AGENT_PATH = "/run/agent.py"
# Folders that cannot be the work folder.
SYSTEM = (
    *("usr", *LINKS, "etc", "proc", "dev", "sys", "run"),
    *(folder.split("/")[1] for folder in (TESTS, LOGS, SOLUTION, "/tmp")),
)
INSTALL = "apt-get install bubblewrap"
NAMESPACES = (
    "allow user namespaces (sysctl user.max_user_namespaces=15000, and where the kernel has them"
    " kernel.unprivileged_userns_clone=1 and kernel.apparmor_restrict_unprivileged_userns=0)"
)
CONTAINER = "start the hub outside of a container, or the container with --security-opt"
REMEDIES = {  # Parts of bubblewrap's errors, with the remedy.
    "No permissions to creat": NAMESPACES,
    "Creating new namespace failed": NAMESPACES,
    "setting up uid map": NAMESPACES,
    "Operation not permitted": f"{CONTAINER} seccomp=unconfined",
    "mount proc": f"{CONTAINER} systempaths=unconfined",
    "nknown option": "install bubblewrap 0.8 or newer",
}
ELSE = "use envs.sandbox.backend=docker, podman or remote"


class Bubblewrap:
    """Creates sandboxes with `bwrap`. A hub of root starts them as an unprivileged user."""

    def __init__(self, options: SandboxOptions) -> None:
        self._options = options
        self._program = shutil.which(NAME) or ""

    def problem(self) -> str:
        """Return why no sandbox can start here, with the remedy; "" if one can."""
        try:
            run_apart(self._try())
        except SandboxFailed as error:
            return str(error)
        return ""

    async def _try(self) -> None:
        """Create a sandbox and delete it."""
        sandbox = await self.create(SandboxRequest())
        await sandbox.delete()

    async def create(self, request: SandboxRequest) -> AgentSandbox:
        """Return a new sandbox. Raises: SandboxFailed, with the remedy; RefusedBySandbox."""
        if not self._program:
            raise SandboxFailed(f"bubblewrap ({NAME}) is missing; run {INSTALL}, or {ELSE}")
        if request.image or not request.folder:
            raise SandboxFailed(f"bubblewrap cannot run the image {request.image}; {ELSE}")
        check_work_folder(request.folder)
        python = find_python(self._options.python)
        files = {**ACCOUNTS, AGENT_PATH: agent_text()}
        descriptors = [_descriptor(text.encode()) for text in files.values()]
        argv = [self._program, *self._arguments(request, descriptors)]
        argv += ["--", *agent_argv(python, request.limits, request.folder, AGENT_PATH)]
        memory = Cgroup.create(request.limits) if self._options.cgroups else None
        options: dict[str, Any] = {"pass_fds": descriptors, "cwd": "/", **_user(self._options.uid)}
        try:
            return await AgentSandbox.start(
                Launch(argv=argv, options=options, memory=memory),
                folder=request.folder,
                timeout_s=self._options.start_timeout_s,
            )
        except SandboxFailed as error:
            raise SandboxFailed(f"bubblewrap: {error}; {remedy_of(str(error))}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _arguments(self, request: SandboxRequest, descriptors: list[int]) -> list[str]:
        """Return the arguments of bwrap for a sandbox."""
        limits = request.limits
        argv = ["--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"]
        argv += ["--uid", str(UID), "--gid", str(UID), "--hostname", "sandbox"]
        argv += ["--new-session", "--die-with-parent", "--as-pid-1", "--clearenv"]
        for name, value in VARIABLES.items():
            argv += ["--setenv", name, value]
        argv += _system(self._options.mounts)
        for descriptor, path in zip(descriptors, [*ACCOUNTS, AGENT_PATH], strict=True):
            argv += ["--ro-bind-data", str(descriptor), path]
        argv += ["--proc", "/proc", "--dev", "/dev"]
        small = max(1 << 20, limits.disk_bytes // 4)
        argv += ["--size", str(small), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
        sizes = dict.fromkeys(SMALL_FOLDERS, small) | {"/tmp": limits.disk_bytes}
        sizes |= {request.folder: limits.disk_bytes}
        for folder in sorted(sizes):  # A folder that contains another one is mounted before it.
            argv += ["--size", str(sizes[folder]), "--tmpfs", folder]
        return [*argv, "--remount-ro", "/", "--chdir", "/"]


def check_work_folder(folder: str) -> None:
    """Raise RefusedBySandbox if a new file system cannot be mounted at a folder."""
    if work_folder(folder) != folder or folder.split("/")[1] in SYSTEM:
        raise RefusedBySandbox(f"the work folder {folder[:80]!a} is a folder of the system")


def _system(mounts: list[str]) -> list[str]:
    """Return the arguments that show the system's programs, read-only."""
    argv = ["--ro-bind", "/usr", "/usr"]
    for name in LINKS:
        path = Path("/", name)
        if path.is_symlink():
            argv += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            argv += ["--ro-bind", str(path), str(path)]
    for name in ETC:
        argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for mount in mounts:
        source, _, target = mount.partition(":")
        argv += ["--ro-bind", source, target or source]
    return argv


def _user(uid: int) -> dict[str, Any]:
    """Return the options that start a process of root as an unprivileged user.

    The kernel does not limit the number of root's processes.
    """
    if os.geteuid() != 0:
        return {}
    return {"user": uid, "group": uid, "extra_groups": []}


def _descriptor(content: bytes) -> int:
    """Return a descriptor from which a child process reads the content."""
    descriptor = os.memfd_create("sandbox")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def find_python(configured: str) -> str:
    """Return the Python of the sandbox. Raises: SandboxFailed: none is in the system's folders."""
    if configured:
        return configured
    candidates = (shutil.which("python3", path=folder) for folder in PATH.split(":"))
    usable = (path for path in candidates if path and Path(path).resolve().is_relative_to("/usr"))
    python = next(usable, None)
    if python is None:
        raise SandboxFailed(
            f"no python3 in {PATH}; run apt-get install python3-minimal, or set"
            " envs.sandbox.python and envs.sandbox.mounts"
        )
    return python


def remedy_of(text: str) -> str:
    """Return the remedy for an error of bubblewrap."""
    specific = next((remedy for part, remedy in REMEDIES.items() if part in text), "")
    return f"{specific}, or {ELSE}" if specific else ELSE
