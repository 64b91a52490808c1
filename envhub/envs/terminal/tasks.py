"""Task folders in the layouts of Harbor (`task.toml`) and Terminal-Bench (`task.yaml`)."""

import base64
import hashlib
import math
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from common.errors import ConfigError
from common.user_code import find_path
from envhub.envs.terminal.image import (
    DOCKERFILES,
    FOLDER,
    TaskFile,
    TaskImage,
    files_below,
    is_shell,
    is_work_folder,
    read_image,
)
from envhub.sandbox.interface import LOGS, MIB, SOLUTION, TESTS, USERS

HARBOR = "task.toml"
BENCH = "task.yaml"
COMPOSE = ("environment/docker-compose.yaml", "docker-compose.yaml")
# Files beside the settings that change a task, and that no code here performs.
OTHER_FILES = ("trajectory.json", "environment/singularity-compose.yaml", ".harborignore")
OTHER_FILES += ("tests/.harborignore", "solution/.harborignore")
SCHEMAS = ("1.0", "1.1", "1.2", "1.3", "1.4")
TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
INTERPOLATION = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)|(\$\$)")
CANARY = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)
SIZES = {"K": 1 / 1024, "M": 1, "G": 1024}
# Variables that Terminal-Bench sets for docker-compose.yaml.
BENCH_VARIABLES = {
    "T_BENCH_TEST_DIR": TESTS,
    "T_BENCH_CONTAINER_LOGS_PATH": LOGS,
    "T_BENCH_CONTAINER_AGENT_LOGS_PATH": "/agent-logs",
}
KEEP_ALIVE = re.compile(r"(?:(?:/bin/)?(?:ba)?sh -c )?(?:sleep infinity|tail -f /dev/null)")
MAIN_SERVICES = ("main", "client")
NO_NETWORK = "sandboxes have no network; envs.terminal.without_network=true plays the task without"


class Use(StrEnum):
    """The use of a field. REFUSED: only a value that means nothing is accepted."""

    OBEYED = "obeyed"
    DESCRIPTION = "description"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """The use of a field of a task's settings.

    Attributes:
        accepted: values of a refused field that change nothing.
        reason: why other values are refused.
    """

    use: Use
    accepted: tuple[Any, ...] = (None, [], {}, "")
    reason: str = ""


OBEYED = Field(use=Use.OBEYED)
DESCRIPTION = Field(use=Use.DESCRIPTION)


def _refused(reason: str, *accepted: Any) -> Field:
    return Field(use=Use.REFUSED, accepted=(None, [], {}, "", *accepted), reason=reason)


USER = _refused("commands and tests run as the only user of the sandbox", *USERS, 1000)
COLLECTED = _refused("no files of an episode are collected")
ONE_STEP = _refused("only tasks of one step are played")
APART = _refused("a separate verifier is not supported, tests run in the agent's sandbox", "shared")
DEVICE = _refused("sandboxes have no such device", 0)
NETWORK = _refused(NO_NETWORK, "no-network", False)

