"""The sandbox interface: create, exec, write, read, delete, with the limits of a sandbox."""

import asyncio
import contextlib
import ipaddress
import posixpath
import re
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any, Protocol, TypeVar

from envhub.env import EnvFailure

T = TypeVar("T")


def run_apart(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine, which runs in an event loop and a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HOME = "/home/agent"
TESTS = "/tests"  # Folder that is empty until the tests of a task are written into it.
LOGS = "/logs"
SOLUTION = "/solution"  # Folder for the files of a reference solution.
SMALL_FOLDERS = (HOME, TESTS, LOGS, SOLUTION)  # Writable folders beside the work folder and /tmp.
USERS = ("agent", "1000")  # Name and number of the only user that runs commands.
VARIABLES = {"PATH": PATH, "HOME": HOME, "LANG": "C.UTF-8", "TERM": "dumb", "USER": "agent"}
MIB = 1 << 20
EVERY_HOST = "*"  # An entry of allowed hosts that permits all of them.
HOST_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
MAX_TUNNELS = 512  # Open connections of one sandbox to allowed hosts.
MAX_ARGUMENT_BYTES = 100_000  # The kernel accepts 131,072 bytes for one argument.


class SandboxFailed(EnvFailure):
    """The sandbox could not start, or it has ended. The agent did not cause it."""


class RefusedBySandbox(ValueError):
    """A command or a file is impossible in the sandbox: no such path, no space, a pipe."""


class CommandEnd(StrEnum):
    """How a command ended.

    EXIT: by itself, or by a signal. TIMEOUT, MEMORY, FILES, DISK: it exceeded that limit, and all
    processes of the sandbox were ended.
    """

    EXIT = "exit"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    FILES = "files"
    DISK = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of one sandbox. Each writable folder is a file system in memory."""

    memory_bytes: int = 512 * MIB  # Resident memory of all processes.
    processes: int = 64
    open_files: int = 256  # Open files of one process.
    max_files: int = 20_000  # Files and folders that the commands may create.
    file_bytes: int = 64 * MIB  # Size of one file.
    disk_bytes: int = 64 * MIB  # Size of the work folder, and of /tmp.


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBuild:
    """A build of an image.

    Attributes:
        dockerfile: path of the Dockerfile, relative to the context.
        target: the stage to build; "" means the last one.
        arguments: values of ARG.
        timeout_s: seconds in which the build must end.
    """

    context: Path
    dockerfile: str = "Dockerfile"
    target: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict[str, str])
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Healthcheck:
    """A command that must succeed before the first command of the agent. Times are in seconds.

    Attributes:
        argv: the command.
        start_period_sec: failures within this time after the start do not count.
        retries: number of failures that are one too many.
    """

    argv: Sequence[str]
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3


class ServiceState(StrEnum):
    """The state of a service that another one waits for, in the words of compose files."""

    STARTED = "service_started"
    HEALTHY = "service_healthy"
    COMPLETED = "service_completed_successfully"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerMount:
    """Files in a container.

    Attributes:
        source: a path of the machine, or the name of a volume that the services share.
        is_read_only: the container sees the source itself. Otherwise it gets a copy of a path.
    """

    source: str
    target: str
    is_read_only: bool = False

    @property
    def is_volume(self) -> bool:
        """Whether the source is the name of a volume."""
        return not self.source.startswith("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpec:
    """A container of a task. None and empty values mean those of the image.

    Attributes:
        image, build: the image by its name, or what it is built of.
        entrypoint: replaces the image's.
        command: replaces the image's. The main container's default waits for its end.
        folder: the directory in which commands start.
        tmpfs: paths of file systems in memory, with their options, as `docker run --tmpfs` has.
        cpus: number of processors; 0 means all.
        memory_bytes: limit of memory; 0 means the one of the request.
        after: names of the services that this one waits for.
    """

    name: str = "main"
    image: str = ""
    build: ImageBuild | None = None
    entrypoint: Sequence[str] | None = None
    command: Sequence[str] | None = None
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    user: str = ""
    folder: str = ""
    mounts: Sequence[ContainerMount] = ()
    tmpfs: Sequence[str] = ()
    is_read_only: bool = False
    capabilities: Sequence[str] = ()
    cpus: float = 0.0
    memory_bytes: int = 0
    healthcheck: Healthcheck | None = None
    has_no_healthcheck: bool = False
    after: Mapping[str, ServiceState] = field(default_factory=dict[str, ServiceState])


def parse_host(text: str) -> str | IPv4Network:
    """Return an allowed host: a name, a name with a leading `*.`, or a network of addresses.

    Raises: ValueError: it is none of them.
    """
    host = text.strip().lower().rstrip(".")
    if re.fullmatch(r"[0-9./]+", host) or ":" in host:
        try:
            network = ipaddress.ip_network(host)
        except ValueError:
            network = None
        if not isinstance(network, IPv4Network):
            raise ValueError(f"{text!r} is neither a name nor an IPv4 address or network")
        if network.overlaps(IPv4Network("127.0.0.0/8")) and network.prefixlen:
            raise ValueError(f"{text!r} is the container's own loopback, which is always open")
        return network
    labels = host.removeprefix("*.").split(".")
    if labels[-1].isdigit() or not all(HOST_LABEL.fullmatch(label) for label in labels):
        raise ValueError(f"{text!r} is no name of a host; it has no scheme, port or path")
    return host


class AllowedHosts:
    """The hosts that a sandbox reaches now. A change ends the open connections.

    Example: the hosts of the agent are replaced by those of the tests before the tests start.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts: tuple[str, ...] = ()
        self._names: list[str] = []
        self._networks: list[IPv4Network] = []
        self._is_public = False
        self._tunnels: set[asyncio.Task[object]] = set()
        self.change(hosts)

    def change(self, hosts: Sequence[str]) -> None:
        """Replace the hosts; EVERY_HOST allows all. Raises: ValueError: see `parse_host`."""
        parsed = [parse_host(each) for each in hosts if each != EVERY_HOST]
        self._names = [each for each in parsed if isinstance(each, str)]
        self._networks = [each for each in parsed if isinstance(each, IPv4Network)]
        self._is_public = EVERY_HOST in hosts
        self.hosts = tuple(hosts)
        for task in self._tunnels:
            task.cancel()

    def permits_name(self, name: str) -> bool:
        """Return whether a name of a host is allowed. A resolver ends a name at a NUL character."""
        if not all(HOST_LABEL.fullmatch(label) for label in name.split(".")):
            return False
        return self._is_public or any(
            host == name or (host.startswith("*.") and name.endswith(host[1:]))
            for host in self._names
        )

    def permits_address(self, address: IPv4Address) -> bool:
        """Return whether an address without a name is allowed."""
        is_listed = self._is_public or any(address in network for network in self._networks)
        return is_listed and self.is_far(address)

    def is_far(self, address: IPv4Address) -> bool:
        """Return whether an address, also one of a name, is none of the hub's own services.

        Its loopback never is. Clouds serve the keys of a machine at a link-local address, which
        only a network of these addresses permits.
        """
        if address.is_loopback or address.is_unspecified:
            return False
        parts = [network for network in self._networks if network.is_link_local]
        return not address.is_link_local or any(address in network for network in parts)

    @contextlib.contextmanager
    def connection(self) -> Iterator[bool]:
        """Count the current task as a connection; False means that there are too many."""
        task = asyncio.current_task()
        assert task is not None
        is_free = len(self._tunnels) < MAX_TUNNELS
        self._tunnels.add(task)
        try:
            yield is_free
        finally:
            self._tunnels.discard(task)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRequest:
    """A sandbox to create.

    Attributes:
        folder: the work folder, as `work_folder` returns it; "" means the one of the image.
        image: the container image; "" means the one of the configuration. Only containers use it.
        container: the container of a task, as its author made it. Only containers of this machine
            perform it.
        services: further containers, which the commands reach by their names.
        has_network: the containers reach the network of the machine.
        allowed: the hosts that the containers reach, which may change later; None without a list.
    """

    limits: SandboxLimits = field(default_factory=SandboxLimits)
    folder: str = "/app"
    image: str = ""
    container: ContainerSpec | None = None
    services: Sequence[ContainerSpec] = ()
    has_network: bool = False
    allowed: AllowedHosts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxFile:
    """A regular file to write."""

    path: str
    content: bytes
    mode: int = 0o644


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """The result of a command.

    Attributes:
        exit_code: negative for a signal.
        output: standard output and errors as they came; the middle of a long one is dropped.
        num_bytes: size of the whole output.
    """

    exit_code: int
    ended_by: CommandEnd
    output: bytes
    num_bytes: int
    seconds: float

    @property
    def is_ok(self) -> bool:
        """Whether the command ended by itself with exit code 0."""
        return self.ended_by is CommandEnd.EXIT and self.exit_code == 0

    @property
    def text(self) -> str:
        """The output as text."""
        return self.output.decode("utf-8", errors="replace")


class Sandbox(Protocol):
    """One sandbox. Its calls never overlap; `delete` may be called at any time."""

    @property
    def folder(self) -> str:
        """The work folder."""
        ...

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
    ) -> CommandResult:
        """Run a command and return its result.

        Args:
            timeout_s: seconds after which all processes of the sandbox are ended.
            max_output_bytes: size of the returned output. More is read and dropped.
            folder: working directory; "" means the work folder.
            variables: environment variables, added to `VARIABLES` or to those of the image.
            keeps_processes: background processes continue after the command has ended. Those of a
                container always do.
            user: name or number of a user of the container; "" means its own. Other sandboxes have
                one user.

        Raises:
            RefusedBySandbox: the command cannot start.
            SandboxFailed: the sandbox has ended.
        """
        ...

    async def write(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write a regular file and its folders. Raises: RefusedBySandbox, SandboxFailed."""
        ...

    async def write_all(self, files: Sequence[SandboxFile]) -> None:
        """Write files and their folders at once. Raises: RefusedBySandbox, SandboxFailed."""
        ...

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """Return a regular file. Raises: RefusedBySandbox: none, or too large; SandboxFailed."""
        ...

    async def kill(self) -> None:
        """End all processes of the sandbox; its files remain. Raises: SandboxFailed."""
        ...

    async def delete(self) -> None:
        """End the sandbox with all its processes and files. It never raises."""
        ...


class SandboxBackend(Protocol):
    """A way to create sandboxes."""

    def problem(self) -> str:
        """Return why this machine cannot create sandboxes, with the remedy; "" if it can."""
        ...

    async def create(self, request: SandboxRequest) -> Sandbox:
        """Return a new sandbox. Raises: SandboxFailed: it did not start."""
        ...


def check_command(argv: Sequence[str], folder: str, variables: Mapping[str, str]) -> None:
    """Raise RefusedBySandbox if the kernel cannot take a command; see `Sandbox.exec`."""
    check_words("command", argv)
    if folder:
        check_words("work folder", [folder])
    for name, value in variables.items():
        check_words("name of a variable", [name])
        if value:
            check_words(f"variable {name}", [value])


def check_user(user: str) -> None:
    """Raise RefusedBySandbox if a command names a user, and the sandbox has only one."""
    if user:
        raise RefusedBySandbox(f"the user {user!r} does not exist: the sandbox has one user")


def check_words(what: str, words: Sequence[str]) -> None:
    """Raise RefusedBySandbox if the kernel cannot take the words as arguments or paths.

    Args:
        what: name of the words, for the error.
    """
    if not words or not words[0]:
        raise RefusedBySandbox(f"the {what} is empty")
    for word in words:
        if "\0" in word:
            raise RefusedBySandbox(f"the {what} contains a NUL character: {word[:80]!a}")
        try:
            size = len(word.encode())
        except UnicodeEncodeError as error:
            raise RefusedBySandbox(
                f"the {what} contains a lone surrogate, which UTF-8 lacks: {word[:80]!a}"
            ) from error
        if size > MAX_ARGUMENT_BYTES:
            raise RefusedBySandbox(f"the {what} has {size} bytes, more than {MAX_ARGUMENT_BYTES}")


def work_folder(path: str) -> str:
    """Return the normalised path of a work folder. Raises: RefusedBySandbox: it cannot be one."""
    folder = "/" + posixpath.normpath(path).lstrip("/")
    if not path.startswith("/") or re.fullmatch(r"/[\w./ -]+", folder) is None:
        raise RefusedBySandbox(f"the work folder {path[:80]!a} is not the path of a folder")
    return folder
