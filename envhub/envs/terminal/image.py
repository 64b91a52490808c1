"""The initial files of a task: a Dockerfile's lines that need no build."""

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError
from envhub.sandbox.interface import HOME

DOCKERFILES = ("environment/Dockerfile", "Dockerfile")
# Folders of the sandbox that cannot be the work folder.
SYSTEM = (
    *("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "proc", "dev", "sys", "run"),
    *("tests", "logs", "tmp"),
)
FOLDER = "/app"  # Work folder if the Dockerfile names none.
MAX_BYTES = 256 << 20  # Size of the files of one task.
BASE_ONLY = ("FROM", "WORKDIR", "COPY", "ADD", "ENV", "CMD", "ENTRYPOINT", "LABEL", "USER", "ARG")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFile:
    """A file that is written into the sandbox."""

    source: Path
    target: str
    mode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskImage:
    """The result of the supported lines of a Dockerfile."""

    folder: str
    files: tuple[TaskFile, ...]
    variables: Mapping[str, str]


def read_image(folder: Path, where: str, *, is_built: bool) -> TaskImage:
    """Return the work folder, files and variables of the Dockerfile, without running it.

    Raises: ConfigError: it has lines that only a build can perform, such as RUN.
    """
    path = next((folder / name for name in DOCKERFILES if (folder / name).is_file()), None)
    if path is None:
        context = folder / "environment"
        held = tuple(files_below(context, FOLDER, folder, where)) if context.is_dir() else ()
        return TaskImage(folder=FOLDER, files=held, variables={})
    work = "/"
    files: list[TaskFile] = []
    variables: dict[str, str] = {}
    for word, rest in _dockerfile_lines(path.read_text(encoding="utf-8")):
        if word not in BASE_ONLY and not is_built:
            raise ConfigError(
                f"{where}: {path.relative_to(folder)} has {word} {rest[:60]!r}, which only a"
                " container's build performs; set docker_image and envs.sandbox.backend=docker"
            )
        if word == "WORKDIR":
            work = os.path.normpath(os.path.join(work, rest))
        elif word == "ENV":
            variables |= dict(part.split("=", 1) for part in shlex.split(rest) if "=" in part)
        elif word in ("COPY", "ADD") and not is_built:
            files += _copied(path.parent, rest, work, folder, where)
    work = FOLDER if work == "/" else work
    _check_folders(work, files, where)
    return TaskImage(folder=work, files=tuple(files), variables=variables)


def _check_folders(work: str, files: list[TaskFile], where: str) -> None:
    """Raise ConfigError if the sandbox cannot have the work folder, or a file is elsewhere."""
    if not re.fullmatch(r"/[\w./-]+", work) or work.split("/")[1] in SYSTEM:
        raise ConfigError(f"{where}: WORKDIR {work} is a folder of the system")
    for file in files:
        if not file.target.startswith((f"{work}/", "/tmp/", f"{HOME}/")):
            raise ConfigError(
                f"{where}: COPY writes {file.target}, which is outside of the work folder {work}"
            )


def _dockerfile_lines(text: str) -> Iterator[tuple[str, str]]:
    """Yield the instruction and the rest of each line; a backslash continues a line."""
    kept = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(kept).replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word:
            yield word.upper(), rest.strip()


def _copied(context: Path, rest: str, work: str, folder: Path, where: str) -> Iterator[TaskFile]:
    """Yield the files of a COPY line. Raises: ConfigError: a source is missing."""
    words = [word for word in shlex.split(rest) if not word.startswith("--")]
    if len(words) < 2 or "--from" in rest or rest.startswith("["):
        raise ConfigError(f"{where}: COPY {rest[:80]!r} is not supported")
    *sources, target = words
    is_folder = target.endswith(("/", ".")) or len(sources) > 1
    target = os.path.normpath(os.path.join(work, target))
    for source in sources:
        found = sorted(context.glob(source)) if source not in (".", "./") else [context]
        if not found:
            raise ConfigError(f"{where}: COPY {source}: no such file")
        for each in found:
            into = f"{target}/{each.name}" if each.is_file() and is_folder else target
            for file in files_below(each, into, folder, where):
                if file.source.name not in ("Dockerfile", "docker-compose.yaml"):
                    yield file


def files_below(path: Path, target: str, folder: Path, where: str) -> Iterator[TaskFile]:
    """Yield a file, or all files of a folder. Raises: ConfigError: a link leaves the task."""
    found = [path] if path.is_file() else sorted(e for e in path.rglob("*") if e.is_file())
    total = 0
    for each in found:
        if not each.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"{where}: {each.relative_to(folder)} is a link out of the task")
        total += each.stat().st_size
        if total > MAX_BYTES:
            raise ConfigError(f"{where}: {path.name} has more than {MAX_BYTES >> 20} MiB")
        below = "" if each == path else f"/{each.relative_to(path).as_posix()}"
        mode = 0o755 if os.access(each, os.X_OK) else 0o644
        yield TaskFile(source=each, target=f"{target}{below}", mode=mode)