# Fields of `harbor.models.task.config` 0.25.0, and the older ones that it still reads.
HARBOR_FIELDS = {
    "schema_version": OBEYED,
    "version": OBEYED,
    "task": DESCRIPTION,
    "metadata": DESCRIPTION,
    "source": DESCRIPTION,
    "steps": ONE_STEP,
    "multi_step_reward_strategy": ONE_STEP,
    "artifacts": COLLECTED,
    "agent.timeout_sec": OBEYED,
    "agent.user": USER,
    "agent.network_mode": NETWORK,
    "agent.allowed_hosts": NETWORK,
    "verifier.timeout_sec": OBEYED,
    "verifier.env": OBEYED,
    "verifier.user": USER,
    "verifier.network_mode": NETWORK,
    "verifier.allowed_hosts": NETWORK,
    "verifier.environment_mode": APART,
    "verifier.environment": Field(use=Use.REFUSED, accepted=(None,), reason=APART.reason),
    "verifier.collect": COLLECTED,
    "solution.env": OBEYED,
    "environment.docker_image": OBEYED,
    "environment.workdir": OBEYED,
    "environment.env": OBEYED,
    "environment.memory_mb": OBEYED,
    "environment.memory": OBEYED,
    "environment.storage_mb": OBEYED,
    "environment.storage": OBEYED,
    "environment.healthcheck.command": OBEYED,
    "environment.healthcheck.interval_sec": OBEYED,
    "environment.healthcheck.timeout_sec": OBEYED,
    "environment.healthcheck.start_period_sec": OBEYED,
    "environment.healthcheck.start_interval_sec": OBEYED,
    "environment.healthcheck.retries": OBEYED,
    "environment.network_mode": NETWORK,
    "environment.allowed_hosts": NETWORK,
    "environment.allow_internet": NETWORK,
    "environment.os": _refused("sandboxes run Linux", "linux"),
    "environment.gpus": DEVICE,
    "environment.gpu_types": DEVICE,
    "environment.tpu": DEVICE,
    "environment.mcp_servers": _refused("the agent's only tool is the shell"),
    "environment.skills_dir": _refused("the agent reads no skills"),
    # They set the speed of a machine, and no result of a command.
    "environment.cpus": DESCRIPTION,
    "environment.build_timeout_sec": DESCRIPTION,
}
# Fields of `terminal_bench.handlers.trial_handler.Task` 0.2.18, and of older files.
BENCH_FIELDS = {
    "instruction": OBEYED,
    "descriptions": OBEYED,
    "max_agent_timeout_sec": OBEYED,
    "max_test_timeout_sec": OBEYED,
    "parser_name": _refused("the exit code of run-tests.sh decides, as pytest sets it", "pytest"),
    "run_tests_in_same_shell": _refused("the tests have a shell of their own", False),
    "disable_asciinema": DESCRIPTION,
    "author_name": DESCRIPTION,
    "author_email": DESCRIPTION,
    "difficulty": DESCRIPTION,
    "category": DESCRIPTION,
    "tags": DESCRIPTION,
    "estimated_duration_sec": DESCRIPTION,
    "expert_time_estimate_min": DESCRIPTION,
    "junior_time_estimate_min": DESCRIPTION,
}
# Fields of a service in docker-compose.yaml. All others are refused by name.
SERVICE_FIELDS = {
    "build": OBEYED,
    "image": OBEYED,
    "command": OBEYED,
    "environment": OBEYED,
    "working_dir": OBEYED,
    "volumes": OBEYED,
    "entrypoint": OBEYED,
    "user": USER,
    "network_mode": _refused("sandboxes have no network", "none"),
    "privileged": _refused("sandboxes have no rights", False),
    "container_name": DESCRIPTION,
    "hostname": DESCRIPTION,
    "labels": DESCRIPTION,
    "init": DESCRIPTION,
    "tty": DESCRIPTION,
    "stdin_open": DESCRIPTION,
    "pull_policy": DESCRIPTION,
    "cpus": DESCRIPTION,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Healthcheck:
    """A command that must succeed before the first command of the agent."""

    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """The settings of a task.

    Attributes:
        image: the container image; "" without one.
        work: the directory in which commands start; "" means the image's.
        variables, test_variables, solution_variables: environment variables of all commands, of
            the tests, and of the reference solution.
        memory_bytes, disk_bytes: limits of the task; None without one.
    """

    instruction: str
    image: str = ""
    work: str = ""
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    test_variables: Mapping[str, str] = field(default_factory=dict[str, str])
    solution_variables: Mapping[str, str] = field(default_factory=dict[str, str])
    test_timeout_s: float | None = None
    agent_timeout_s: float | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    healthcheck: Healthcheck | None = None


def read_settings(folder: Path, *, without_network: bool) -> TaskSettings:
    """Return the settings of a task's folder.

    Args:
        without_network: a task that asks for a network is played without one.

    Raises: ConfigError: a field that is not performed, or a wrong value; ValueError, OSError.
    """
    for name in OTHER_FILES:
        if (folder / name).exists():
            raise ConfigError(f"{name} is not supported")
    is_harbor = (folder / HARBOR).is_file()
    read = _harbor if is_harbor else _bench
    settings = read(folder, without_network=without_network)
    path = next((folder / name for name in COMPOSE if (folder / name).is_file()), None)
    return settings if path is None else _with_compose(settings, path, folder)


def check_fields(
    settings: Mapping[str, Any], fields: Mapping[str, Field], file: str, above: str = ""
) -> None:
    """Raise ConfigError for a field that is unknown, or whose value is refused."""
    for key, value in settings.items():
        name = f"{above}{key}"
        rule = fields.get(name)
        if rule is None:
            below = [other for other in fields if other.startswith(f"{name}.")]
            if not below:
                raise ConfigError(
                    f"{file}: the field {name} is unknown or not supported; remove it"
                )
            if value is None:
                continue
            if not isinstance(value, Mapping):
                raise ConfigError(f"{file}: {name} must be a table")
            check_fields(value, fields, file, f"{name}.")
        elif rule.use is Use.REFUSED and not _is_one_of(value, rule.accepted):
            raise ConfigError(f"{file}: {name}={value!r:.60} is not supported: {rule.reason}")


def _is_one_of(value: Any, accepted: tuple[Any, ...]) -> bool:
    """Return whether a value equals one of the same type; 0 is not false."""
    text = value.lower() if isinstance(value, str) else value
    return any(type(text) is type(other) and text == other for other in accepted)


def _harbor(folder: Path, *, without_network: bool) -> TaskSettings:
    """Return the settings of task.toml and instruction.md."""
    settings = tomllib.loads((folder / HARBOR).read_text(encoding="utf-8"))
    network_fields = {
        name for name, rule in HARBOR_FIELDS.items() if without_network and rule is NETWORK
    }
    fields = {**HARBOR_FIELDS, **dict.fromkeys(network_fields, DESCRIPTION)}
    check_fields(settings, fields, HARBOR)
    schema = settings.get("schema_version", settings.get("version", SCHEMAS[-1]))
    if schema not in SCHEMAS:
        raise ConfigError(f"{HARBOR}: schema_version={schema!r} is none of {', '.join(SCHEMAS)}")
    environment, verifier, agent, solution = (
        settings.get(name) or {} for name in ("environment", "verifier", "agent", "solution")
    )
    check = environment.get("healthcheck")
    return TaskSettings(
        instruction=_instruction(folder / "instruction.md"),
        image=_text(environment, "docker_image"),
        work=_text(environment, "workdir"),
        variables=_variables(environment, "environment"),
        test_variables=_variables(verifier, "verifier"),
        solution_variables=_variables(solution, "solution"),
        test_timeout_s=_seconds(verifier.get("timeout_sec"), "verifier.timeout_sec"),
        agent_timeout_s=_seconds(agent.get("timeout_sec"), "agent.timeout_sec"),
        memory_bytes=_bytes(environment, "memory"),
        disk_bytes=_bytes(environment, "storage"),
        healthcheck=None if check is None else _healthcheck(check),
    )


def _instruction(path: Path) -> str:
    """Return the instruction without leading lines that mark a benchmark. Raises: ConfigError."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
    while lines and CANARY.fullmatch(lines[0].strip()):
        del lines[0]
    text = "\n".join(lines).strip()
    if not text:
        raise ConfigError(f"no {path.name}, or it is empty")
    return text


def _bench(folder: Path, *, without_network: bool) -> TaskSettings:
    """Return the settings of task.yaml. Its tasks ask for no network by a field."""
    del without_network
    settings = yaml.safe_load((folder / BENCH).read_text(encoding="utf-8")) or {}
    check_fields(settings, BENCH_FIELDS, BENCH)
    text = settings.get("instruction")
    if text is None:
        listed = {each.get("key"): each for each in settings.get("descriptions") or []}
        text = listed.get("base", {}).get("description")
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"no instruction in {BENCH}")
    return TaskSettings(
        instruction=text.strip(),
        test_timeout_s=_seconds(settings.get("max_test_timeout_sec", 60.0), "max_test_timeout_sec"),
        agent_timeout_s=_seconds(
            settings.get("max_agent_timeout_sec", 360.0), "max_agent_timeout_sec"
        ),
    )


def _text(table: Mapping[str, Any], name: str) -> str:
    """Return a text of a table; "" without it. Raises: ConfigError."""
    value = table.get(name)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{HARBOR}: {name}={value!r} is not a text")
    return value or ""


def _seconds(value: Any, name: str) -> float | None:
    """Return a positive time; None without one. Raises: ConfigError."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{name}={value!r}: a value has a wrong type, it must be seconds")
    return float(value)


