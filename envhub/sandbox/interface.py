"""The sandbox interface: create, exec, write, read, delete, with the limits of a sandbox."""

import asyncio
import posixpath
import re
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
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
MAX_ARGUMENT_BYTES = 100_000  # The kernel accepts 131,072 bytes for one argument.


class SandboxFailed(EnvFailure):
    """The sandbox could not start, or it has ended. The agent did not cause it."""


class RefusedBySandbox(ValueError):
    """A command or a file is impossible in the sandbox: no such path, no space, a pipe."""


class CommandEnd(StrEnum):
    """How a command ended.

    EXIT: by itself, or by a signal. TIMEOUT, MEMORY, FILES: it exceeded that limit, and all
    processes of the sandbox were ended.
    """

    EXIT = "exit"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    FILES = "files"


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
class SandboxRequest:
    """A sandbox to create.

    Attributes:
        folder: the work folder, as `work_folder` returns it; "" means the one of the image.
        image: the container image; "" means the one of the configuration. Only containers use it.
    """

    limits: SandboxLimits = field(default_factory=SandboxLimits)
    folder: str = "/app"
    image: str = ""


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
    ) -> CommandResult:
        """Run a command and return its result.

        Args:
            timeout_s: seconds after which all processes of the sandbox are ended.
            max_output_bytes: size of the returned output. More is read and dropped.
            folder: working directory; "" means the work folder.
            variables: environment variables, added to `VARIABLES`.
            keeps_processes: background processes continue after the command has ended.

        Raises:
            RefusedBySandbox: the command cannot start.
            SandboxFailed: the sandbox has ended.
        """
        ...

    async def write(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write a regular file and its folders. Raises: RefusedBySandbox, SandboxFailed."""
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
