"""Task folders in the layouts of Harbor (`task.toml`) and Terminal-Bench (`task.yaml`)."""

import base64
import hashlib
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from common.errors import ConfigError
from envhub.envs.dataset.files import find_path
from envhub.envs.terminal.image import (
    DOCKERFILES,
    FOLDER,
    TaskFile,
    TaskImage,
    files_below,
    is_work_folder,
    read_image,
)
from envhub.envs.terminal.settings import BENCH, HARBOR, Healthcheck, read_settings
from envhub.sandbox.interface import SOLUTION

SOLUTIONS = ("solution/solve.sh", "solution.sh")
SHELLS = ("sh", "bash", "dash", "zsh")  # Interpreters whose scripts bash runs.
SCRIPTS = ("tests/test.sh", "tests/run-tests.sh", "run-tests.sh")
DOWNLOADS = re.compile(
    r"^\s*[^#\n]*\b(apt-get|apk add|pip3? install|uvx|uv pip|npm i|curl|wget)\b", re.M
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalTask:
    """One task.

    Attributes:
        folder: the folder that the commands may write; "" means the container's work folder.
        work: the directory in which commands start; "" means `folder`.
        files: the initial files. A relative target is below the work folder.
        tests: the files of `/tests`, which are written at the end.
        command: the command of the tests.
        pytest: whether the command needs pytest.
        variables: environment variables of all commands.
        test_variables: environment variables of the tests.
        test_timeout_s, agent_timeout_s: limits of the task; None without one.
        memory_bytes, disk_bytes: limits of the task; None without one.
        solution: the reference solution as a script; None without one.
        image: the container image; "" without one.
        healthcheck: a command that must succeed before the first one of the agent.
    """

    name: str
    instruction: str
    folder: str
    work: str
    files: tuple[TaskFile, ...]
    tests: tuple[TaskFile, ...]
    command: tuple[str, ...]
    needs_pytest: bool
    variables: Mapping[str, str]
    test_variables: Mapping[str, str]
    test_timeout_s: float | None
    agent_timeout_s: float | None
    memory_bytes: int | None
    disk_bytes: int | None
    solution: str | None
    image: str
    healthcheck: Healthcheck | None


def load_tasks_of(
    key: str, path: str, *, has_images: bool, without_network: bool = False
) -> list[TerminalTask]:
    """Return the tasks of a folder, in the order of their names. A task's own folder is one task.

    Args:
        key: the setting that named the folder.
        has_images: the sandbox runs container images, so a Dockerfile's commands are not needed.
        without_network: a task that asks for a network is played without one.

    Raises: ConfigError: no task, or a task that cannot be played.
    """
    root = find_path(key, path)
    if not root.is_dir():
        raise ConfigError(f"{key}={path}: not a folder of tasks")
    folders = [root] if is_task(root) else sorted(each for each in root.iterdir() if is_task(each))
    if not folders:
        raise ConfigError(f"{key}={path}: no folder in it has a {HARBOR} or {BENCH}")
    where = f"{key}={path}"
    return [
        load_task_of(folder, where, has_images=has_images, without_network=without_network)
        for folder in folders
    ]


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


def load_task_of(
    folder: Path, where: str, *, has_images: bool = False, without_network: bool = False
) -> TerminalTask:
    """Return the task of a folder. Raises: ConfigError, with the reason."""
    where = f"{where}: task {folder.name}"
    try:
        settings = read_settings(folder, without_network=without_network)
        image = settings.image if has_images else ""
        has_dockerfile = any((folder / name).is_file() for name in DOCKERFILES)
        if settings.image and not has_images and not has_dockerfile:
            raise ConfigError(
                f"{HARBOR}: environment.docker_image={settings.image}: bubblewrap runs no images;"
                " set envs.sandbox.backend=docker or podman"
            )
        made = _placed(read_image(folder, where, is_built=bool(image)), settings.work, where)
        command, needs_pytest = _command(folder, where)
        if not (image and without_network):
            _refuse_downloads(folder, where, image)
        return TerminalTask(
            name=folder.name,
            instruction=settings.instruction,
            folder=made.folder,
            work=made.work,
            files=made.files,
            tests=tuple(_test_files(folder, where)),
            command=command,
            needs_pytest=needs_pytest,
            variables={**made.variables, **settings.variables},
            test_variables=settings.test_variables,
            test_timeout_s=settings.test_timeout_s,
            agent_timeout_s=settings.agent_timeout_s,
            memory_bytes=settings.memory_bytes,
            disk_bytes=settings.disk_bytes,
            solution=_solution(folder, where, settings.solution_variables),
            image=image,
            healthcheck=settings.healthcheck,
        )
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{where}: {error}") from error
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(where) else f"{where}: {text}") from error
    except (TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"{where}: a value has a wrong type: {error}") from error