def _bytes(environment: Mapping[str, Any], name: str) -> int | None:
    """Return a size, as a number of MiB or as an older text such as "2G". Raises: ConfigError."""
    size = environment.get(f"{name}_mb")
    older = environment.get(name)
    if size is None and older is not None:
        match = re.fullmatch(r"([\d.]+)([KMG])", str(older).strip().upper())
        if match is None:
            raise ConfigError(f"{HARBOR}: environment.{name}={older!r} is not a size such as 2G")
        size = float(match[1]) * SIZES[match[2]]
    if size is None:
        return None
    if isinstance(size, bool) or not isinstance(size, int | float) or size <= 0:
        raise ConfigError(f"{HARBOR}: environment.{name}_mb={size!r} is not a number of MiB")
    return int(size * MIB)


def _variables(table: Mapping[str, Any], name: str) -> dict[str, str]:
    """Return the variables of a table's `env`; `${VAR}` is a variable of this process.

    Raises: ConfigError: it is not set.
    """
    variables: dict[str, str] = {}
    for key, value in (table.get("env") or {}).items():
        if not isinstance(value, str):
            raise ConfigError(f"{HARBOR}: {name}.env.{key}={value!r} is not a text")
        template = TEMPLATE.fullmatch(value)
        if template is None:
            variables[key] = value
        elif (host := os.environ.get(template[1], template[2])) is not None:
            variables[key] = host
        else:
            raise ConfigError(
                f"{HARBOR}: {name}.env.{key} needs the variable {template[1]}; set it"
            )
    return variables


