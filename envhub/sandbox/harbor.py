"""Sandboxes of the package Harbor: Modal, E2B, Daytona, Kubernetes, Docker and others."""

import asyncio
import base64
import contextlib
import errno
import itertools
import json
import logging
import os
import posixpath
import secrets
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.config.envs import SandboxOptions
from envhub.sandbox.containers import (
    ABSENT,
    GRACE_S,
    IRREGULAR,
    IS_REGULAR,
    ROOT,
    STARTER,
    TRUNCATED,
)
from envhub.sandbox.engine import end
from envhub.sandbox.interface import (
    EVERY_HOST,
    MIB,
    CommandEnd,
    CommandResult,
    RefusedBySandbox,
    SandboxFailed,
    SandboxFile,
    SandboxRequest,
    check_command,
    check_words,
    run_apart,
)

logger = logging.getLogger(__name__)

SCHEME = "harbor:"
SERVER = Path(__file__).parent / "harbor_process.py"
MAX_LINE_BYTES = 256 << 20
PROBE_TIMEOUT_S = 120.0
CALL_TIMEOUT_S = 600.0
# The result of `head` is lost in a pipe, so a full stop after the content shows its success.
READER = f'{IS_REGULAR}{{ head -c "$2" "$1" && printf .; }} | base64'
MARK_BYTES = 1024  # Room for the mark, and for the text of a shell before it.


class HarborSandboxes:
    """Creates sandboxes with an environment class of Harbor, in a process with its interpreter."""

    def __init__(self, options: SandboxOptions) -> None:
        self._options = options
        self._provider = options.backend.removeprefix(SCHEME)
        self._process: HarborProcess | None = None
        self._lock = asyncio.Lock()

    def problem(self) -> str:
        """Return why no sandbox can start, with the remedy; "" if one can."""
        try:
            run_apart(self._probe())
        except SandboxFailed as error:
            return str(error)
        return ""

    async def _probe(self) -> None:
        """Check the package, the provider and its key. Raises: SandboxFailed."""
        process = await HarborProcess.start(self._options)
        try:
            await process.call("probe", PROBE_TIMEOUT_S, {"provider": self._provider})
        finally:
            await process.close()

    async def create(self, request: SandboxRequest) -> "HarborSandbox":
        """Return a new sandbox. Raises: SandboxFailed."""
        async with self._lock:
            if self._process is None or self._process.has_ended:
                self._process = await HarborProcess.start(self._options)
        spec = request.container
        context = spec.build.context if spec is not None and spec.build is not None else None
        if request.services and not (context and (context / "docker-compose.yaml").is_file()):
            raise SandboxFailed(
                f"{self._options.backend}: services need environment/docker-compose.yaml beside a"
                " Dockerfile; use envs.sandbox.backend=docker or podman"
            )
        image = request.image or (spec.image if spec else self._options.image)
        settings = {
            "docker_image": None if context else image,
            "cpus": spec.cpus if spec else 0,
            "memory_mb": request.limits.memory_bytes // MIB,
            "storage_mb": request.limits.disk_bytes // MIB,
            "workdir": request.folder or (spec.folder if spec else ""),
            "env": dict(spec.variables) if spec else {},
        }
        hosts = None if request.allowed is None else request.allowed.hosts
        process = self._process
        sandbox = secrets.token_hex(6)
        arguments = {
            "sandbox": sandbox,
            "provider": self._provider,
            "definition": str(context or ""),
            "title": context.parent.name if context else "longstride",
            "settings": {name: value for name, value in settings.items() if value},
            "network": policy_of(hosts, is_public=request.has_network),
        }
        limit_s = self._options.containers.build_timeout_s + self._options.start_timeout_s
        try:
            folder = await process.call("start", limit_s, arguments)
        except BaseException:
            process.send("stop", {"sandbox": sandbox})  # The start may still continue.
            raise
        return HarborSandbox(process, request, sandbox, folder)


def find_python(options: SandboxOptions) -> str:
    """Return the interpreter with the package. Raises: SandboxFailed: there is none."""
    if options.harbor_python:
        return options.harbor_python
    program = shutil.which("harbor")
    python = Path(program).resolve().parent / "python" if program else None
    if python is None or not python.exists():
        raise SandboxFailed(
            f"envs.sandbox.backend={options.backend} needs the package harbor in an environment"
            " with Python 3.12; run uv tool install harbor, or set envs.sandbox.harbor_python"
        )
    return str(python)


