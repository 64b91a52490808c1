"""Task folders in the layouts of Harbor (`task.toml`) and Terminal-Bench (`task.yaml`)."""

import hashlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from common.errors import ConfigError
from envhub.envs.dataset.files import find_path
from envhub.envs.terminal.image import TaskFile, files_below, read_image

HARBOR = "task.toml"
BENCH = "task.yaml"
SOLUTIONS = ("solution/solve.sh", "solution.sh")
SCRIPTS = ("tests/test.sh", "tests/run-tests.sh", "run-tests.sh")
DOWNLOADS = re.compile(
    r"^\s*[^#\n]*\b(apt-get|apk add|pip3? install|uvx|uv pip|npm i|curl|wget)\b", re.M
)


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
        made = read_image(folder, where, is_built=has_images and bool(image))
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
    """Return a table of the settings; {} without it."""
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
    """Return the first of these files that a task has; None: it has none."""
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
    """Yield the files of the tests."""
    yield from files_below(folder / "tests", "/tests", folder, where)
    script = folder / "run-tests.sh"
    if script.is_file():
        yield TaskFile(source=script, target=f"/tests/{script.name}", mode=0o755)
