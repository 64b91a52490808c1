"""The programs `docker` and `podman`: their calls, and the images that tasks need."""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import posixpath
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from common.config.envs import ContainerOptions
from envhub.sandbox.interface import ContainerSpec, Healthcheck, ImageBuild, SandboxFailed

logger = logging.getLogger(__name__)

ENGINES = ("docker", "podman")
PREFIX = "longstride-sandbox-"
BUILT = "localhost/longstride-task"  # Name of the images of builds. Their tag is a digest.
LABEL = "longstride.owner"  # Label of containers and volumes: the process that created them.
PROBE_TIMEOUT_S = 60.0
CLEANUP_POLL_S = 0.5  # Interval between two searches for new descendants of a program.
CLEANUP_S = 20.0  # Time in which a build without its step removes its container.
MAX_TEXT = 800  # Characters of an error of the program.
MAX_BYTES = 1 << 20  # Size of the kept output of a call.
NANOSECONDS = 1e9
RETRY_S = 300.0  # Seconds after which a failed build is tried again.
SHELLS = ("sh", "bash", "dash", "ash")
# Errors of a build whose steps cannot run as containers. `chroot` runs them without a runtime.
NO_RUNTIME = re.compile(r"runc|crun|OCI runtime|cgroup|rlimit|namespace|mount", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReply:
    """The result of a call: its exit code, its output, and the output for errors."""

    code: int
    output: bytes
    errors: bytes = b""

    @property
    def text(self) -> str:
        """The output as text."""
        return self.output.decode("utf-8", errors="replace").strip()

    @property
    def error(self) -> str:
        """The end of both outputs, for an error."""
        text = self.output + b"\n" + self.errors
        return text.decode("utf-8", errors="replace").strip()[-MAX_TEXT:]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerImage:
    """The settings of an image.

    Attributes:
        digest: the id of the image, which names the same files for ever.
        only_runs: whether its entry point is a shell, which only runs another command.
    """

    digest: str
    folder: str
    user: str
    only_runs: bool
    healthcheck: Healthcheck | None


class ContainerEngine:
    """Calls `docker` or `podman`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.program = shutil.which(name) or ""

    async def call(
        self,
        *words: str,
        timeout_s: float = PROBE_TIMEOUT_S,
        stdin: bytes = b"",
        temporary_folder: str = "",
    ) -> EngineReply:
        """Return the result of a call; one that takes too long has the exit code 1.

        Args:
            temporary_folder: folder of the program's temporary files; "" means its default.
        """
        variables = {"TMPDIR": temporary_folder} if temporary_folder else {}
        process = await asyncio.create_subprocess_exec(
            *(self.program, *words),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=folder_of_call(words[0]),
            env={**os.environ, **variables},
        )
        try:
            async with asyncio.timeout(timeout_s):
                output, errors = await process.communicate(stdin)
        except TimeoutError:
            return EngineReply(code=1, output=f"no answer within {timeout_s:g} s".encode())
        finally:
            await end(process)
        code = process.returncode or 0
        return EngineReply(code=code, output=output[-MAX_BYTES:], errors=errors[-MAX_BYTES:])

    async def checked(self, *words: str, timeout_s: float = PROBE_TIMEOUT_S) -> str:
        """Return the output of a call. Raises: SandboxFailed: it failed."""
        reply = await self.call(*words, timeout_s=timeout_s)
        if reply.code != 0:
            raise SandboxFailed(f"{self.name} {words[0]}: {reply.error}")
        return reply.text


def folder_of_call(command: str) -> str | None:
    """Return the folder in which a call of the engine works; None for the present one.

    Podman's monitor writes a file `oom` there when a container has used up its memory.
    """
    return tempfile.gettempdir() if command in ("start", "exec") else None


async def end(process: asyncio.subprocess.Process) -> None:
    """End a process that runs with its descendants, such as the step of a build.

    A build whose step is killed removes its unfinished container and ends by itself.
    """
    deadline_s = time.monotonic() + CLEANUP_S
    while process.returncode is None:
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(process.pid).children(recursive=True)
        if not children or time.monotonic() > deadline_s:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLEANUP_POLL_S):
                await process.wait()


class Images:
    """The images of tasks: builds, pulls and removes them."""

    def __init__(self, engine: ContainerEngine, options: ContainerOptions) -> None:
        self._engine = engine
        self._options = options
        self._known: dict[str, ContainerImage] = {}
        # Times and errors of builds that failed, which a second try would repeat.
        self._failed: dict[str, tuple[float, str]] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._building = asyncio.Semaphore(options.max_builds)
        self._isolation: list[str] = []

    async def get(self, spec: ContainerSpec) -> ContainerImage:
        """Return the image of a container; it is built or pulled if it is absent.

        Raises: SandboxFailed: with the image's name, and the reason.
        """
        name = await self._built(spec.build) if spec.build is not None else spec.image
        async with self._lock(name):
            if name not in self._known:
                self._known[name] = await self._inspected(name)
        return self._known[name]

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    async def _inspected(self, name: str) -> ContainerImage:
        """Return the settings of an image; an absent one is pulled. Raises: SandboxFailed."""
        words = ("image", "inspect", name)
        reply = await self._engine.call(*words)
        if reply.code != 0:
            pulled = await self._engine.call(
                "pull", "--quiet", name, timeout_s=self._options.pull_timeout_s
            )
            if pulled.code != 0:
                raise SandboxFailed(
                    f"image {name}: it is absent and cannot be pulled: {pulled.error}"
                )
            reply = await self._engine.call(*words)
        try:
            return read_image_settings(json.loads(reply.text)[0])
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            raise SandboxFailed(f"image {name}: it cannot be inspected: {reply.error}") from error

    async def _built(self, build: ImageBuild) -> str:
        """Return the name of the image of a build. Raises: SandboxFailed."""
        name = f"{BUILT}:{await asyncio.to_thread(digest_of_build, build)}"
        async with self._lock(f"build {name}"):
            if name in self._known:
                return name
            failed_s, failure = self._failed.get(name, (-RETRY_S, ""))
            if time.monotonic() - failed_s < RETRY_S:
                raise SandboxFailed(failure)
            if (await self._engine.call("image", "inspect", name)).code == 0:
                return name
            async with self._building:
                await self._build(build, name)
            await self._prune(name)
        return name

    async def _build(self, build: ImageBuild, name: str) -> None:
        """Build an image. Raises: SandboxFailed."""
        logger.info("building image=%s context=%s", name, build.context)
        words = ["--file", str(build.context / build.dockerfile), "--tag", name]
        words += ["--target", build.target] if build.target else []
        words += [f"--build-arg={key}={value}" for key, value in build.arguments.items()]
        # The format of Docker keeps HEALTHCHECK and SHELL.
        words += ["--format", "docker"] if self._engine.name == "podman" else []
        words += ["--network", "none"] if not self._options.build_network else []
        where = f"image of {build.context / build.dockerfile}"
        limit_s = min(build.timeout_s, self._options.build_timeout_s)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + limit_s
        for isolation in ([*self._isolation], ["--isolation", "chroot"]):
            reply = await self._engine.call(
                *("build", *isolation, *words, str(build.context)),
                timeout_s=max(0.1, deadline_s - loop.time()),
            )
            if reply.code == 0:
                self._isolation = isolation
                return
            if loop.time() >= deadline_s:
                raise SandboxFailed(
                    f"{where}: the build took longer than {limit_s:g} s;"
                    " raise environment.build_timeout_sec of the task, and"
                    " envs.sandbox.containers.build_timeout_s"
                )
            if self._engine.name != "podman" or not NO_RUNTIME.search(reply.error):
                break
        failure = f"{where}: the build failed: {reply.error}"
        self._failed[name] = (time.monotonic(), failure)
        raise SandboxFailed(failure)

    async def _prune(self, newest: str) -> None:
        """Remove the oldest images of builds beyond `max_images`; those in use remain."""
        reply = await self._engine.call(
            "images", "--format", "{{.Repository}}:{{.Tag}}", "--filter", f"reference={BUILT}"
        )
        names = [line for line in reply.text.splitlines() if line.startswith(f"{BUILT}:")]
        for name in [name for name in names if name != newest][self._options.max_images - 1 :]:
            if (await self._engine.call("rmi", name)).code == 0:
                logger.info("removed image=%s", name)
                self._known.pop(name, None)


def read_image_settings(inspected: Mapping[str, Any]) -> ContainerImage:
    """Return the settings of `image inspect`. Raises: ValueError, LookupError, TypeError."""
    config = inspected.get("Config") or {}
    entry = config.get("Entrypoint") or []
    check = config.get("Healthcheck") or inspected.get("Healthcheck") or {}
    return ContainerImage(
        digest=str(inspected["Id"]),
        folder=config.get("WorkingDir") or "/",
        user=config.get("User") or "",
        only_runs=len(entry) == 1 and posixpath.basename(entry[0]) in SHELLS,
        healthcheck=_image_healthcheck(check),
    )


def _image_healthcheck(check: Mapping[str, object]) -> Healthcheck | None:
    """Return the HEALTHCHECK of an image, whose times are in nanoseconds."""
    words = check.get("Test")
    argv = health_command(words if isinstance(words, list) else [])
    if not argv:
        return None

    def seconds(name: str, default: float) -> float:
        return float(str(check.get(name) or 0)) / NANOSECONDS or default

    return Healthcheck(
        argv=argv,
        interval_sec=seconds("Interval", 30.0),
        timeout_sec=seconds("Timeout", 30.0),
        start_period_sec=seconds("StartPeriod", 0.0),
        start_interval_sec=seconds("StartInterval", 5.0),
        retries=int(str(check.get("Retries") or 3)),
    )


def health_command(words: Sequence[str]) -> list[str]:
    """Return the command of a health check, whose first word is its kind; [] means none."""
    if not words or words[0] == "NONE":
        return []
    if words[0] == "CMD-SHELL":
        return ["sh", "-c", " ".join(words[1:])]
    return [*words[1:]] if words[0] == "CMD" else ["sh", "-c", " ".join(words)]


def digest_of_build(build: ImageBuild) -> str:
    """Return a digest of the files, their modes and the settings of a build."""
    settings = (build.dockerfile, build.target, sorted(build.arguments.items()))
    digest = hashlib.sha256(repr(settings).encode())
    for path in sorted(build.context.rglob("*")):
        name = path.relative_to(build.context).as_posix()
        if path.is_symlink():
            digest.update(f"{name}\0link\0{os.readlink(path)}\0".encode())
        elif path.is_file():
            content = path.read_bytes()
            is_program = os.access(path, os.X_OK)
            digest.update(f"{name}\0{is_program}\0{len(content)}\0".encode() + content)
    dockerfile = (build.context / build.dockerfile).resolve()
    if not dockerfile.is_relative_to(build.context.resolve()) and dockerfile.is_file():
        digest.update(dockerfile.read_bytes())
    return digest.hexdigest()[:32]
