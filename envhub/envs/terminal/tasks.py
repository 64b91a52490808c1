"""Task folders in the layouts of Harbor (`task.toml`) and Terminal-Bench (`task.yaml`)."""

import base64
import hashlib
import math
import os
import posixpath
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from common.errors import ConfigError
from common.user_code import find_path
from envhub.envs.terminal.compose import (
    MAIN_SERVICES,
    find_compose,
    read_composition,
    read_one_service,
)
from envhub.envs.terminal.fields import DESCRIPTION, OBEYED, check_fields, refused, size_mib
from envhub.envs.terminal.image import (
    DOCKERFILES,
    FOLDER,
    TaskFile,
    TaskImage,
    files_below,
    is_work_folder,
    read_image,
)
from envhub.sandbox.interface import (
    EVERY_HOST,
    LOGS,
    MIB,
    SOLUTION,
    USERS,
    ContainerSpec,
    Healthcheck,
    ImageBuild,
    parse_host,
)

HARBOR = "task.toml"
BENCH = "task.yaml"
# Files beside the settings that change a task, and that no code here performs.
OTHER_FILES = ("trajectory.json", "environment/singularity-compose.yaml", ".harborignore")
OTHER_FILES += ("tests/.harborignore", "solution/.harborignore")
SCHEMAS = ("1.0", "1.1", "1.2", "1.3", "1.4")
TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
CANARY = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)
NO_NETWORK = (
    "sandboxes have no network; envs.terminal.network=task permits it in containers,"
    " envs.terminal.without_network=true plays the task without"
)
PUBLIC, NO_NETWORK_MODE, ALLOW_LIST = "public", "no-network", "allowlist"
TABLE = "environment."  # Fields that the container of the tests has, too.
ARTIFACTS = f"{LOGS}/artifacts"  # Folder that the container of the tests gets always.
PHASES = ("environment", "agent", "verifier")  # Each can have a network of its own.

USER = refused("commands and tests run as the only user of the sandbox", *USERS, 1000)
COLLECTED = refused("the environment runs no commands in services after an episode")
ONE_STEP = refused("only tasks of one step are played")
SEPARATE, SHARED = "separate", "shared"
APART = refused(
    "a separate verifier needs containers, envs.sandbox.backend=docker or podman", SHARED
)
DEVICE = refused("sandboxes have no such device", 0)
NETWORK = refused(NO_NETWORK, "no-network", False)

