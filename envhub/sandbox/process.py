"""A sandbox behind a process: starts it, and exchanges requests and replies with its agent.

A system call filter, written as raw BPF, protects the memory that no limit counts. It refuses calls
that allocate memory outside of processes and files (memfd, System V shared memory and queues,
io_uring), or that reach facilities of the kernel which are shared by all namespaces. Other calls
are refused only if they name the sandbox's first process, which has the commands' user: its limits,
its priority and its processors stay as they are.
"""

import asyncio
import base64
import contextlib
import errno
import json
import shlex
import struct
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from envhub.sandbox.cgroup import Cgroup
from envhub.sandbox.interface import (
    LOGS,
    SMALL_FOLDERS,
    TESTS,
    VARIABLES,
    CommandEnd,
    CommandResult,
    RefusedBySandbox,
    SandboxFailed,
    SandboxFile,
    SandboxLimits,
    check_command,
    check_user,
    check_words,
)

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
REFUSED = {  # Numbers of the refused system calls by machine.
    "x86_64": {
        "shmget": 29,
        "semget": 64,
        "msgget": 68,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "perf_event_open": 298,
        "memfd_create": 319,
        "bpf": 321,
        "userfaultfd": 323,
        "io_uring_setup": 425,
        "memfd_secret": 447,
    },
    "aarch64": {
        "msgget": 186,
        "semget": 190,
        "shmget": 194,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "perf_event_open": 241,
        "memfd_create": 279,
        "bpf": 280,
        "userfaultfd": 282,
        "io_uring_setup": 425,
        "memfd_secret": 447,
    },
}
FIRST = 1  # Process id of the sandbox's first process. It has one thread.
PRIO_USER = 2
IOPRIO_WHO_USER = 3
# Arguments that are refused by system call, as (index, value). A user means all its processes.
NAMES_FIRST = {
    "kill": [(0, FIRST)],
    "tkill": [(0, FIRST)],
    "tgkill": [(0, FIRST)],
    "rt_sigqueueinfo": [(0, FIRST)],
    "rt_tgsigqueueinfo": [(0, FIRST)],
    "pidfd_open": [(0, FIRST)],
    "ptrace": [(1, FIRST)],
    "process_vm_readv": [(0, FIRST)],
    "process_vm_writev": [(0, FIRST)],
    "migrate_pages": [(0, FIRST)],
    "move_pages": [(0, FIRST)],
    "prlimit64": [(0, FIRST)],
    "sched_setparam": [(0, FIRST)],
    "sched_setscheduler": [(0, FIRST)],
    "sched_setattr": [(0, FIRST)],
    "sched_setaffinity": [(0, FIRST)],
    "setpriority": [(1, FIRST), (0, PRIO_USER)],
    "ioprio_set": [(1, FIRST), (0, IOPRIO_WHO_USER)],
}
# Index of the argument that names a process or a group of processes; 0 is the calling one.
NAMES_PROCESS = {
    "prlimit64": 0,
    "sched_setparam": 0,
    "sched_setscheduler": 0,
    "sched_setattr": 0,
    "sched_setaffinity": 0,
    "setpriority": 1,
    "ioprio_set": 1,
}
NUMBERS = {  # Numbers of these system calls by machine.
    "x86_64": {
        "kill": 62,
        "ptrace": 101,
        "rt_sigqueueinfo": 129,
        "setpriority": 141,
        "sched_setparam": 142,
        "sched_setscheduler": 144,
        "tkill": 200,
        "sched_setaffinity": 203,
        "tgkill": 234,
        "ioprio_set": 251,
        "migrate_pages": 256,
        "move_pages": 279,
        "rt_tgsigqueueinfo": 297,
        "prlimit64": 302,
        "process_vm_readv": 310,
        "process_vm_writev": 311,
        "sched_setattr": 314,
        "pidfd_open": 434,
    },
    "aarch64": {
        "ioprio_set": 30,
        "ptrace": 117,
        "sched_setparam": 118,
        "sched_setscheduler": 119,
        "sched_setaffinity": 122,
        "kill": 129,
        "tkill": 130,
        "tgkill": 131,
        "rt_sigqueueinfo": 138,
        "setpriority": 140,
        "migrate_pages": 238,
        "move_pages": 239,
        "rt_tgsigqueueinfo": 240,
        "prlimit64": 261,
        "process_vm_readv": 270,
        "process_vm_writev": 271,
        "sched_setattr": 274,
        "pidfd_open": 434,
    },
}
X32 = 0x40000000  # Bit of system calls of the x32 ABI.
LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
GREATER_EQUAL = 0x35  # BPF_JMP | BPF_JGE | BPF_K
RETURN = 0x06  # BPF_RET | BPF_K
ALLOW = 0x7FFF0000
REFUSE = 0x00050000 | errno.EPERM
NUMBER_AT = 0  # Offsets in `struct seccomp_data`.
MACHINE_AT = 4
ARGUMENTS_AT = 16
ARGUMENT_BYTES = 8  # The kernel reads these arguments as 32 bits, which come first.


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return one instruction of the filter."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _refuse_if(code: int, value: int) -> list[bytes]:
    """Return the instructions that refuse the call if the loaded value compares as true."""
    return [_instruction(code, value, 0, 1), _instruction(RETURN, REFUSE)]


