"""`docker-compose.yaml` of a task: its containers, or the few settings that a sandbox can obey."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from common.errors import ConfigError
from envhub.envs.terminal.fields import DESCRIPTION, OBEYED, Field, check_fields, refused, size_mib
from envhub.envs.terminal.image import is_shell
from envhub.sandbox.engine import health_command
from envhub.sandbox.interface import (
    LOGS,
    MIB,
    TESTS,
    USERS,
    ContainerMount,
    ContainerSpec,
    Healthcheck,
    ImageBuild,
    ServiceState,
)

COMPOSE = ("environment/docker-compose.yaml", "docker-compose.yaml")
MAIN_SERVICES = ("main", "client")  # Names of the agent's container in Harbor and Terminal-Bench.
INTERPOLATION = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)|(\$\$)")
KEEP_ALIVE = re.compile(
    r"(?:(?:/bin/)?(?:ba)?sh -c )?(?:exec )?(?:sleep infinity|tail -f /dev/null)"
)
# Variables that the harnesses set for docker-compose.yaml.
HARNESS_VARIABLES = {
    "T_BENCH_TEST_DIR": TESTS,
    "T_BENCH_CONTAINER_LOGS_PATH": LOGS,
    "T_BENCH_CONTAINER_AGENT_LOGS_PATH": "/agent-logs",
    "T_BENCH_TASK_DOCKER_NAME_PREFIX": "task",
    "T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME": "client",
    "T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME": "",
    "CONTEXT_DIR": ".",
    "MAIN_IMAGE_NAME": "",
    "PREBUILT_IMAGE_NAME": "",
}
LOG_MOUNTS = ("${T_BENCH_", "${HOST_")  # Sources of log folders, which a container has itself.
DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+)ms)?")
CONDITIONS = tuple(state.value for state in ServiceState)
SILENT = (
    *("container_name", "hostname", "labels", "init", "tty", "stdin_open", "pull_policy", "ports"),
    *("expose", "networks", "restart", "logging", "stop_grace_period", "stop_signal", "platform"),
    *("shm_size", "scale", "profiles"),
)
# Fields of a service in a container. All others are refused by name.
SERVICE_FIELDS = {
    **dict.fromkeys(
        (
            *("build", "image", "command", "entrypoint", "environment", "working_dir", "volumes"),
            *("user", "depends_on", "tmpfs", "read_only", "cap_add", "cpus", "mem_limit"),
            *("deploy.resources.limits.cpus", "deploy.resources.limits.memory"),
        ),
        OBEYED,
    ),
    **{
        f"healthcheck.{name}": OBEYED
        for name in (
            *("test", "interval", "timeout", "retries", "start_period", "start_interval"),
            "disable",
        )
    },
    **dict.fromkeys(SILENT, DESCRIPTION),
    "network_mode": refused("the task's settings decide about the network", "none", "bridge"),
    "privileged": refused("containers have no rights on the machine", False),
}
# Fields of the only service of a sandbox that runs no images.
ONE_SERVICE_FIELDS: dict[str, Field] = {
    **dict.fromkeys(
        ("build", "image", "command", "environment", "working_dir", "volumes", "entrypoint"), OBEYED
    ),
    "user": refused("commands and tests run as the only user of the sandbox", *USERS, 1000),
    "network_mode": refused("sandboxes have no network", "none"),
    "privileged": refused("sandboxes have no rights", False),
    **dict.fromkeys((*SILENT[:7], "cpus"), DESCRIPTION),
}
TOP = ("services", "version", "name", "volumes", "networks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """The containers of a task: the agent's, and its services."""

    main: ContainerSpec
    services: tuple[ContainerSpec, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OneService:
    """The settings of the only service of a sandbox that runs no images."""

    variables: Mapping[str, str]
    folder: str


def find_compose(folder: Path) -> Path | None:
    """Return the compose file of a task; None without one."""
    return next((folder / name for name in COMPOSE if (folder / name).is_file()), None)


def _services(
    path: Path, folder: Path, *, top: Sequence[str]
) -> tuple[dict[str, Mapping[str, Any]], str]:
    """Return the services of a file, and the file's name in the task. Raises: ConfigError."""
    name = path.relative_to(folder).as_posix()
    compose = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    for key, value in compose.items():
        if key not in top and not key.startswith("x-") and value:
            remedy = "; remove it" if top is TOP else ": tasks have one container"
            raise ConfigError(f"{name}: {key} is not supported{remedy}")
    return {key: value or {} for key, value in (compose.get("services") or {}).items()}, name


def read_composition(path: Path, folder: Path) -> Composition:
    """Return the containers of a compose file. Raises: ConfigError, with the field.

    Args:
        folder: the folder of the task. No file outside of it enters a container.
    """
    services, file = _services(path, folder, top=TOP)
    names = [name for name in services if name in MAIN_SERVICES]
    if len(names) != 1 and services.keys() - set(names):
        raise ConfigError(f"{file}: one of its services must be the agent's, main or client")
    specs = [
        _spec(name, service, path.parent, folder, f"{file}: services.{name}")
        for name, service in services.items()
    ]
    for spec in specs:
        if unknown := spec.after.keys() - services.keys():
            raise ConfigError(f"{file}: services.{spec.name}.depends_on names no {min(unknown)}")
    main = next((spec for spec in specs if spec.name in names), ContainerSpec())
    return Composition(main=main, services=tuple(spec for spec in specs if spec is not main))


def _spec(
    name: str, service: Mapping[str, Any], base: Path, folder: Path, where: str
) -> ContainerSpec:
    """Return the container of a service. Raises: ConfigError."""
    check_fields(service, SERVICE_FIELDS, where)
    is_main = name in MAIN_SERVICES
    build = _build(service.get("build"), base, folder, f"{where}.build")
    image = "" if build else _interpolated(service.get("image") or "", f"{where}.image")
    if not image and build is None and not is_main:
        raise ConfigError(f"{where} has neither image nor build")
    command = _words(service.get("command"), f"{where}.command")
    if is_main and command and KEEP_ALIVE.fullmatch(" ".join(command)):
        command = None
    limits = ((service.get("deploy") or {}).get("resources") or {}).get("limits") or {}
    memory = service.get("mem_limit") or limits.get("memory")
    check = service.get("healthcheck") or {}
    tmpfs = service.get("tmpfs") or []
    volumes = service.get("volumes") or []
    mounts = [_mount(each, base, folder, f"{where}.volumes") for each in volumes]
    return ContainerSpec(
        name=name,
        image=image,
        build=build,
        entrypoint=_words(service.get("entrypoint"), f"{where}.entrypoint"),
        command=command,
        variables=_variables(service.get("environment"), f"{where}.environment"),
        user=_interpolated(str(service.get("user") or ""), f"{where}.user"),
        folder=_interpolated(service.get("working_dir") or "", f"{where}.working_dir"),
        mounts=[mount for mount in mounts if isinstance(mount, ContainerMount)],
        tmpfs=[
            *([tmpfs] if isinstance(tmpfs, str) else tmpfs),
            *(mount for mount in mounts if isinstance(mount, str)),
        ],
        is_read_only=bool(service.get("read_only")),
        capabilities=[str(each) for each in service.get("cap_add") or []],
        cpus=_number(service.get("cpus") or limits.get("cpus") or 0, f"{where}.cpus"),
        memory_bytes=int(size_mib(memory, f"{where}.mem_limit") * MIB) if memory else 0,
        healthcheck=_healthcheck(check, f"{where}.healthcheck"),
        has_no_healthcheck=bool(check.get("disable")) or check.get("test") in ("NONE", ["NONE"]),
        after=_conditions(service.get("depends_on") or {}, f"{where}.depends_on"),
    )


def _number(value: Any, where: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}={value!r} is not a number") from error


def _words(value: Any, where: str) -> list[str] | None:
    """Return the words of a command; None without one."""
    if value is None:
        return None
    words = shlex.split(value) if isinstance(value, str) else [str(each) for each in value]
    return [_interpolated(word, where) for word in words]


def _build(value: Any, base: Path, folder: Path, where: str) -> ImageBuild | None:
    """Return the build of a service; None without one. Raises: ConfigError."""
    if value is None:
        return None
    fields = value if isinstance(value, Mapping) else {"context": value}
    if unknown := fields.keys() - {"context", "dockerfile", "args", "target"}:
        raise ConfigError(f"{where}.{min(unknown)} is not supported; remove it")
    context = base / _interpolated(fields.get("context") or ".", f"{where}.context")
    dockerfile = _interpolated(fields.get("dockerfile") or "Dockerfile", f"{where}.dockerfile")
    for path in (context, context / dockerfile):
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"{where}: {path.name} lies outside of the task's folder")
    if not (context / dockerfile).is_file():
        raise ConfigError(f"{where}: no {dockerfile} in {fields.get('context') or '.'}")
    return ImageBuild(
        context=context.resolve(),
        dockerfile=dockerfile,
        target=_interpolated(fields.get("target") or "", f"{where}.target"),
        arguments=_variables(fields.get("args"), f"{where}.args"),
    )