# Fields of `harbor.models.task.config` 0.25.0, and the older ones that it still reads.
HARBOR_FIELDS = {
    "schema_version": OBEYED,
    "version": OBEYED,
    "task": DESCRIPTION,
    "metadata": DESCRIPTION,
    "source": DESCRIPTION,
    "steps": ONE_STEP,
    "multi_step_reward_strategy": ONE_STEP,
    "artifacts": DESCRIPTION,
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
    "verifier.environment": replace(APART, accepted=(None,)),
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
    "environment.os": refused("sandboxes run Linux", "linux"),
    "environment.gpus": DEVICE,
    "environment.gpu_types": DEVICE,
    "environment.tpu": DEVICE,
    "environment.mcp_servers": refused("the agent's only tool is the shell"),
    "environment.skills_dir": refused("the agent reads no skills"),
    # They set the speed of a machine, and no result of a command.
    "environment.cpus": DESCRIPTION,
    "environment.build_timeout_sec": DESCRIPTION,
}
# Fields that containers obey in addition.
CONTAINER_FIELDS = {
    "artifacts": OBEYED,
    "verifier.environment_mode": OBEYED,
    "agent.user": OBEYED,
    "verifier.user": OBEYED,
    "environment.cpus": OBEYED,
    "environment.build_timeout_sec": OBEYED,
}
# Fields of a task whose settings decide about the network.
NETWORK_FIELDS = {
    **{f"{name}.network_mode": OBEYED for name in PHASES},
    **{f"{name}.allowed_hosts": OBEYED for name in PHASES},
    "environment.allow_internet": OBEYED,
}
# Fields of `terminal_bench.handlers.trial_handler.Task` 0.2.18, and of older files.
BENCH_FIELDS = {
    "instruction": OBEYED,
    "descriptions": OBEYED,
    "max_agent_timeout_sec": OBEYED,
    "max_test_timeout_sec": OBEYED,
    "parser_name": refused("the exit code of run-tests.sh decides, as pytest sets it", "pytest"),
    "run_tests_in_same_shell": refused("the tests have a shell of their own", False),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """The settings of a task.

    Attributes:
        image: the container image; "" without one.
        work: the directory in which commands start; "" means the image's.
        variables, test_variables, solution_variables: environment variables of all commands, of
            the tests, and of the reference solution.
        memory_bytes, disk_bytes, cpus: limits of the task; None without one.
        has_network: the task's policy is a public network.
        allowed: the hosts that the start, the agent and the tests reach; None without a list.
        agent_user, test_user: users of a container; "" means the image's.
        container, services: the containers of the task; None in a sandbox without images.
        verifier: the settings of the container of the tests; None in the agent's container.
        has_tests: the image of the container has the files of the tests.
        artifacts: paths of the agent's container that the container of the tests gets.
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
    cpus: float | None = None
    build_timeout_s: float = 600.0
    has_network: bool = False
    allowed: tuple[Sequence[str], ...] | None = None
    agent_user: str = ""
    test_user: str = ""
    healthcheck: Healthcheck | None = None
    container: ContainerSpec | None = None
    services: tuple[ContainerSpec, ...] = ()
    verifier: "TaskSettings | None" = None
    has_tests: bool = False
    artifacts: tuple[str, ...] = ()


def read_settings(
    folder: Path,
    *,
    without_network: bool,
    has_containers: bool = False,
    permits_network: bool = False,
) -> TaskSettings:
    """Return the settings of a task's folder.

    Args:
        without_network: a task that asks for a network is played without one.
        has_containers: the sandbox builds and runs the containers of the task.
        permits_network: the task's settings decide about its network.

    Raises: ConfigError: a field that is not performed, or a wrong value; ValueError, OSError.
    """
    for name in OTHER_FILES:
        if (folder / name).exists():
            raise ConfigError(f"{name} is not supported")
    if (folder / HARBOR).is_file():
        settings = _harbor(
            folder,
            without_network=without_network,
            has_containers=has_containers,
            permits_network=permits_network and not without_network,
        )
    else:
        # Tasks of Terminal-Bench ask for no network by a field, and their harness gives it one.
        settings = replace(_bench(folder), has_network=permits_network and not without_network)
    path = find_compose(folder)
    if has_containers:
        return _with_verifier(_with_containers(settings, path, folder), path, folder)
    if path is None:
        return settings
    only = read_one_service(path, folder)
    variables = {**only.variables, **settings.variables}
    return replace(settings, variables=variables, work=settings.work or only.folder)


def _with_containers(settings: TaskSettings, path: Path | None, folder: Path) -> TaskSettings:
    """Return the settings with the containers of the task. Raises: ConfigError.

    Without image, Dockerfile and compose file there are none: the configured image runs.
    """
    dockerfile = next((folder / name for name in DOCKERFILES if (folder / name).is_file()), None)
    if not settings.image and dockerfile is None and path is None:
        return settings
    main, services = ContainerSpec(), ()
    if path is not None:
        composition = read_composition(path, folder)
        main, services = composition.main, composition.services
    build = main.build
    if settings.image or main.image:
        build = None
    elif build is None and dockerfile is not None:
        build = ImageBuild(context=dockerfile.parent.resolve())
    elif build is None:
        raise ConfigError(f"{path and path.name}: {main.name} has no image and no Dockerfile")
    main = replace(
        main,
        image=settings.image or main.image,
        build=build and replace(build, timeout_s=settings.build_timeout_s),
        variables={**main.variables, **settings.variables},
        cpus=settings.cpus or main.cpus,
        memory_bytes=settings.memory_bytes or main.memory_bytes,
    )
    services = tuple(
        replace(each, build=each.build and replace(each.build, timeout_s=settings.build_timeout_s))
        for each in services
    )
    return replace(settings, container=main, services=services)


def _with_verifier(settings: TaskSettings, path: Path | None, folder: Path) -> TaskSettings:
    """Return the settings with the container of the tests. Raises: ConfigError.

    Its image is that of `verifier.environment`, the build of `tests`, or a new one of the task.
    """
    verifier = settings.verifier
    if verifier is None:
        return settings
    if (folder / "tests" / "docker-compose.yaml").is_file():
        raise ConfigError("tests/docker-compose.yaml is not supported")
    context = folder / "tests"
    if verifier.image or (context / "Dockerfile").is_file():
        build = None if verifier.image else ImageBuild(context=context.resolve())
        container = ContainerSpec(
            image=verifier.image,
            build=build and replace(build, timeout_s=verifier.build_timeout_s),
            variables=verifier.variables,
            cpus=verifier.cpus or 0.0,
            memory_bytes=verifier.memory_bytes or 0,
        )
        verifier = replace(verifier, container=container, has_tests=True)
    else:
        verifier = _with_containers(replace(verifier, image=settings.image), path, folder)
    if verifier.container is None:
        raise ConfigError("a separate verifier needs an image, tests/Dockerfile or a Dockerfile")
    return replace(settings, verifier=verifier)


def _harbor(
    folder: Path, *, without_network: bool, has_containers: bool, permits_network: bool
) -> TaskSettings:
    """Return the settings of task.toml and instruction.md. Raises: ConfigError."""
    settings = tomllib.loads((folder / HARBOR).read_text(encoding="utf-8"))
    network_fields = {
        name for name, rule in HARBOR_FIELDS.items() if without_network and rule is NETWORK
    }
    fields = {**HARBOR_FIELDS, **dict.fromkeys(network_fields, DESCRIPTION)}
    if has_containers:
        fields |= CONTAINER_FIELDS
    if permits_network:
        fields |= NETWORK_FIELDS
    if has_containers:
        del fields["verifier.environment"]
        fields |= {f"verifier.{name}": fields[name] for name in fields if name.startswith(TABLE)}
    check_fields(settings, fields, HARBOR)
    schema = settings.get("schema_version", settings.get("version", SCHEMAS[-1]))
    if schema not in SCHEMAS:
        raise ConfigError(f"{HARBOR}: schema_version={schema!r} is none of {', '.join(SCHEMAS)}")
    read = partial(
        _harbor_settings,
        instruction=_instruction(folder / "instruction.md"),
        has_containers=has_containers,
        permits_network=permits_network,
    )
    return replace(
        read(settings),
        verifier=read(apart) if (apart := _separated(settings)) is not None else None,
        artifacts=_artifacts(settings) if apart is not None else (),
    )


def _separated(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings of the container of the tests; None without one. Raises: ConfigError.

    They are those of a task whose environment is that of the verifier. Its image is the task's only
    where it has none and `tests` has no Dockerfile.
    """
    verifier = settings.get("verifier") or {}
    separate = verifier.get("environment")
    mode = verifier.get("environment_mode") or (SHARED if separate is None else SEPARATE)
    if mode not in (SEPARATE, SHARED):
        raise ConfigError(f"{HARBOR}: verifier.environment_mode={mode!r} is none of its modes")
    if mode == SHARED:
        if separate is not None:
            raise ConfigError(f"{HARBOR}: verifier.environment needs environment_mode={SEPARATE!r}")
        return None
    environment = {**(settings.get("environment") or {}), "docker_image": None}
    return {"verifier": verifier, "environment": environment if separate is None else separate}


def _artifacts(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the paths that the container of the tests gets. Raises: ConfigError."""
    paths = [ARTIFACTS]
    for entry in settings.get("artifacts") or []:
        table = {"source": entry} if isinstance(entry, str) else entry
        for name in ("exclude", "service"):
            if table.get(name) not in (None, [], MAIN_SERVICES[0]):
                raise ConfigError(f"{HARBOR}: artifacts.{name}={table[name]!r} is not supported")
        source = posixpath.normpath(str(table.get("source")))
        if not source.startswith("/") or ".." in str(table["source"]).split("/") or source == "/":
            raise ConfigError(f"{HARBOR}: artifacts: {table.get('source')!r} is no absolute path")
        paths.append(source)
    return tuple(dict.fromkeys(paths))


def _harbor_settings(
    settings: Mapping[str, Any], *, instruction: str, has_containers: bool, permits_network: bool
) -> TaskSettings:
    """Return the settings of the tables of task.toml. Raises: ConfigError."""
    environment, verifier, agent, solution = (
        settings.get(name) or {} for name in ("environment", "verifier", "agent", "solution")
    )
    check = environment.get("healthcheck")
    networks = _networks_of(settings) if permits_network else ((),)
    is_public = set(networks) == {(EVERY_HOST,)}
    return TaskSettings(
        instruction=instruction,
        image=_text(environment, "docker_image"),
        work=_text(environment, "workdir"),
        variables=_variables(environment, "environment"),
        test_variables=_variables(verifier, "verifier"),
        solution_variables=_variables(solution, "solution"),
        test_timeout_s=_seconds(verifier.get("timeout_sec"), "verifier.timeout_sec"),
        agent_timeout_s=_seconds(agent.get("timeout_sec"), "agent.timeout_sec"),
        memory_bytes=_bytes(environment, "memory"),
        disk_bytes=_bytes(environment, "storage"),
        cpus=_processors(environment.get("cpus")),
        build_timeout_s=_seconds(
            environment.get("build_timeout_sec", 600.0), "environment.build_timeout_sec"
        )
        or 600.0,
        has_network=is_public,
        allowed=networks if any(networks) and not is_public else None,
        agent_user=_user(agent.get("user")) if has_containers else "",
        test_user=_user(verifier.get("user")) if has_containers else "",
        healthcheck=None if check is None else _healthcheck(check),
    )


def _networks_of(settings: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    """Return the hosts that each phase reaches, as Harbor decides: all without a field.

    Raises: ConfigError: a mode or a host is wrong.
    """
    environment = settings.get("environment") or {}
    hosts = (EVERY_HOST,) if environment.get("allow_internet") is not False else ()
    networks: list[tuple[str, ...]] = []
    for name in PHASES:
        table = settings.get(name) or {}
        mode, listed = table.get("network_mode"), table.get("allowed_hosts")
        where = f"{HARBOR}: {name}.allowed_hosts"
        if mode not in (None, PUBLIC, NO_NETWORK_MODE, ALLOW_LIST):
            raise ConfigError(
                f"{HARBOR}: {name}.network_mode={mode!r} is none of {PUBLIC}, {NO_NETWORK_MODE},"
                f" {ALLOW_LIST}"
            )
        if listed and mode != ALLOW_LIST:
            raise ConfigError(f"{where} needs network_mode={ALLOW_LIST!r}")
        if listed is not None and not isinstance(listed, list):
            raise ConfigError(f"{where}: {listed!r} is not a list of hosts")
        if mode is not None:
            hosts = {PUBLIC: (EVERY_HOST,), NO_NETWORK_MODE: ()}.get(mode, tuple(listed or ()))
        try:
            for host in listed or ():
                parse_host(host)
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"{where}: {error}") from error
        networks.append(hosts)
        hosts = networks[0]  # Agent and tests have the environment's by default.
    return tuple(networks)


def _user(value: Any) -> str:
    """Return a user of a container; "" means the image's. Raises: ConfigError."""
    if value is None or value == "":
        return ""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"{HARBOR}: user={value!r} is neither a name nor a number")
    return str(value)


def _processors(value: Any) -> float | None:
    """Return the number of processors; None without one. Raises: ConfigError."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{HARBOR}: environment.cpus={value!r} is not a number of processors")
    return float(value)


def _instruction(path: Path) -> str:
    """Return the instruction without leading lines that mark a benchmark. Raises: ConfigError."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
    while lines and CANARY.fullmatch(lines[0].strip()):
        del lines[0]
    text = "\n".join(lines).strip()
    if not text:
        raise ConfigError(f"no {path.name}, or it is empty")
    return text


def _bench(folder: Path) -> TaskSettings:
    """Return the settings of task.yaml. Raises: ConfigError."""
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
        size = size_mib(older, f"{HARBOR}: environment.{name}")
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
    times = {name: float(value) for name, value in table.items() if name != "command"}
    retries = int(times.pop("retries", 3))
    return Healthcheck(argv=("bash", "-c", table["command"]), retries=retries, **times)


SOLUTIONS = ("solution/solve.sh", "solution.sh")
SHELLS = ("sh", "bash", "dash", "zsh")  # Interpreters whose scripts bash runs.
SCRIPTS = ("tests/test.sh", "tests/run-tests.sh", "run-tests.sh")
DOWNLOADS = re.compile(
    r"^\s*(?![^\n]*(?:--no-index|--offline|localhost|127\.0\.0\.1))"
    r"[^#\n]*\b(apt-get|apk add|pip3? install|uvx|uv pip|npm i|curl|wget)\b",
    re.M,
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
        container, services: the containers of the task; None in a sandbox without images.
        has_network: the containers reach the network of the machine.
        allowed: the hosts that the start, the agent and the tests reach; None without a list.
        agent_user, test_user: users of the container; "" means the image's.
        healthcheck: a command that must succeed before the first one of the agent.
        setup: commands of the environment before the first one of the agent.
        verifier: the task of the container in which the tests run; None in the agent's container.
        has_tests: the image of the container has the files of the tests.
        artifacts: paths of the agent's container that the container of the tests gets.
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
    container: ContainerSpec | None = None
    services: tuple[ContainerSpec, ...] = ()
    has_network: bool = False
    allowed: tuple[Sequence[str], ...] | None = None
    agent_user: str = ""
    test_user: str = ""
    setup: str = ""
    verifier: "TerminalTask | None" = None
    has_tests: bool = False
    artifacts: tuple[str, ...] = ()

    @property
    def agent_hosts(self) -> Sequence[str]:
        """The hosts that the agent reaches; EVERY_HOST stands for all."""
        return (EVERY_HOST,) if self.has_network else (self.allowed or ((), ()))[1]

    @property
    def tests_reach_network(self) -> bool:
        """Whether the tests reach any host."""
        where = self.verifier or self
        return where.has_network or bool(where.allowed and where.allowed[-1])


def load_tasks_of(
    key: str,
    path: str,
    *,
    has_images: bool,
    has_containers: bool = False,
    without_network: bool = False,
    permits_network: bool = False,
) -> list[TerminalTask]:
    """Return the tasks of a folder, in the order of their names. A task's own folder is one task.

    Args:
        key: the setting that named the folder.
        has_images: the sandbox runs container images, so a Dockerfile's commands are not needed.
        has_containers: the sandbox builds images, too, and runs services.
        without_network: a task that asks for a network is played without one.
        permits_network: the settings of a task decide about its network.

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
        load_task_of(
            folder,
            where,
            has_images=has_images,
            has_containers=has_containers,
            without_network=without_network,
            permits_network=permits_network,
        )
        for folder in folders
    ]


def is_task(folder: Path) -> bool:
    """Return whether a folder has the file of a task."""
    return (folder / HARBOR).is_file() or (folder / BENCH).is_file()


def digest_of_tasks(root: Path) -> str:
    """Return a digest of all files of the tasks, or of a file of instances."""
    if root.is_file():
        return hashlib.sha256(root.read_bytes()).hexdigest()
    digest = hashlib.sha256()
    for path in sorted(each for each in root.rglob("*") if each.is_file()):
        digest.update(f"{path.relative_to(root).as_posix()}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def load_task_of(
    folder: Path,
    where: str,
    *,
    has_images: bool = False,
    has_containers: bool = False,
    without_network: bool = False,
    permits_network: bool = False,
) -> TerminalTask:
    """Return the task of a folder. Raises: ConfigError, with the reason."""
    where = f"{where}: task {folder.name}"
    try:
        settings = read_settings(
            folder,
            without_network=without_network,
            has_containers=has_containers,
            permits_network=permits_network,
        )
        container = settings.container
        image = settings.image if has_images else ""
        has_dockerfile = any((folder / name).is_file() for name in DOCKERFILES)
        if settings.image and not has_images and not has_dockerfile:
            raise ConfigError(
                f"{HARBOR}: environment.docker_image={settings.image}: bubblewrap runs no images;"
                " set envs.sandbox.backend=docker or podman"
            )
        is_built = bool(image) or container is not None
        made = read_image(folder, where, is_built=is_built)
        if container is not None:
            work = settings.work or container.folder
            # Only a task without Dockerfile and compose file brings its files itself.
            files = () if find_compose(folder) else made.files
            made = replace(made, folder=work, work="", files=files)
        else:
            made = _placed(made, settings.work, where)
        command, needs_pytest = _command(folder, where)
        tests = settings.verifier or settings
        reaches = tests.has_network or bool(tests.allowed and tests.allowed[-1])
        if not reaches and not (is_built and without_network):
            _refuse_downloads(folder, where, image)
        task = TerminalTask(
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
            container=container,
            services=settings.services,
            has_network=settings.has_network,
            allowed=settings.allowed,
            agent_user=settings.agent_user,
            test_user=settings.test_user,
        )
        return _with_separate_tests(task, settings)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{where}: {error}") from error
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(where) else f"{where}: {text}") from error
    except (TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"{where}: a value has a wrong type: {error}") from error


def _with_separate_tests(task: TerminalTask, settings: TaskSettings) -> TerminalTask:
    """Return a task with the one of its separate verifier, if it has one."""
    apart = settings.verifier
    if apart is None or apart.container is None:
        return task
    verifier = replace(
        task,
        folder=apart.work or apart.container.folder,
        work="",
        files=(),
        variables=apart.variables,
        memory_bytes=apart.memory_bytes,
        disk_bytes=apart.disk_bytes,
        image=apart.image,
        healthcheck=apart.healthcheck,
        container=apart.container,
        services=apart.services,
        has_network=apart.has_network,
        allowed=apart.allowed,
        has_tests=apart.has_tests,
    )
    return replace(task, verifier=verifier, artifacts=settings.artifacts)


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
    content = file.content
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
    remedy += " (envs.sandbox.backend=docker, with envs.terminal.network=task if they need one"
    remedy += ", envs.terminal.without_network=true if not)"
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
        yield replace(file, mode=0o755) if file.name.endswith(".sh") else file
    script = folder / "run-tests.sh"
    if script.is_file():
        yield TaskFile(source=script, target=f"/tests/{script.name}", mode=0o755)