def policy_of(hosts: Sequence[str] | None, *, is_public: bool) -> dict[str, Any]:
    """Return a network in the words of Harbor; None means that the task has no list of hosts."""
    if is_public or (hosts and EVERY_HOST in hosts):
        return {"network_mode": "public"}
    if not hosts:
        return {"network_mode": "no-network"}
    return {"network_mode": "allowlist", "allowed_hosts": [*hosts]}


class HarborProcess:
    """A process with Harbor's interpreter, and its calls.

    Example: several sandboxes call at the same time. A task reads the answers and gives each to its
    call. The end of the process ends all calls with SandboxFailed.
    """

    def __init__(self, process: asyncio.subprocess.Process, where: str) -> None:
        self._process = process
        self._where = where
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, options: SandboxOptions) -> "HarborProcess":
        """Return a new process. Raises: SandboxFailed: its interpreter does not start."""
        python = find_python(options)
        try:
            process = await asyncio.create_subprocess_exec(
                *(python, "-P", str(SERVER)),  # The folder of the script has no packages.
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=MAX_LINE_BYTES,
                start_new_session=True,  # It deletes the sandboxes after the end of the hub.
            )
        except OSError as error:
            raise SandboxFailed(f"{options.backend}: {python}: {error}") from error
        return cls(process, options.backend)

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._reading.done()

    async def _read(self) -> None:
        """Give each answer to its call until the process ends."""
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                answer = json.loads(line)
                call = self._calls.pop(answer["number"], None)
                if call is not None and not call.done():
                    call.set_result(answer)
        finally:
            for call in self._calls.values():
                if not call.done():
                    call.set_result({"error": "the process of Harbor has ended"})
            self._calls.clear()
            # A process whose answers cannot be read deletes its sandboxes.
            if self._process.stdin is not None:
                self._process.stdin.close()

    async def call(self, name: str, timeout_s: float, arguments: Mapping[str, object]) -> Any:
        """Return the result of a call. Raises: SandboxFailed."""
        assert self._process.stdin is not None
        if self.has_ended:
            raise SandboxFailed(f"{self._where}: the process of Harbor has ended")
        number = self.send(name, arguments)
        answer = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.stdin.drain()
                reply = await answer
        except TimeoutError as error:
            raise SandboxFailed(f"{self._where}: {name} took over {timeout_s:g} s") from error
        except OSError as error:
            raise SandboxFailed(f"{self._where}: the process of Harbor has ended") from error
        finally:
            self._calls.pop(number, None)
        if "error" in reply:
            raise SandboxFailed(f"{self._where}: {reply['error']}")
        return reply["result"]

    def send(self, name: str, arguments: Mapping[str, object]) -> int:
        """Send a call, and return its number. Nothing waits for its answer."""
        assert self._process.stdin is not None
        number = next(self._numbers)
        request = {"number": number, "call": name, "arguments": arguments}
        self._process.stdin.write(f"{json.dumps(request)}\n".encode())
        return number

    async def close(self) -> None:
        """End the process, which deletes its sandboxes."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self._process.wait()
        await end(self._process)


class HarborSandbox:
    """One sandbox of Harbor."""

    def __init__(
        self, process: HarborProcess, request: SandboxRequest, sandbox: str, folder: str
    ) -> None:
        self._process = process
        self._sandbox = sandbox
        self._folder = folder
        self._allowed = request.allowed
        self._hosts = request.allowed.hosts if request.allowed else ()

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
        """Run a command; see `Sandbox.exec`. Background processes continue."""
        del keeps_processes
        check_command(argv, folder, variables or {})
        if self._allowed is not None and self._allowed.hosts != self._hosts:
            hosts = self._allowed.hosts
            policy = policy_of(hosts, is_public=False)
            await self._call("network", CALL_TIMEOUT_S, {"policy": policy})
            self._hosts = hosts
        # Without the mark, the provider did not start the command.
        mark = f"[{secrets.token_hex(8)}]"
        place = folder or self._folder
        command = f"{shlex.join(['sh', '-c', STARTER, 'sh', mark, place, *argv])} 2>&1 </dev/null"
        check_words("command with its quotes", [command])
        arguments = {
            "command": command,
            "variables": dict(variables or {}),
            "limit_s": timeout_s,
            "user": user,
            "max_bytes": max_output_bytes + MARK_BYTES,
        }
        result = await self._call("exec", timeout_s + 2 * GRACE_S, arguments)
        is_late = result["code"] is None
        before, found, begin = result["begin"].partition(mark)
        if not found and not is_late:
            raise SandboxFailed(f"the sandbox starts no command: {before.strip()[-300:]}")
        if begin == mark:
            raise RefusedBySandbox(f"the folder {place} cannot be entered")
        num_bytes = max(0, result["num_bytes"] - len((before + mark).encode()))
        return CommandResult(
            exit_code=-9 if is_late else result["code"],
            ended_by=CommandEnd.TIMEOUT if is_late else CommandEnd.EXIT,
            output=_shortened(begin.encode(), result["end"].encode(), num_bytes, max_output_bytes),
            num_bytes=num_bytes,
            seconds=result["seconds"],
        )

    async def write(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write a regular file; see `Sandbox.write`."""
        await self.write_all([SandboxFile(path=path, content=content, mode=mode)])

    async def write_all(self, files: Sequence[SandboxFile]) -> None:
        """Write files; see `Sandbox.write_all`."""
        paths = [posixpath.join(self._folder, file.path) for file in files]
        for path in paths:
            check_words("path", [path])
        folders = dict.fromkeys(map(posixpath.dirname, paths))
        await self._change(["mkdir", "-p", "--", *folders])
        for path, file in zip(paths, files, strict=True):
            content = base64.b64encode(file.content).decode()
            await self._call("write", CALL_TIMEOUT_S, {"path": path, "content": content})
            await self._change(["chmod", f"{file.mode:o}", path])

    async def _change(self, argv: Sequence[str]) -> None:
        """Run a command of the environment itself. Raises: RefusedBySandbox, SandboxFailed."""
        made = await self._as_root(argv, max_output_bytes=4096)
        if not made.is_ok:
            raise RefusedBySandbox(f"{argv[-1]}: {made.text.strip()[-300:]}")

    async def _as_root(self, argv: Sequence[str], *, max_output_bytes: int) -> CommandResult:
        """Return the result of a command of the environment itself.

        Raises: SandboxFailed: it took too long.
        """
        result = await self.exec(
            argv, timeout_s=GRACE_S, max_output_bytes=max_output_bytes, folder="/", user=ROOT
        )
        if result.ended_by is not CommandEnd.EXIT:
            raise SandboxFailed(f"{argv[0]} took over {GRACE_S:g} s in the sandbox")
        return result

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """Return a regular file; see `Sandbox.read`."""
        check_words("path", [path])
        path = posixpath.join(self._folder, path)
        # A download could write a link, which leads to a file of this machine.
        argv = ["sh", "-c", READER, "sh", path, str(max_bytes + 1)]
        result = await self._as_root(argv, max_output_bytes=2 * max_bytes + 4096)
        if result.exit_code == ABSENT:
            raise RefusedBySandbox(f"{path}: {os.strerror(errno.ENOENT)}")
        if result.exit_code == IRREGULAR:
            raise RefusedBySandbox(f"{path}: not a regular file")
        text = result.text.strip()
        if not result.is_ok:
            raise RefusedBySandbox(f"{path}: {text[-300:]}")
        try:
            content = base64.b64decode("".join(text.split()), validate=True)
        except ValueError as error:
            raise RefusedBySandbox(f"{path}: {text[-300:]}") from error
        if not content.endswith(b"."):
            raise SandboxFailed(f"the sandbox reads no {path}")
        content = content[:-1]
        if len(content) > max_bytes:
            raise RefusedBySandbox(f"{path}: it has more than {max_bytes} bytes")
        return content

    async def kill(self) -> None:
        """End all processes of the sandbox but its first one; its files remain."""
        await self._call("clear", CALL_TIMEOUT_S, {})

    async def delete(self) -> None:
        """Delete the sandbox. The end of the process deletes one that remains."""
        try:
            await self._call("stop", CALL_TIMEOUT_S, {})
        except SandboxFailed as error:
            logger.warning("a sandbox of harbor remains reason=%s", error)

    async def _call(self, name: str, timeout_s: float, arguments: Mapping[str, object]) -> Any:
        return await self._process.call(name, timeout_s, {"sandbox": self._sandbox, **arguments})


def _shortened(begin: bytes, end: bytes, num_bytes: int, max_bytes: int) -> bytes:
    """Return the begin and the end of an output, with a note between them.

    Args:
        end: empty if `begin` is the whole output.
    """
    if num_bytes <= max_bytes and not end:
        return begin
    half = max_bytes // 2
    return begin[:half] + TRUNCATED % (num_bytes - 2 * half) + (end or begin)[-half:]
