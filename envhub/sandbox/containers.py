"""Sandboxes in containers of Docker or Podman."""

import asyncio
import contextlib
import secrets
import shutil
from functools import partial

from common.config.sandbox.options import SandboxOptions
from envhub.sandbox.apart import run_apart
from envhub.sandbox.interface import HOME, LOGS, TESTS, VARIABLES, SandboxFailed, SandboxRequest
from envhub.sandbox.process import AgentSandbox, Launch, agent_argv

UID = 1000
PREFIX = "longstride-sandbox-"
OWN_BYTES = 64 << 20  # Memory of the agent.
OWN_PROCESSES = 8
PROBE_TIMEOUT_S = 30.0
REMOVE_TIMEOUT_S = 30.0


class Containers:
    """Creates sandboxes with `docker run` or `podman run`."""

    def __init__(self, options: SandboxOptions) -> None:
        self._options = options
        self._name = options.backend
        self._program = shutil.which(self._name) or ""

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
        name = f"{PREFIX}{secrets.token_hex(8)}"
        remove = partial(_run, [self._program, "rm", "--force", name], REMOVE_TIMEOUT_S)
        argv = [self._program, *container_arguments(request, name, self._options.image)]
        try:
            return await AgentSandbox.start(
                Launch(argv=argv, options={}, remove=remove),
                folder=request.folder,
                timeout_s=self._options.start_timeout_s,
            )
        except SandboxFailed as error:
            image = request.image or self._options.image
            raise SandboxFailed(f"{self._name} image {image}: {error}") from error


def container_arguments(request: SandboxRequest, name: str, image: str) -> list[str]:
    """Return the arguments of `docker run` for a sandbox."""
    limits = request.limits
    small = max(1 << 20, limits.disk_bytes // 4)
    memory = limits.memory_bytes + OWN_BYTES + 3 * limits.disk_bytes
    argv = ["run", "--rm", "--interactive", "--name", name, "--hostname", "sandbox"]
    argv += ["--network", "none", "--ipc", "private", "--read-only"]
    argv += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    argv += ["--user", f"{UID}:{UID}", "--workdir", "/"]
    argv += ["--memory", str(memory), "--memory-swap", str(memory)]
    argv += ["--pids-limit", str(limits.processes + OWN_PROCESSES)]
    argv += ["--shm-size", str(small)]
    for variable, value in VARIABLES.items():
        argv += ["--env", f"{variable}={value}"]
    sizes = {"/tmp": limits.disk_bytes, request.folder: limits.disk_bytes}
    sizes |= dict.fromkeys((HOME, TESTS, LOGS), small)
    for folder, size in sizes.items():
        argv += ["--tmpfs", f"{folder}:rw,exec,nosuid,nodev,size={size},mode=1777"]
    python, *agent = agent_argv("python3", limits, request.folder)
    return [*argv, "--entrypoint", python, request.image or image, *agent]


async def _run(argv: list[str], timeout_s: float) -> tuple[int, str]:
    """Return the exit code of a command, and its output as text."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        return 1, f"no answer within {timeout_s:g} s"
    return process.returncode or 0, output.decode("utf-8", errors="replace").strip()[-500:]