def _healthcheck(table: Mapping[str, Any]) -> Healthcheck:
    """Return the health check of a task. Raises: ConfigError."""
    if not isinstance(table.get("command"), str):
        raise ConfigError(f"{HARBOR}: environment.healthcheck has no command")
    for name, value in table.items():
        if name != "command" and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigError(f"{HARBOR}: environment.healthcheck.{name}={value!r} is no number")
    return Healthcheck(**table)


def _with_compose(settings: TaskSettings, path: Path, folder: Path) -> TaskSettings:
    """Return the settings with those of docker-compose.yaml. Raises: ConfigError."""
    file = path.relative_to(folder).as_posix()
    compose = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    services = compose.get("services") or {}
    if further := [name for name in services if name not in MAIN_SERVICES]:
        raise ConfigError(
            f"{file}: the task has further containers ({', '.join(further)}), and a sandbox is one"
        )
    if len(services) > 1:
        raise ConfigError(f"{file}: the task has two containers, {' and '.join(services)}")
    for key, value in compose.items():
        if key not in ("services", "version", "name") and not key.startswith("x-") and value:
            raise ConfigError(f"{file}: {key} is not supported: tasks have one container")
    for name, service in services.items():
        settings = _with_service(settings, service or {}, f"{file}: services.{name}")
    return settings


