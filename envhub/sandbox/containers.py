"""Sandboxes in containers of Docker or Podman. They need no program in the image but a shell."""

import asyncio
import contextlib
import functools
import io
import logging
import os
import posixpath
import re
import secrets
import stat
import tarfile
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from common.config.envs import SandboxOptions
from envhub.sandbox.agent import SPARE_FILES, Tail
from envhub.sandbox.engine import (
    LABEL,
    PREFIX,
    ContainerEngine,
    ContainerImage,
    Images,
    end,
    folder_of_call,
)
from envhub.sandbox.interface import (
    MIB,
    SMALL_FOLDERS,
    VARIABLES,
    AllowedHosts,
    CommandEnd,
    CommandResult,
    ContainerSpec,
    Healthcheck,
    RefusedBySandbox,
    SandboxFailed,
    SandboxFile,
    SandboxRequest,
    ServiceState,
    check_command,
    check_words,
    run_apart,
)
from envhub.sandbox.network import Gateway

logger = logging.getLogger(__name__)

UID = 1000
ROOT = "0"
TRUNCATED = b"\n[%d bytes were left out here]\n"
REMOVE_TIMEOUT_S = 120.0
COPY_TIMEOUT_S = 600.0
GRACE_S = 120.0  # Seconds beyond the time limit of a command in which the engine must start it.
CHUNK_BYTES = 1 << 16
WATCH_S = 1.0  # Interval between two measurements of the written files.
LATE_BYTES = 1 << 20  # A larger difference of size and blocks is measured.
MAX_PARTS = 10_000  # Parts of a file with holes; the rest counts as data.
HEALTH_S = 0.2
SHM_BYTES = 64 * MIB
CPU_SHARES = "256"  # A quarter of the default: the processes of the hub have priority.
MAX_LOG = "1m"  # Size of the kept output of a container's own program.
LOGS_DRIVERS = {"docker": "json-file", "podman": "k8s-file"}
# Waits as long as the container lives. It replaces the image's CMD, as a harness does.
KEEP_ALIVE = ("sh", "-c", "exec sleep infinity")
# A container without memory loses the processes of its commands first, and then its first one.
LOSES_FIRST = "{ echo 500 > /proc/self/oom_score_adj; } 2>/dev/null"
# The first output of a command is a mark: without it, the engine did not start the command. A
# second mark alone means that its folder cannot be entered.
STARTER = LOSES_FIRST + (
    '; printf %s "$1"; cd "$2" 2>/dev/null || { printf %s "$1"; exit 125; }; shift 2; exec "$@"'
)
# A pipe's input is closed without a byte, so the file is empty.
WRITER = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1" && chmod "$2" "$1"'
IS_REGULAR = '[ -e "$1" ] || exit 3; [ -f "$1" ] || exit 4; '
READER = f'{IS_REGULAR}head -c "$2" "$1" || exit 5'
ABSENT, IRREGULAR, UNREADABLE = 3, 4, 5
READ_CODES = (0, ABSENT, IRREGULAR, UNREADABLE)
# Removes the containers and volumes when the hub closes its input, or when the hub is killed.
GUARD = """
trap '' INT TERM HUP
read -r _
engine=$1 num=$2; shift 2
gone() { "$engine" rm --force --volumes "$1" || ! "$engine" container inspect "$1"; }
removed() { gone "$1" || { sleep 1; gone "$1"; }; }
n=0; for name; do [ $n -lt $num ] && removed "$name"; n=$((n + 1)); done
[ $# -gt $num ] && { shift "$num"; "$engine" volume rm --force "$@"; }
"""
# Options by which a folder in memory belongs to the user of the commands.
OWNERS = {"docker": f"uid={UID},gid={UID}", "podman": "notmpcopyup,U"}