def _placed(made: TaskImage, work: str, where: str) -> TaskImage:
    """Return the image with the work folder of the settings. Raises: ConfigError."""
    if not work or work == made.work:
        return made
    if not work.startswith("/"):
        raise ConfigError(f"{HARBOR}: environment.workdir={work!r} is no absolute path")
    if not is_work_folder(work):
        raise ConfigError(f"{HARBOR}: environment.workdir={work} is a folder of the system")
    if made.folder and f"{work}/".startswith(f"{made.folder}/"):
        return replace(made, work=work)
    if not made.folder or not made.files:
        return replace(made, folder=work, work=work)
    if all(file.target.startswith(f"{FOLDER}/") for file in made.files) and not made.work:
        files = (replace(f, target=work + f.target.removeprefix(FOLDER)) for f in made.files)
        return replace(made, folder=work, work=work, files=tuple(files))  # No Dockerfile.
    raise ConfigError(
        f"{HARBOR}: environment.workdir={work} is outside of the Dockerfile's folder {made.folder}"
    )


def _solution(folder: Path, where: str, variables: Mapping[str, str]) -> str | None:
    """Return the reference solution as one command; None without one. Raises: ConfigError."""
    path = next((folder / name for name in SOLUTIONS if (folder / name).is_file()), None)
    if path is None:
        return None
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    beside = folder / "solution"
    files = [*files_below(beside, SOLUTION, folder, where)] if path.parent == beside else []
    text = path.read_text(encoding="utf-8")
    if len(files) <= 1 and _is_of_shell(text):
        return "\n".join([*exports, text])
    return "\n".join([*exports, *map(_written, files), f"{SOLUTION}/{path.name}"])


def _written(file: TaskFile) -> str:
    """Return the command that writes a file of the solution."""
    target = shlex.quote(file.target)
    content = file.source.read_bytes()
    mode = 0o755 if content.startswith(b"#!") else file.mode
    lines = [f"mkdir -p {shlex.quote(str(Path(file.target).parent))}"]
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = ""
    if text.endswith("\n") and "\nEOF\n" not in f"\n{text}" and "\0" not in text:
        lines += [f"cat > {target} <<'EOF'", f"{text}EOF"]
    else:
        lines += [f"base64 -d > {target} <<'EOF'", base64.encodebytes(content).decode() + "EOF"]
    return "\n".join([*lines, f"chmod {mode:o} {target}"])


def _is_of_shell(text: str) -> bool:
    """Return whether the first line of a script names a shell, or no program."""
    first = text.split("\n", 1)[0]
    return not first.startswith("#!") or first.rstrip().split("/")[-1].split()[-1] in SHELLS


def _command(folder: Path, where: str) -> tuple[tuple[str, ...], bool]:
    """Return the command of the tests, and whether it needs pytest. Raises: ConfigError."""
    for name in SCRIPTS:
        path = folder / name
        if path.is_file():
            target = f"/tests/{path.name}"
            is_of_shell = _is_of_shell(path.read_text(encoding="utf-8"))
            return ("bash", target) if is_of_shell else (target,), False
    found = sorted((folder / "tests").glob("test_*.py"))
    if not found:
        raise ConfigError(f"{where}: no {', '.join(SCRIPTS)}, and no tests/test_*.py")
    paths = [f"/tests/{path.name}" for path in found]
    # Python's option -I ignores modules beside the agent's work.
    options = ["--rootdir", "/tests", "-p", "no:cacheprovider", "-q"]
    return ("python3", "-I", "-m", "pytest", *options, *paths), True


def _refuse_downloads(folder: Path, where: str, image: str) -> None:
    """Raise ConfigError if the tests need a network, which the sandbox does not have."""
    remedy = "give it tests without downloads, or an image with the programs"
    remedy += (
        f" (envs.sandbox.backend=docker{', envs.terminal.without_network=true' * bool(image)})"
    )
    for name in SCRIPTS:
        path = folder / name
        if path.is_file() and (found := DOWNLOADS.search(path.read_text(encoding="utf-8"))):
            raise ConfigError(
                f"{where}: {name} downloads ({found[0].strip()[:60]}), and the sandbox has no"
                f" network; {remedy}"
            )


def _test_files(folder: Path, where: str) -> Iterator[TaskFile]:
    """Yield the files of the tests."""
    for file in files_below(folder / "tests", "/tests", folder, where):
        yield replace(file, mode=0o755) if file.source.suffix == ".sh" else file
    script = folder / "run-tests.sh"
    if script.is_file():
        yield TaskFile(source=script, target=f"/tests/{script.name}", mode=0o755)
