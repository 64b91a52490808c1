"""The settings of tasks: every field of Harbor and Terminal-Bench is obeyed or refused by name."""

import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from common.errors import ConfigError
from envhub.envs.terminal.image import is_shell
from envhub.sandbox.interface import LOGS, MIB, TESTS, USERS

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
