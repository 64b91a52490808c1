"""Task folders in the layouts of Harbor (`task.toml`) and Terminal-Bench (`task.yaml`)."""

import hashlib
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from common.errors import ConfigError
from envhub.envs.dataset.files import find_path
from envhub.sandbox.interface import HOME

HARBOR = "task.toml"
BENCH = "task.yaml"
DOCKERFILES = ("environment/Dockerfile", "Dockerfile")
SOLUTIONS = ("solution/solve.sh", "solution.sh")
SCRIPTS = ("tests/test.sh", "tests/run-tests.sh", "run-tests.sh")
# Folders of the sandbox that cannot be the work folder.
SYSTEM = (
    *("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "proc", "dev", "sys", "run"),
    *("tests", "logs", "tmp"),
)
FOLDER = "/app"  # Work folder if the Dockerfile names none.
MAX_BYTES = 256 << 20  # Size of the files of one task.
DOWNLOADS = re.compile(
    r"^\s*[^#\n]*\b(apt-get|apk add|pip3? install|uvx|uv pip|npm i|curl|wget)\b", re.M
)
BASE_ONLY = ("FROM", "WORKDIR", "COPY", "ADD", "ENV", "CMD", "ENTRYPOINT", "LABEL", "USER", "ARG")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFile:
    """A file that is written into the sandbox."""

    source: Path
    target: str
    mode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalTask:
    """One task.

    Attributes:
        files: the initial files of the work folder.
        tests: the files of `/tests`, which are written at the end.
        command: the command of the tests.
        pytest: whether the command needs pytest.
        variables: environment variables of the image.
        test_variables: environment variables of the tests.
        test_timeout_s, agent_timeout_s: limits of the task; None without one.
        solution: the reference solution as a script; None without one.
        image: the container image; "" without one.
    """

    name: str
    instruction: str
    folder: str
    files: tuple[TaskFile, ...]
    tests: tuple[TaskFile, ...]
    command: tuple[str, ...]
    needs_pytest: bool
    variables: Mapping[str, str]
    test_variables: Mapping[str, str]
    test_timeout_s: float | None
    agent_timeout_s: float | None
    solution: str | None
    image: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Image:
    """The result of the supported lines of a Dockerfile."""

    folder: str
    files: tuple[TaskFile, ...]
    variables: Mapping[str, str]


def load_tasks_of(key: str, given: str, *, has_images: bool) -> list[TerminalTask]:
    """Return the tasks of a folder, in the order of their names. A task's own folder is one task.

    Args:
        key: the setting that named the folder.
        has_images: the sandbox runs container images, so a Dockerfile's commands are not needed.

    Raises: ConfigError: no task, or a task that cannot be played.
    """
    root = find_path(key, given)
    if not root.is_dir():
        raise ConfigError(f"{key}={given}: not a folder of tasks")
    folders = [root] if is_task(root) else sorted(each for each in root.iterdir() if is_task(each))
    if not folders:
        raise ConfigError(f"{key}={given}: no folder in it has a {HARBOR} or {BENCH}")
    return [load_task_of(folder, f"{key}={given}", has_images=has_images) for folder in folders]


def is_task(folder: Path) -> bool:
    """Return whether a folder has the file of a task."""
    return (folder / HARBOR).is_file() or (folder / BENCH).is_file()


def digest_of_tasks(key: str, given: str) -> str:
    """Return a digest of all files of the tasks."""
    root = find_path(key, given)
    digest = hashlib.sha256()
    for path in sorted(each for each in root.rglob("*") if each.is_file()):
        digest.update(f"{path.relative_to(root).as_posix()}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def load_task_of(folder: Path, where: str, *, has_images: bool = False) -> TerminalTask:
    """Return the task of a folder. Raises: ConfigError, with the reason."""
    where = f"{where}: task {folder.name}"
    try:
        settings, instruction = _settings(folder)
        image = str(_table(settings, "environment").get("docker_image") or "")
        made = _image(folder, where, is_built=has_images and bool(image))
        command, needs_pytest = _command(folder, where)
        if not has_images:
            _refuse_downloads(folder, where)
        verifier = _table(settings, "verifier")
        test_s = verifier.get("timeout_sec", settings.get("max_test_timeout_sec"))
        agent_s = _table(settings, "agent").get(
            "timeout_sec", settings.get("max_agent_timeout_sec")
        )
        return TerminalTask(
            name=folder.name,
            instruction=instruction,
            folder=made.folder,
            files=made.files,
            tests=tuple(_test_files(folder, where)),
            command=command,
            needs_pytest=needs_pytest,
            variables=made.variables,
            test_variables={k: str(v) for k, v in _table(verifier, "env").items()},
            test_timeout_s=None if test_s is None else float(test_s),
            agent_timeout_s=None if agent_s is None else float(agent_s),
            solution=_first_text(folder, SOLUTIONS),
            image=image,
        )
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{where}: {error}") from error
    except (TypeError, AttributeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where}: a value has a wrong type: {error}") from error


def _table(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return settings.get(name) or {}


def _settings(folder: Path) -> tuple[Mapping[str, Any], str]:
    """Return the settings and the instruction. Raises: ValueError."""
    if (folder / HARBOR).is_file():
        settings = tomllib.loads((folder / HARBOR).read_text(encoding="utf-8"))
        if (
            settings.get("steps")
            or _table(settings, "verifier").get("environment_mode") == "separate"
        ):
            raise ConfigError(f"task {folder.name}: several steps, or a separate verifier")
    else:
        settings = yaml.safe_load((folder / BENCH).read_text(encoding="utf-8")) or {}
    path = folder / "instruction.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else settings.get("instruction")
    if not text:
        listed = {each.get("key"): each for each in settings.get("descriptions") or []}
        text = listed.get("base", {}).get("description")
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"task {folder.name}: no instruction.md, and no instruction in {BENCH}")
    return settings, text.strip()


def _first_text(folder: Path, names: tuple[str, ...]) -> str | None:
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    return None if found is None else found.read_text(encoding="utf-8")


def _command(folder: Path, where: str) -> tuple[tuple[str, ...], bool]:
    """Return the command of the tests, and whether it needs pytest. Raises: ConfigError."""
    for name in SCRIPTS:
        if (folder / name).is_file():
            return ("bash", f"/tests/{Path(name).name}"), False
    found = sorted((folder / "tests").glob("test_*.py"))
    if not found:
        raise ConfigError(f"{where}: no {', '.join(SCRIPTS)}, and no tests/test_*.py")
    paths = [f"/tests/{path.name}" for path in found]
    # Python's option -I ignores modules beside the agent's work.
    options = ["--rootdir", "/tests", "-p", "no:cacheprovider", "-q"]
    return ("python3", "-I", "-m", "pytest", *options, *paths), True


def _refuse_downloads(folder: Path, where: str) -> None:
    """Raise ConfigError if the tests need a network, which the sandbox does not have."""
    for name in SCRIPTS:
        path = folder / name
        if path.is_file() and (found := DOWNLOADS.search(path.read_text(encoding="utf-8"))):
            raise ConfigError(
                f"{where}: {name} downloads ({found[0].strip()[:60]}), and the sandbox has no"
                " network; give it tests without downloads, or an image with the programs"
                " (envs.sandbox.backend=docker)"
            )


def _test_files(folder: Path, where: str) -> Iterator[TaskFile]:
    yield from _files_below(folder / "tests", "/tests", folder, where)
    script = folder / "run-tests.sh"
    if script.is_file():
        yield TaskFile(source=script, target=f"/tests/{script.name}", mode=0o755)


def _files_below(path: Path, target: str, folder: Path, where: str) -> Iterator[TaskFile]:
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


def _image(folder: Path, where: str, *, is_built: bool) -> _Image:
    """Return the work folder, files and variables of the Dockerfile, without running it.

    Raises: ConfigError: it has lines that only a build can perform, such as RUN.
    """
    path = next((folder / name for name in DOCKERFILES if (folder / name).is_file()), None)
    if path is None:
        context = folder / "environment"
        held = tuple(_files_below(context, FOLDER, folder, where)) if context.is_dir() else ()
        return _Image(folder=FOLDER, files=held, variables={})
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
    return _Image(folder=work, files=tuple(files), variables=variables)


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
            for file in _files_below(each, into, folder, where):
                if file.source.name not in ("Dockerfile", "docker-compose.yaml"):
                    yield file