def _with_service(settings: TaskSettings, service: Mapping[str, Any], where: str) -> TaskSettings:
    """Return the settings with those of the main service. Raises: ConfigError."""
    check_fields(service, SERVICE_FIELDS, where)
    build = service.get("build")
    build = build if isinstance(build, Mapping) else {"context": build}
    plain = {"context": (None, ".", "./", "${CONTEXT_DIR}"), "dockerfile": ("Dockerfile",)}
    for key, value in build.items():
        if value not in plain.get(key, ()):
            raise ConfigError(f"{where}.build.{key}={value!r:.60} is not supported")
    image = service.get("image") or ""
    if image and not INTERPOLATION.fullmatch(image):
        raise ConfigError(f"{where}.image={image!r} is not supported; set environment.docker_image")
    command = service.get("command")
    command = " ".join(command) if isinstance(command, list) else command
    if command and not KEEP_ALIVE.fullmatch(re.sub(r"['\"]", "", command).strip()):
        raise ConfigError(f"{where}.command={command!r:.60}: no program runs beside the commands")
    entrypoint = service.get("entrypoint")
    if entrypoint is not None and not is_shell(
        entrypoint if isinstance(entrypoint, list) else None
    ):
        raise ConfigError(f"{where}.entrypoint={entrypoint!r:.60}: no program starts first")
    for volume in service.get("volumes") or []:
        if not str(volume).startswith("${T_BENCH_"):
            raise ConfigError(f"{where}.volumes: {volume!r:.60} is not supported")
    return _joined(settings, service, where)


def _joined(settings: TaskSettings, service: Mapping[str, Any], where: str) -> TaskSettings:
    """Return the settings with the service's variables and directory. Raises: ConfigError."""
    environment = service.get("environment") or {}
    if isinstance(environment, list):  # A name without a value is a variable of this process.
        pairs = [str(each).partition("=") for each in environment]
        environment = {name: value if equals else None for name, equals, value in pairs}
    variables = {
        str(name): _interpolated(
            f"${{{name}}}" if value is None else str(value), f"{where}.environment.{name}"
        )
        for name, value in environment.items()
    }
    work = _interpolated(service.get("working_dir") or "", f"{where}.working_dir")
    return replace(
        settings, variables={**variables, **settings.variables}, work=settings.work or work
    )


def _interpolated(text: str, where: str) -> str:
    """Return a text with the values of its variables. Raises: ConfigError: one is not set."""

    def value_of(match: re.Match[str]) -> str:
        if match[4]:
            return "$"
        name = match[1] or match[3]
        value = BENCH_VARIABLES.get(name, os.environ.get(name, match[2]))
        if value is None:
            raise ConfigError(f"{where} needs the variable {name}; set it")
        return value

    return INTERPOLATION.sub(value_of, text)


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


def digest_of_tasks(key: str, value: str) -> str:
    """Return a digest of all files of the tasks."""
    root = find_path(key, value)
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
    files = sorted((folder / "tests").glob("test_*.py"))
    if not files:
        raise ConfigError(f"{where}: no {', '.join(SCRIPTS)}, and no tests/test_*.py")
    paths = [f"/tests/{path.name}" for path in files]
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
        if path.is_file() and (match := DOWNLOADS.search(path.read_text(encoding="utf-8"))):
            raise ConfigError(
                f"{where}: {name} downloads ({match[0].strip()[:60]}), and the sandbox has no"
                f" network; {remedy}"
            )


def _test_files(folder: Path, where: str) -> Iterator[TaskFile]:
    """Yield the files of the tests."""
    for file in files_below(folder / "tests", "/tests", folder, where):
        yield replace(file, mode=0o755) if file.source.suffix == ".sh" else file
    script = folder / "run-tests.sh"
    if script.is_file():
        yield TaskFile(source=script, target=f"/tests/{script.name}", mode=0o755)