def filter_program(machine: str) -> bytes:
    """Return the filter of a sandbox for a machine, such as x86_64; b"" for an unknown one."""
    if machine not in AUDIT:
        return b""
    lines = [*_first_lines(machine), *_refuse_if(GREATER_EQUAL, X32)]
    for number in REFUSED[machine].values():
        lines += _refuse_if(EQUAL, number)
    for name, arguments in NAMES_FIRST.items():
        checks: list[bytes] = []
        for index, value in arguments:
            checks += [_load_argument(index), *_refuse_if(EQUAL, value)]
        lines += _rule(NUMBERS[machine][name], checks)
    return b"".join([*lines, _instruction(RETURN, ALLOW)])


def own_process_program(machine: str) -> bytes:
    """Return a further filter: limits and priorities change only for the calling process.

    b"" for an unknown machine. Calls that name the process by its id instead of 0 are refused, too.
    """
    if machine not in AUDIT:
        return b""
    lines = _first_lines(machine)
    for name, index in NAMES_PROCESS.items():
        checks = [_load_argument(index), _instruction(EQUAL, 0, 1, 0), _instruction(RETURN, REFUSE)]
        lines += _rule(NUMBERS[machine][name], checks)
    return b"".join([*lines, _instruction(RETURN, ALLOW)])


def _first_lines(machine: str) -> list[bytes]:
    """Return the instructions that refuse other machines' calls and load the call's number."""
    return [
        _instruction(LOAD, MACHINE_AT),
        _instruction(EQUAL, AUDIT[machine], 1, 0),
        _instruction(RETURN, REFUSE),
        _instruction(LOAD, NUMBER_AT),
    ]


def _load_argument(index: int) -> bytes:
    """Return the instruction that loads an argument of the call."""
    return _instruction(LOAD, ARGUMENTS_AT + ARGUMENT_BYTES * index)


def _rule(number: int, checks: list[bytes]) -> list[bytes]:
    """Return the instructions that apply the checks to one system call."""
    checks = [*checks, _instruction(RETURN, ALLOW)]
    return [_instruction(EQUAL, number, 0, len(checks)), *checks]