def _variables(value: Any, where: str) -> dict[str, str]:
    """Return variables of a table or a list; one without a value is this process's.

    Raises: ConfigError: a variable is not set.
    """
    if isinstance(value, list):
        pairs = [str(each).partition("=") for each in value]
        value = {name: text if equals else None for name, equals, text in pairs}
    return {
        str(name): _interpolated(
            f"${{{name}}}" if text is None else _scalar(text), f"{where}.{name}"
        )
        for name, text in (value or {}).items()
    }


def _scalar(value: Any) -> str:
    """Return a value of YAML as the text of a variable."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _interpolated(text: str, where: str) -> str:
    """Return a text with the values of its variables. Raises: ConfigError: one is not set."""

    def value_of(match: re.Match[str]) -> str:
        if match[4]:
            return "$"
        name = match[1] or match[3]
        value = HARNESS_VARIABLES.get(name, os.environ.get(name, match[2]))
        if value is None:
            raise ConfigError(f"{where} needs the variable {name}; set it")
        return value

    return INTERPOLATION.sub(value_of, text)


def _mount(value: Any, base: Path, folder: Path, where: str) -> ContainerMount | str | None:
    """Return a mount, the options of a file system in memory, or None for a folder of logs.

    Raises: ConfigError: the source is no part of the task.
    """
    if isinstance(value, Mapping):
        kind = value.get("type", "volume")
        source, target = str(value.get("source") or ""), str(value.get("target") or "")
        is_read_only = bool(value.get("read_only"))
        if kind == "tmpfs":
            return target
        if kind not in ("bind", "volume"):
            raise ConfigError(f"{where}: the type {kind!r} is not supported")
    else:
        if str(value).startswith(LOG_MOUNTS):
            return None
        words = _interpolated(str(value), where).split(":")
        source, target = ("", words[0]) if len(words) == 1 else (words[0], words[1])
        is_read_only = "ro" in (words[2].split(",") if len(words) > 2 else [])
    if source.startswith(LOG_MOUNTS) or not source:
        return None
    if not target.startswith("/"):
        raise ConfigError(f"{where}: {value!r:.60} has no absolute target")
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*", source):
        return ContainerMount(source=source, target=target, is_read_only=is_read_only)
    path = (base / source).resolve()
    if not path.is_relative_to(folder.resolve()) or not path.exists():
        raise ConfigError(f"{where}: {source} is no file or folder of the task")
    return ContainerMount(source=str(path), target=target, is_read_only=is_read_only)


def _healthcheck(check: Mapping[str, Any], where: str) -> Healthcheck | None:
    """Return the health check of a service; None without one. Raises: ConfigError."""
    test = check.get("test")
    words = ["CMD-SHELL", test] if isinstance(test, str) else [str(each) for each in test or []]
    argv = health_command([_interpolated(word, where) for word in words])
    if not argv:
        return None
    return Healthcheck(
        argv=argv,
        interval_sec=_seconds(check.get("interval", "30s"), f"{where}.interval"),
        timeout_sec=_seconds(check.get("timeout", "30s"), f"{where}.timeout"),
        start_period_sec=_seconds(check.get("start_period", "0s"), f"{where}.start_period"),
        start_interval_sec=_seconds(check.get("start_interval", "5s"), f"{where}.start_interval"),
        retries=int(_number(check.get("retries", 3), f"{where}.retries")),
    )


def _seconds(value: Any, where: str) -> float:
    """Return a duration such as "1m30s". Raises: ConfigError."""
    match = DURATION.fullmatch(str(value).strip())
    if match is None or not any(match.groups()):
        raise ConfigError(f"{where}={value!r} is not a duration such as 1m30s")
    hours, minutes, seconds, milliseconds = (float(each or 0) for each in match.groups())
    return 3600 * hours + 60 * minutes + seconds + milliseconds / 1000


def _conditions(value: Any, where: str) -> dict[str, ServiceState]:
    """Return the states of the services that one waits for. Raises: ConfigError."""
    if not isinstance(value, Mapping):
        return dict.fromkeys(map(str, value), ServiceState.STARTED)
    states: dict[str, ServiceState] = {}
    for name, rule in value.items():
        condition = (rule or {}).get("condition", ServiceState.STARTED.value)
        if condition not in CONDITIONS:
            raise ConfigError(f"{where}.{name}.condition={condition!r} is not supported")
        states[name] = ServiceState(condition)
    return states


def read_one_service(path: Path, folder: Path) -> OneService:
    """Return the settings that a sandbox without images obeys. Raises: ConfigError."""
    services, file = _services(path, folder, top=TOP[:4])
    remedy = "set envs.sandbox.backend=docker or podman"
    if further := [name for name in services if name not in MAIN_SERVICES]:
        raise ConfigError(
            f"{file}: the task has further containers ({', '.join(further)}), and a sandbox is"
            f" one; {remedy}"
        )
    if len(services) > 1:
        raise ConfigError(f"{file}: the task has two containers, {' and '.join(services)}")
    variables: dict[str, str] = {}
    work = ""
    for name, service in services.items():
        where = f"{file}: services.{name}"
        _check_one_service(service, where)
        variables = _variables(service.get("environment"), f"{where}.environment")
        work = _interpolated(service.get("working_dir") or "", f"{where}.working_dir")
    return OneService(variables=variables, folder=work)


def _check_one_service(service: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if a sandbox without images cannot have a service's settings."""
    check_fields(service, ONE_SERVICE_FIELDS, where)
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