class Containers:
    """Creates sandboxes with `docker` or `podman`.

    A container of a task is as its author made it: its files, user, WORKDIR, ENV and ENTRYPOINT.
    Without one, the configured image runs read-only and without rights.
    """

    def __init__(self, options: SandboxOptions) -> None:
        self._options = options
        self._engine = ContainerEngine(options.backend)
        self._images = Images(self._engine, options.containers)
        self._has_pruned = False

    def problem(self) -> str:
        """Return why no container can start here, with the remedy; "" if one can."""
        name = self._engine.name
        if not self._engine.program:
            return f"{name} is missing; install it, or set envs.sandbox.backend=bwrap"
        reply = run_apart(self._engine.call("info"))
        if reply.code == 0:
            return ""
        return f"{name} does not answer: {reply.error}; start its daemon, or use another backend"

    async def create(self, request: SandboxRequest) -> "ContainerSandbox":
        """Return a new sandbox. Raises: SandboxFailed."""
        if not self._engine.program:
            raise SandboxFailed(f"{self._engine.name} is missing; install it")
        if not self._has_pruned:
            self._has_pruned = True
            await prune(self._engine)
        spec = request.container
        if spec is None and request.image:
            spec = ContainerSpec(image=request.image)
        is_closed = spec is None
        main = spec or ContainerSpec(image=self._options.image, user=f"{UID}:{UID}")
        images = {each.name: await self._images.get(each) for each in (main, *request.services)}
        group = ContainerGroup(
            self._engine,
            request,
            main=main,
            images=images,
            is_closed=is_closed,
            cpus=self._options.containers.cpus,
            mounts=self._options.mounts,
        )
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(group.remove)
            try:
                async with asyncio.timeout(self._options.start_timeout_s):
                    sandbox = await group.start()
            except TimeoutError as error:
                raise SandboxFailed(
                    f"{self._engine.name}: the containers of {main.image or 'the task'} did not"
                    f" start within {self._options.start_timeout_s:g} s"
                    " (envs.sandbox.start_timeout_s)"
                ) from error
            undo.pop_all()
        return sandbox


async def prune(engine: ContainerEngine) -> None:
    """Remove the containers and volumes of processes that have ended."""
    for kind, labels in (("container", ".Config.Labels"), ("volume", ".Labels")):
        words = ("--all",) if kind == "container" else ()
        listed = await engine.call(kind, "ls", *words, "--quiet", "--filter", f"label={LABEL}")
        for name in listed.text.split():
            line = f'{{{{index {labels} "{LABEL}"}}}}'
            owner = await engine.call(kind, "inspect", "--format", line, name)
            if owner.code == 0 and not is_alive(owner.text):
                logger.info("removing %s=%s of an ended process", kind, name)
                await engine.call(kind, "rm", "--force", name, timeout_s=REMOVE_TIMEOUT_S)


def owner_text() -> str:
    """Return the value of the label of this process's containers."""
    return f"{psutil.boot_time():.0f}.{os.getpid()}.{psutil.Process().create_time():.2f}"


def is_alive(owner: str) -> bool:
    """Return whether the process of a label's value runs. One of another machine counts as such."""
    match = re.fullmatch(r"(\d+)\.(\d+)\.([\d.]+)", owner)
    if match is None or abs(float(match[1]) - psutil.boot_time()) > 2.0:
        return match is not None and float(match[1]) > psutil.boot_time()
    with contextlib.suppress(psutil.Error):
        return abs(psutil.Process(int(match[2])).create_time() - float(match[3])) < 0.1
    return False