AGENT = Path(__file__).with_name("agent.py")
GRACE_S = 60.0  # Seconds beyond the time limit of a command in which the agent must reply.
END_S = 10.0  # Seconds in which a killed sandbox must have ended.
MAX_ERROR_BYTES = 4096
WRITE_BYTES = 1 << 20  # Size of one part of a file in a request.
MAX_PART_BYTES = 32 << 20  # Size of one reply's part of a file.
TRUNCATED = b"\n[%d bytes were left out here]\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The command line of a sandbox's process.

    Attributes:
        options: more arguments of `asyncio.create_subprocess_exec`.
        remove: called after the process has ended, for example to remove a container.
        memory: a control group for the processes; None: the agent's own limits hold.
    """

    argv: Sequence[str]
    options: Mapping[str, Any]
    remove: Callable[[], Awaitable[object]] | None = None
    memory: Cgroup | None = None


def agent_argv(python: str, limits: SandboxLimits, folder: str, path: str = "") -> list[str]:
    """Return the command line of the agent.

    Args:
        path: the agent's file in the sandbox; "" means that the command line has its text.
    """
    folders = [folder, "/tmp", *SMALL_FOLDERS, "/dev/shm"]
    filters = _as_text(filter_program)
    settings = json.dumps({**asdict(limits), "folders": folders, "filters": filters})
    code = [path] if path else ["-c", agent_text()]
    return [python, "-I", "-S", *code, settings]


# Runs the interpreter of the sandbox's first process. A container has its own in the PATH.
CONFINING = """#!/usr/bin/env bash
mapfile -d '' -t words < /proc/1/cmdline
for ((n = 0; n < ${#words[@]}; n++)); do [ "${words[n]}" = -I ] && break; done
[ $n -lt ${#words[@]} ] || { words=(python3); n=1; }
"""


def confining_script(path: str, variables: Iterable[str]) -> str:
    """Return a script of bash that runs a command without access to the tests and their verdict.

    Args:
        path: path of the agent's text in the sandbox.
        variables: names of variables that the command does not get.
    """
    settings = {
        "folders": [TESTS, LOGS],
        "variables": sorted(variables),
        "filters": _as_text(own_process_program),
    }
    words = shlex.join(["-I", "-S", path, json.dumps(settings)])
    return f'{CONFINING}exec "${{words[@]:0:n}}" {words} "$@"\n'


def _as_text(make: Callable[[str], bytes]) -> dict[str, str]:
    """Return a system call filter for each machine."""
    return {name: base64.b64encode(make(name)).decode() for name in AUDIT}


def agent_text() -> str:
    """Return the code of the agent."""
    return AGENT.read_text(encoding="utf-8")


class AgentSandbox:
    """A sandbox whose agent answers over pipes.

    Example: a command exceeds its time. The agent ends all processes and replies `timeout`. If it
    does not reply within `GRACE_S`, the sandbox is deleted, and the call raises SandboxFailed.
    """

    def __init__(self, process: asyncio.subprocess.Process, launch: Launch, folder: str) -> None:
        self._process = process
        self._launch = launch
        self._folder = folder
        self._lock = asyncio.Lock()
        self._is_usable = True  # False while a request has no reply, and after the end.
        self._is_deleted = False
        self._errors = bytearray()
        self._reading = asyncio.create_task(self._read_errors())

    @classmethod
    async def start(cls, launch: Launch, *, folder: str, timeout_s: float) -> "AgentSandbox":
        """Start the process and wait for its agent. Raises: SandboxFailed."""
        async with contextlib.AsyncExitStack() as undo:
            if launch.memory is not None:
                undo.push_async_callback(launch.memory.remove)
            try:
                process = await asyncio.create_subprocess_exec(
                    *launch.argv, stdin=PIPE, stdout=PIPE, stderr=PIPE, **launch.options
                )
            except OSError as error:
                raise SandboxFailed(f"{launch.argv[0]} cannot start: {error}") from error
            sandbox = cls(process, launch, folder)
            undo.push_async_callback(sandbox.delete)
            await sandbox._reply(timeout_s, "start")
            if launch.memory is not None:
                try:
                    launch.memory.add(process.pid)
                except OSError as error:
                    raise SandboxFailed(f"its control group takes no process: {error}") from error
            undo.pop_all()
        return sandbox

    @property
    def folder(self) -> str:
        """The work folder."""
        return self._folder

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
        """Run a command; see `Sandbox.exec`."""
        check_user(user)
        check_command(argv, folder, variables or {})
        reply = await self._ask(
            timeout_s,
            op="exec",
            argv=list(argv),
            folder=folder or self._folder,
            variables={**VARIABLES, **(variables or {})},
            seconds=timeout_s,
            max_output=max_output_bytes,
            keep=keeps_processes,
        )
        head, tail = (base64.b64decode(reply[name]) for name in ("head", "tail"))
        left_out = reply["num_bytes"] - len(head) - len(tail)
        return CommandResult(
            exit_code=reply["code"],
            ended_by=CommandEnd(reply["end"]),
            output=head + (TRUNCATED % left_out if left_out else b"") + tail,
            num_bytes=reply["num_bytes"],
            seconds=reply["seconds"],
        )

    async def write(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write a regular file; see `Sandbox.write`."""
        check_words("path", [path])
        for start in range(0, max(1, len(content)), WRITE_BYTES):
            part = base64.b64encode(content[start : start + WRITE_BYTES]).decode()
            await self._ask(0.0, op="write", path=path, content=part, mode=mode, append=start > 0)

    async def write_all(self, files: Sequence[SandboxFile]) -> None:
        """Write files; see `Sandbox.write_all`."""
        for file in files:
            await self.write(file.path, file.content, mode=file.mode)

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """Return a regular file; see `Sandbox.read`."""
        check_words("path", [path])
        reply = await self._ask(0.0, op="read", path=path, max_bytes=min(max_bytes, MAX_PART_BYTES))
        content = base64.b64decode(reply["content"])
        if reply["size"] > len(content):
            size = reply["size"]
            raise RefusedBySandbox(f"{path}: it has {size} bytes, more than {len(content)}")
        return content

    async def kill(self) -> None:
        """End all processes of the commands."""
        await self._ask(0.0, op="kill")

    async def delete(self) -> None:
        """End the sandbox. The process namespace ends with its first process."""
        if self._is_deleted:
            return
        self._is_deleted = True
        self._is_usable = False
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._launch.memory is not None:
            self._launch.memory.kill()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._process.wait()
        if self._launch.memory is not None:
            await self._launch.memory.remove()
        if self._launch.remove is not None:
            await self._launch.remove()
        self._reading.cancel()

    async def _ask(self, timeout_s: float, **request: Any) -> dict[str, Any]:
        """Send a request and return the reply. Raises: RefusedBySandbox, SandboxFailed."""
        async with self._lock:
            if not self._is_usable:
                raise SandboxFailed("the sandbox has ended")
            text = json.dumps(request).encode()
            self._is_usable = False
            try:
                assert self._process.stdin is not None
                self._process.stdin.write(len(text).to_bytes(4, "big") + text)
                await self._process.stdin.drain()
            except ConnectionError:
                pass  # The missing reply has the reason.
            reply = await self._reply(timeout_s + GRACE_S, str(request["op"]))
        if "refused" in reply:
            path = f"{request['path']}: " if "path" in request else ""
            raise RefusedBySandbox(f"{path}{reply['refused']}")
        return reply

    async def _reply(self, timeout_s: float, op: str) -> dict[str, Any]:
        """Return the next reply of the agent. Raises: SandboxFailed."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                size = int.from_bytes(await self._process.stdout.readexactly(4), "big")
                reply = json.loads(await self._process.stdout.readexactly(size))
        except TimeoutError as error:
            await self.delete()
            raise SandboxFailed(f"the sandbox did not answer {op} in {timeout_s:g} s") from error
        except (asyncio.IncompleteReadError, ValueError) as error:
            raise SandboxFailed(await self._ending(op)) from error
        self._is_usable = True
        return reply

    async def _ending(self, op: str) -> str:
        """Return why the process has ended, with the last lines of its errors."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._process.wait()
                await self._reading
        code = self._process.returncode
        said = self._errors.decode("utf-8", errors="replace").strip()
        memory = self._launch.memory
        killed = " (out of memory)" if memory is not None and memory.num_killed() else ""
        await self.delete()
        return f"the sandbox ended during {op} with code {code}{killed}" + (said and f": {said}")

    async def _read_errors(self) -> None:
        """Keep the end of the process's error output."""
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(MAX_ERROR_BYTES):
            self._errors += chunk
            del self._errors[:-MAX_ERROR_BYTES]