@dataclass(slots=True)
class ContainerGroup:
    """The containers of one sandbox: the main one and its services.

    They share one network namespace, so they reach each other without a network of the machine. A
    further container holds it: it stays while the main one starts again. A gateway to allowed hosts
    lies in it, too.

    Example: `start` starts the services in the order of their conditions, then the main container.
    A guard process removes all of them when its input closes, also if this process is killed.
    """

    engine: ContainerEngine
    request: SandboxRequest
    main: ContainerSpec
    images: Mapping[str, ContainerImage]
    is_closed: bool  # The image runs read-only and without rights.
    cpus: float  # Number of processors of a container without a limit of its own; 0 means all.
    # Folders of the machine that the main container shows read-only, as PATH or PATH:TARGET.
    mounts: Sequence[str] = ()
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    guard: asyncio.subprocess.Process | None = None
    gateway: Gateway | None = None  # The way to allowed hosts.

    def container(self, name: str) -> str:
        """Return the engine's name of a container."""
        return f"{PREFIX}{self.token}-{re.sub(r'[^a-zA-Z0-9_.-]', '-', name)}"

    @property
    def specs(self) -> list[ContainerSpec]:
        """All containers in the order of their start. Raises: SandboxFailed: it has a cycle."""
        waiting = {each.name: each for each in (*self.request.services, self.main)}
        ordered: list[ContainerSpec] = []
        while waiting:
            ready = [each for each in waiting.values() if not waiting.keys() & each.after.keys()]
            if not ready:
                raise SandboxFailed(f"the services {', '.join(waiting)} wait for each other")
            ordered += ready
            for each in ready:
                del waiting[each.name]
        return ordered

    @property
    def volumes(self) -> list[str]:
        """The engine's names of the volumes."""
        sources = {m.source for each in self.specs for m in each.mounts if m.is_volume}
        return [self.container(f"volume-{source}") for source in sorted(sources)]

    @property
    def has_holder(self) -> bool:
        """Whether a further container holds the network namespace."""
        return bool(self.request.services) or self.request.allowed is not None

    @property
    def _has_bridge(self) -> bool:
        """Whether the containers are in the engine's own network."""
        return self.request.has_network and self.request.allowed is None

    async def start(self) -> "ContainerSandbox":
        """Start the containers and return the sandbox. Raises: SandboxFailed."""
        await self._start_guard()
        for volume in self.volumes:
            await self.engine.checked(
                "volume", "create", "--label", f"{LABEL}={owner_text()}", volume
            )
        if self.has_holder:
            await self._start_holder()
        if self.request.allowed is not None:
            await self._open_gateway(self.request.allowed)
        for spec in self.specs:
            for name, state in spec.after.items():
                await self._wait(name, state)
            try:
                await self.engine.checked("create", *self.arguments(spec))
                await self._copy_mounts(spec)
                await self._copy_hosts(spec)
                await self.engine.checked("start", self.container(spec.name))
            except SandboxFailed as error:
                raise SandboxFailed(f"container {spec.name}: {error}") from error
        sandbox = ContainerSandbox(self)
        for spec in self.specs:
            if self._healthcheck(spec) is not None:
                await self._wait(spec.name, ServiceState.HEALTHY)
            elif spec is not self.main:
                await self._wait(spec.name, ServiceState.STARTED)
        await sandbox.open()
        return sandbox

    async def _start_guard(self) -> None:
        names = [self.container(each.name) for each in reversed(self.specs)]
        names += [self.container("network")] if self.has_holder else []
        volumes = self.volumes
        self.guard = await asyncio.create_subprocess_exec(
            *("sh", "-c", GUARD, "sh", self.engine.program, str(len(names)), *names, *volumes),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )

    async def _start_holder(self) -> None:
        """Start the container that holds the network namespace. Raises: SandboxFailed."""
        words = ["run", "--detach", "--name", self.container("network"), *self._common()]
        words += [] if self._has_bridge else ["--network", "none"]
        for spec in self.specs if self.request.services else ():
            words += ["--add-host", f"{spec.name}:127.0.0.1"]
        words += ["--entrypoint", "sh", self.images[self.main.name].digest, *KEEP_ALIVE[1:]]
        await self.engine.checked(*words)

    async def _open_gateway(self, allowed: AllowedHosts) -> None:
        """Open the way to the allowed hosts. Raises: SandboxFailed."""
        name = self.container("network")
        pid = await self.engine.checked(
            "inspect", "--type", "container", "--format", "{{.State.Pid}}", name
        )
        self.gateway = Gateway(allowed)
        await self.gateway.open(int(pid.split()[-1]))

    def _common(self) -> list[str]:
        """Return the arguments of all containers."""
        driver = LOGS_DRIVERS[self.engine.name]
        words = ["--label", f"{LABEL}={owner_text()}", "--stop-timeout", "0"]
        # Podman would copy the variables of the hub's proxy, whose address can have a password.
        words += ["--http-proxy=false"] if self.engine.name == "podman" else []
        return [*words, "--log-driver", driver, "--log-opt", f"max-size={MAX_LOG}"]

    def arguments(self, spec: ContainerSpec) -> list[str]:
        """Return the arguments of `docker create` for a container."""
        limits = self.request.limits
        image = self.images[spec.name]
        memory = spec.memory_bytes or limits.memory_bytes
        words = ["--name", self.container(spec.name), *self._common()]
        if self.has_holder:
            words += ["--network", f"container:{self.container('network')}"]
            words += ["--no-hosts"] if self.engine.name == "podman" else []
        elif not self._has_bridge:
            words += ["--network", "none"]
        words += self._closed(spec) if self.is_closed else self._open(spec)
        for mount in self.mounts if spec is self.main else ():
            words += ["--volume", f"{mount if ':' in mount else f'{mount}:{mount}'}:ro"]
        memory += 3 * limits.disk_bytes if self.is_closed else 0
        words += ["--memory", str(memory), "--memory-swap", str(memory)]
        words += ["--pids-limit", str(limits.processes), "--cpu-shares", CPU_SHARES]
        cpus = spec.cpus or self.cpus
        words += ["--cpus", f"{cpus:g}"] if cpus else []
        for name, value in spec.variables.items():
            words += ["--env", f"{name}={value}"]
        command = list(spec.command or ())
        is_main = spec is self.main
        if is_main and not command:
            command = list(KEEP_ALIVE)
        entrypoint = spec.entrypoint
        if entrypoint is None and is_main and command and (self.is_closed or image.only_runs):
            entrypoint = ()
        if entrypoint is not None:
            start, *rest = [*entrypoint, *command]
            return [*words, "--entrypoint", start, image.digest, *rest]
        return [*words, image.digest, *command]

    def _open(self, spec: ContainerSpec) -> list[str]:
        """Return the arguments of a container that is as its author made it."""
        shm_bytes = min(SHM_BYTES, (spec.memory_bytes or self.request.limits.memory_bytes) // 4)
        words = ["--shm-size", str(shm_bytes)]
        words += ["--user", spec.user] if spec.user else []
        words += ["--workdir", spec.folder] if spec.folder else []
        words += ["--read-only"] if spec.is_read_only else []
        for text in spec.tmpfs:
            words += ["--tmpfs", text]
        for name in spec.capabilities:
            words += ["--cap-add", name]
        for mount in spec.mounts:
            if mount.is_volume:
                source = self.container(f"volume-{mount.source}")
                words += ["--volume", f"{source}:{mount.target}{':ro' * mount.is_read_only}"]
            elif mount.is_read_only:
                words += ["--volume", f"{mount.source}:{mount.target}:ro"]
        return words

    def _closed(self, spec: ContainerSpec) -> list[str]:
        """Return the arguments of a read-only container without rights."""
        limits = self.request.limits
        small = max(1 << 20, limits.disk_bytes // 4)
        words = ["--hostname", "sandbox", "--ipc", "private", "--read-only", "--cap-drop", "ALL"]
        words += ["--security-opt", "no-new-privileges", "--user", spec.user, "--workdir", "/"]
        words += ["--shm-size", str(small)]
        for name, value in VARIABLES.items():
            words += ["--env", f"{name}={value}"]
        sizes = dict.fromkeys(SMALL_FOLDERS, small) | {"/tmp": limits.disk_bytes}
        sizes |= {self.request.folder: limits.disk_bytes} if self.request.folder else {}
        for path, size in sizes.items():
            owner = OWNERS[self.engine.name]
            words += ["--tmpfs", f"{path}:rw,exec,nosuid,nodev,size={size},mode=1777,{owner}"]
        return words

    async def _copy_mounts(self, spec: ContainerSpec) -> None:
        """Copy the files of mounts that the container may change. Raises: SandboxFailed."""
        for mount in spec.mounts:
            if mount.is_volume or mount.is_read_only:
                continue
            source = Path(mount.source)
            with tempfile.TemporaryFile() as archive:
                with tarfile.TarFile(fileobj=archive, mode="w") as tar:
                    tar.add(source, arcname=mount.target.lstrip("/"))
                archive.seek(0)
                content = archive.read()
            await copy_in(self.engine, self.container(spec.name), content)

    async def _copy_hosts(self, spec: ContainerSpec) -> None:
        """Write the names of the services. Containers of Docker share the file of the network."""
        if not self.has_holder or self.engine.name != "podman":
            return
        names = " ".join(["localhost", *(each.name for each in self.specs)])
        content = f"127.0.0.1 {names}\n::1 localhost\n".encode()
        file = SandboxFile(path="/etc/hosts", content=content)
        await copy_in(self.engine, self.container(spec.name), archive_of([file]))

    def _healthcheck(self, spec: ContainerSpec) -> Healthcheck | None:
        """Return the health check of a container: its own, or else the image's."""
        if spec.has_no_healthcheck:
            return None
        return spec.healthcheck or self.images[spec.name].healthcheck

    async def _wait(self, name: str, state: ServiceState) -> None:
        """Wait until a container has a state. Raises: SandboxFailed: it failed."""
        spec = next(each for each in self.specs if each.name == name)
        if state is ServiceState.HEALTHY:
            check = self._healthcheck(spec)
            if check is None:
                raise SandboxFailed(f"container {name} has no health check to wait for")
            await self._wait_until_healthy(name, check)
            return
        while True:
            status, code = await self.status(name)
            if status in ("exited", "dead", "stopped"):
                if code == 0:
                    return
                raise SandboxFailed(await self.ending(name))
            if status == "running" and state is ServiceState.STARTED:
                return
            await asyncio.sleep(HEALTH_S)

    async def _wait_until_healthy(self, name: str, check: Healthcheck) -> None:
        """Run a health check until it succeeds. Raises: SandboxFailed."""
        began_s = time.monotonic()
        num_failed = 0
        while True:
            reply = await self.engine.call(
                *("exec", self.container(name), *check.argv), timeout_s=check.timeout_sec
            )
            if reply.code == 0:
                return
            if (await self.status(name))[0] != "running":
                raise SandboxFailed(await self.ending(name))
            is_starting = time.monotonic() - began_s < check.start_period_sec
            num_failed += not is_starting
            if num_failed >= check.retries:
                raise SandboxFailed(
                    f"container {name}: its health check failed {num_failed} times: {reply.error}"
                )
            await asyncio.sleep(check.start_interval_sec if is_starting else check.interval_sec)

    async def status(self, name: str) -> tuple[str, int]:
        """Return the status of a container, such as running, and its exit code."""
        for _ in range(2):  # A busy engine may miss the time limit of a call.
            reply = await self.engine.call(
                *("inspect", "--type", "container", "--format"),
                *("{{.State.Status}} {{.State.ExitCode}}", self.container(name)),
            )
            words = reply.text.split()
            if reply.code == 0 and len(words) >= 2 and words[-1].lstrip("-").isdigit():
                return words[-2], int(words[-1])
        return "absent", 1

    async def ending(self, name: str) -> str:
        """Return why a container does not run, with its last output."""
        status, code = await self.status(name)
        if status == "stopped":  # podman has not cleaned up yet; the exit code is final.
            status = "exited"
        logs = await self.engine.call("logs", "--tail", "20", self.container(name))
        return f"container {name} is {status} with code {code}: {logs.error}"

    async def remove(self) -> None:
        """Remove all containers and volumes."""
        if self.gateway is not None:
            self.gateway.close()
        if self.guard is None:
            return
        assert self.guard.stdin is not None
        self.guard.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REMOVE_TIMEOUT_S):
                await self.guard.wait()


class ContainerSandbox:
    """The main container of a group.

    Example: a command exceeds its time. The container is killed and started again, so that all
    processes end and the files remain. If it does not start, the call raises SandboxFailed.
    """

    def __init__(self, group: ContainerGroup) -> None:
        self._group = group
        self._engine = group.engine
        self._name = group.container(group.main.name)
        image = group.images[group.main.name]
        request = group.request
        self._folder = request.folder or group.main.folder or image.folder
        self._layers: list[Path] = []
        self._lock = asyncio.Lock()
        self._limits = request.limits
        self._has_cp = not (group.is_closed or group.main.is_read_only)
        self._user = ""

    @property
    def folder(self) -> str:
        """The work folder."""
        return self._folder

    @property
    def name(self) -> str:
        """The engine's name of the container."""
        return self._name

    async def open(self) -> None:
        """Make the work folder, and check that commands run. Raises: SandboxFailed."""
        words = ["sh", "-c", '[ -d "$1" ] || mkdir -p "$1"', "sh", self._folder]
        user = "" if self._group.is_closed else ROOT
        made = await self._run(
            words, timeout_s=GRACE_S, max_output_bytes=4096, user=user, folder="/"
        )
        if not made.is_ok:
            raise SandboxFailed(
                f"the work folder {self._folder} cannot be made: {made.text[-300:]}"
            )
        reply = await self._engine.call(
            *("inspect", "--type", "container", "--format", "{{.GraphDriver.Data.UpperDir}}"),
            self._name,
        )
        layer = Path(reply.text.splitlines()[-1]) if reply.code == 0 and reply.text else Path()
        # A daemon of another machine or of root keeps the files out of reach.
        is_near = layer.is_absolute() and os.access(layer, os.R_OK | os.X_OK)
        self._layers = [layer] if is_near else []

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        max_output_bytes: int,
        folder: str = "",
        variables: Mapping[str, str] | None = None,
        keeps_processes: bool = False,
        user: str = "",
        stdin: bytes = b"",
    ) -> CommandResult:
        """Run a command; see `Sandbox.exec`.

        Args:
            stdin: the input of the command.
        """
        del keeps_processes
        check_command(argv, folder, variables or {})
        async with self._lock:
            return await self._run(
                argv,
                timeout_s=timeout_s,
                max_output_bytes=max_output_bytes,
                folder=folder,
                variables=variables,
                user=user,
                stdin=stdin,
            )

    async def _run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        max_output_bytes: int,
        folder: str = "",
        variables: Mapping[str, str] | None = None,
        user: str = "",
        stdin: bytes = b"",
    ) -> CommandResult:
        """Run a command. A container that starts no command is started again once."""
        errors: list[str] = []
        num_bytes, num_files = await self._written()
        # A container over its limit can still remove files. The size of its last file grows until
        # all of its blocks are counted.
        watch = functools.partial(
            self._watch,
            max_bytes=max(self._limits.disk_bytes, num_bytes + LATE_BYTES),
            max_files=max(self._limits.max_files, num_files + SPARE_FILES),
        )
        for _ in range(2):
            call = ContainerCall(
                self._exec_words(argv, folder or self._folder, variables or {}, user, bool(stdin)),
                max_output_bytes,
            )
            result = await call.run(stdin, timeout_s, watch=watch)
            if call.has_started:
                if result.ended_by is not CommandEnd.EXIT:
                    await self._restart()
                elif result.exit_code != 0:
                    await self._check_alive()
                if result.output == call.mark:
                    raise RefusedBySandbox(f"the folder {folder or self._folder} cannot be entered")
                return result
            errors.append(result.text.strip()[-300:] or f"no start within {timeout_s:g} s")
            await self._check_alive()
            if re.search(r"no matching entries|unable to find user|no such user", errors[-1]):
                break
            await self._restart()
        raise SandboxFailed(f"{self._engine.name} starts no command: {errors[-1]}")

    def _exec_words(
        self,
        argv: Sequence[str],
        folder: str,
        variables: Mapping[str, str],
        user: str,
        has_input: bool,
    ) -> list[str]:
        """Return the command line of the engine without the mark, which the call adds."""
        words = [self._engine.program, "exec"]
        words += ["--interactive"] if has_input else []
        words += ["--user", user] if user else []
        for name, value in variables.items():
            words += ["--env", f"{name}={value}"]
        return [*words, self._name, "sh", "-c", STARTER, "sh", ContainerCall.MARK, folder, *argv]

    async def _check_alive(self) -> None:
        """Raise SandboxFailed if the container does not run."""
        status, _ = await self._group.status(self._group.main.name)
        if status != "running":
            raise SandboxFailed(await self._group.ending(self._group.main.name))

    async def _restart(self) -> None:
        """End all processes of the container; its files remain. Raises: SandboxFailed."""
        name = self._group.main.name
        await self._engine.call("kill", "--signal", "KILL", self._name)
        deadline_s = time.monotonic() + GRACE_S
        while time.monotonic() < deadline_s:
            # Podman removes the rest of the old processes after it has the status "stopped".
            if (await self._group.status(name))[0] == "exited":
                await self._engine.checked("start", self._name)
                if (await self._group.status(name))[0] == "running":
                    return
            await asyncio.sleep(HEALTH_S)
        raise SandboxFailed(await self._group.ending(name))

    async def _watch(self, *, max_bytes: int, max_files: int) -> CommandEnd:
        """Return, as soon as the container has written too much, the limit."""
        while True:
            num_bytes, num_files = await self._written()
            if num_bytes > max_bytes:
                return CommandEnd.DISK
            if num_files > max_files:
                return CommandEnd.FILES
            await asyncio.sleep(WATCH_S)

    async def _written(self) -> tuple[int, int]:
        """Return the bytes and the number of the files that the container has written."""
        if self._group.is_closed:
            return 0, 0  # Its folders are in memory and have a size.
        if self._layers:
            return await asyncio.to_thread(size_of_files, self._layers)
        reply = await self._engine.call(
            *("inspect", "--type", "container", "--size", "--format", "{{.SizeRw}}", self._name)
        )
        if not reply.text.isdigit():
            await self._check_alive()
            raise SandboxFailed(
                f"{self._engine.name} does not measure the files of {self._name}: {reply.error}"
            )
        return int(reply.text), 0

    async def write(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write a regular file of root; see `Sandbox.write`."""
        await self.write_all([SandboxFile(path=path, content=content, mode=mode)])

    async def write_all(self, files: Sequence[SandboxFile]) -> None:
        """Write files; see `Sandbox.write_all`."""
        for file in files:
            check_words("path", [file.path])
        async with self._lock:
            if self._has_cp:
                await self._copy_in(files)
                return
            for file in files:
                path = posixpath.join(self._folder, file.path)
                argv = ["sh", "-c", WRITER, "sh", path, f"{file.mode:o}"]
                made = await self._run(
                    argv,
                    timeout_s=COPY_TIMEOUT_S,
                    max_output_bytes=4096,
                    folder="/",
                    stdin=file.content,
                )
                if not made.is_ok:
                    raise RefusedBySandbox(f"{file.path}: {made.text.strip()[-300:]}")

    async def _copy_in(self, files: Sequence[SandboxFile]) -> None:
        """Write files with the engine's `cp`. Raises: RefusedBySandbox, SandboxFailed."""
        archive = archive_of(files, self._folder)
        try:
            await copy_in(self._engine, self._name, archive)
        except SandboxFailed as error:
            await self._check_alive()
            raise RefusedBySandbox(str(error)) from error

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """Return a regular file; see `Sandbox.read`."""
        check_words("path", [path])
        async with self._lock:
            path = posixpath.join(self._folder, path)
            argv = ["sh", "-c", READER, "sh", path, str(max_bytes + 1)]
            user = "" if self._group.is_closed else ROOT
            for _ in range(2):
                result = await self._run(
                    argv,
                    timeout_s=COPY_TIMEOUT_S,
                    max_output_bytes=2 * max_bytes + 4,
                    folder="/",
                    user=user,
                )
                if result.ended_by is not CommandEnd.EXIT or result.exit_code in READ_CODES:
                    break
            else:  # The engine lost the result, so the file is unknown.
                error = result.text.strip()[-300:]
                raise SandboxFailed(f"{self._engine.name} reads no {path}: {error}")
        if result.exit_code == ABSENT:
            raise RefusedBySandbox(f"{path}: {os.strerror(2)}")
        if result.exit_code == IRREGULAR:
            raise RefusedBySandbox(f"{path}: not a regular file")
        if not result.is_ok:
            raise RefusedBySandbox(f"{path}: {result.text.strip()[-300:]}")
        if result.num_bytes > max_bytes:
            raise RefusedBySandbox(f"{path}: it has more than {max_bytes} bytes")
        return result.output

    async def kill(self) -> None:
        """End all processes of the container; its files remain."""
        async with self._lock:
            await self._restart()

    async def delete(self) -> None:
        """Remove the containers of the sandbox."""
        await self._group.remove()


class ContainerCall:
    """One command in a container, by the engine's `exec`."""

    MARK = "@mark@"  # Place of the mark in the words of a call.

    def __init__(self, words: Sequence[str], max_output_bytes: int) -> None:
        self._mark = f"[{secrets.token_hex(8)}]"
        self._words = [self._mark if word == self.MARK else word for word in words]
        self._tail = Tail(max_output_bytes)
        self._began = bytearray()  # The first bytes of the output, before the end of the mark.
        self._started = asyncio.Event()

    @property
    def mark(self) -> bytes:
        """The first output of the command."""
        return self._mark.encode()

    @property
    def has_started(self) -> bool:
        """Whether the engine started the command."""
        return self._started.is_set()

    async def run(
        self,
        stdin: bytes,
        timeout_s: float,
        watch: Callable[[], Coroutine[object, object, CommandEnd]],
    ) -> CommandResult:
        """Return the result. Without a start, the output is the engine's error.

        Args:
            watch: returns as soon as the container exceeds a limit.

        Raises: RefusedBySandbox: the folder does not exist.
        """
        process = await asyncio.create_subprocess_exec(
            *self._words,
            stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=folder_of_call("exec"),
        )
        tasks: list[asyncio.Task[object]] = [asyncio.create_task(self._feed(process, stdin))]
        reading = asyncio.create_task(self._read(process))
        starting = asyncio.create_task(self._started.wait())
        tasks += [reading, starting]
        try:
            await asyncio.wait(
                {reading, starting}, timeout=GRACE_S, return_when=asyncio.FIRST_COMPLETED
            )
            began_s = time.monotonic()
            ended_by = CommandEnd.EXIT
            if self.has_started:
                watching = asyncio.create_task(watch())
                tasks.append(watching)
                done, _ = await asyncio.wait(
                    {reading, watching}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
                )
                if watching in done:
                    ended_by = watching.result()
                elif reading not in done:
                    ended_by = CommandEnd.TIMEOUT
            if reading.done():
                await process.wait()
        finally:
            for task in tasks:
                task.cancel()
            await end(process)
        if not self.has_started:
            self._tail.add(bytes(self._began))
        left_out = self._tail.num_bytes - len(self._tail.head) - len(self._tail.tail)
        note = TRUNCATED % left_out if left_out else b""
        return CommandResult(
            exit_code=process.returncode or 0,
            ended_by=ended_by,
            output=bytes(self._tail.head) + note + bytes(self._tail.tail),
            num_bytes=self._tail.num_bytes,
            seconds=time.monotonic() - began_s,
        )

    async def _feed(self, process: asyncio.subprocess.Process, stdin: bytes) -> None:
        """Write the input of the command, and close it."""
        if process.stdin is None:
            return
        with contextlib.suppress(ConnectionError):
            process.stdin.write(stdin)
            await process.stdin.drain()
        process.stdin.close()

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Read the output to its end."""
        assert process.stdout is not None
        size = len(self._mark)
        while chunk := await process.stdout.read(CHUNK_BYTES):
            if self.has_started:
                self._tail.add(chunk)
                continue
            self._began += chunk
            place = self._began.find(self.mark)
            if place >= 0:
                self._tail.add(bytes(self._began[place + size :]))
                self._started.set()


def size_of_files(folders: Sequence[Path]) -> tuple[int, int]:
    """Return the bytes on the disk and the number of all files below folders."""
    num_bytes = num_files = 0
    linked: set[int] = set()
    for folder in folders:
        for root, names, files in os.walk(folder):
            for name in (*names, *files):
                with contextlib.suppress(OSError):
                    path = os.path.join(root, name)
                    status = os.lstat(path)
                    num_files += 1
                    if status.st_nlink == 1 or status.st_ino not in linked:
                        linked.add(status.st_ino)
                        num_bytes += _data_bytes(path, status)
    return num_bytes, num_files


def _data_bytes(path: str, status: os.stat_result) -> int:
    """Return the bytes of a file, without its holes.

    The file system counts the blocks of new data up to half a minute later.
    """
    on_disk = status.st_blocks * 512
    if not stat.S_ISREG(status.st_mode) or status.st_size - on_disk < LATE_BYTES:
        return on_disk
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        num_bytes = end = 0
        for _ in range(MAX_PARTS):
            begin = os.lseek(file, end, os.SEEK_DATA)
            end = os.lseek(file, begin, os.SEEK_HOLE)
            num_bytes += end - begin
        return num_bytes + status.st_size - end
    except OSError:  # No data follows.
        return max(num_bytes, on_disk)
    finally:
        os.close(file)


def archive_of(files: Sequence[SandboxFile], folder: str = "/") -> bytes:
    """Return a tar archive of files that belong to root. Relative paths are below the folder."""
    archive = io.BytesIO()
    with tarfile.TarFile(fileobj=archive, mode="w") as tar:
        for file in files:
            path = posixpath.normpath(posixpath.join(folder, file.path))
            member = tarfile.TarInfo(path.lstrip("/"))
            member.size = len(file.content)
            member.mode = file.mode
            member.mtime = int(time.time())
            tar.addfile(member, io.BytesIO(file.content))
    return archive.getvalue()


async def copy_in(engine: ContainerEngine, container: str, archive: bytes) -> None:
    """Write the files of a tar archive into a container's root folder, with the archive's owners.

    Raises: SandboxFailed: the engine cannot write them.
    """
    keeps_owners = ["--archive=false"] if engine.name == "podman" else []
    with tempfile.TemporaryDirectory() as folder:  # Podman 4.3 leaves a copy of its input there.
        reply = await engine.call(
            *("cp", *keeps_owners, "-", f"{container}:/"),
            timeout_s=COPY_TIMEOUT_S,
            stdin=archive,
            temporary_folder=folder,
        )
    if reply.code != 0:
        raise SandboxFailed(f"{engine.name} cp: {reply.error}")
