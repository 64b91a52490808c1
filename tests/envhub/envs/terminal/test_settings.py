"""Laws of task settings: every field of the two packages is obeyed or refused by name."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from common.config.envs import EnvsSection, SandboxOptions, TerminalOptions
from common.errors import ConfigError
from envhub.env import Style
from envhub.envs.terminal.env import instruction_of, make_spec
from envhub.envs.terminal.fields import Use, check_fields
from envhub.envs.terminal.tasks import BENCH_FIELDS, HARBOR_FIELDS, load_task_of, read_settings
from envhub.sandbox.interface import MIB, Healthcheck

NETWORK = ("network_mode", "allowed_hosts")
# The models of `harbor.models.task.config` 0.25.0 with all of their fields, by the field of
# task.toml that has such a model. A field without an entry of its own is refused with its table.
HARBOR_MODELS = {
    "": (
        *("schema_version", "task", "metadata", "verifier", "agent", "environment", "solution"),
        *("source", "multi_step_reward_strategy", "steps", "artifacts"),
    ),
    "task": ("name", "version", "description", "authors", "keywords"),
    "agent": ("timeout_sec", "user", *NETWORK),
    "verifier": (
        *("timeout_sec", "env", "user", "environment_mode", "environment", "collect"),
        *NETWORK,
    ),
    "verifier.collect": ("command", "service", "timeout_sec", "user"),
    "solution": ("env",),
    "environment": (
        *("build_timeout_sec", "docker_image", "os", "cpus", "memory_mb", "storage_mb", "gpus"),
        *("gpu_types", "tpu", "mcp_servers", "env", "skills_dir", "healthcheck", "workdir"),
        *("allow_internet", *NETWORK),
    ),
    "environment.healthcheck": (
        *("command", "interval_sec", "timeout_sec", "start_period_sec", "start_interval_sec"),
        "retries",
    ),
    "environment.tpu": ("type", "topology"),
    "environment.mcp_servers": ("name", "transport", "url", "command", "args", "headers"),
    "artifacts": ("source", "destination", "exclude", "service"),
    "steps": ("name", "agent", "verifier", "min_reward", "healthcheck", "artifacts"),
}
OLDER = ("version", "environment.memory", "environment.storage")
# The fields of `terminal_bench.handlers.trial_handler.Task` 0.2.18.
BENCH_MODEL = (
    *("instruction", "author_name", "author_email", "difficulty", "category", "tags"),
    *("parser_name", "max_agent_timeout_sec", "max_test_timeout_sec", "run_tests_in_same_shell"),
    *("disable_asciinema", "estimated_duration_sec", "expert_time_estimate_min"),
    "junior_time_estimate_min",
)


def task(folder: Path, settings: str = "", **files: str) -> Path:
    """Write a task of Harbor; `__` stands for each slash of a file's name."""
    contents = {"task.toml": settings, "instruction.md": "Do it.", **files}
    for name, text in contents.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def bench(folder: Path, settings: str, compose: str = "") -> Path:
    """Write a task of Terminal-Bench."""
    (folder / "task.yaml").write_text(settings, encoding="utf-8")
    if compose:
        (folder / "docker-compose.yaml").write_text(compose, encoding="utf-8")
    return folder


@pytest.mark.parametrize("model", HARBOR_MODELS)
def test_every_field_of_harbor_has_a_use(model: str) -> None:
    for name in HARBOR_MODELS[model]:
        path = f"{model}.{name}" if model else name
        is_table = any(other.startswith(f"{path}.") for other in HARBOR_FIELDS)
        above = HARBOR_FIELDS.get(model)
        is_in_table = above is not None and above.use in (Use.REFUSED, Use.DESCRIPTION)
        assert path in HARBOR_FIELDS or is_table or is_in_table, path


def test_table_has_no_field_that_the_packages_lack() -> None:
    paths = {
        f"{model}.{name}" if model else name
        for model, names in HARBOR_MODELS.items()
        for name in names
    }
    assert set(HARBOR_FIELDS) <= paths | set(OLDER)
    assert set(BENCH_FIELDS) == {*BENCH_MODEL, "descriptions"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ('[agent]\nuser = "root"', "agent.user='root' is not supported: commands and tests run"),
        ("[verifier]\nuser = 0", "verifier.user=0 is not supported"),
        ('[agent]\nnetwork_mode = "public"', "agent.network_mode='public' is not supported"),
        ('[verifier]\nallowed_hosts = ["x.org"]', "verifier.allowed_hosts=['x.org'] is not"),
        ('[verifier]\nnetwork_mode = "allowlist"', "envs.terminal.without_network=true plays"),
        ('[environment]\nnetwork_mode = "public"', "environment.network_mode='public' is not"),
        ("[environment]\nallow_internet = true", "environment.allow_internet=True is not"),
        ("[environment]\ngpus = 1", "environment.gpus=1 is not supported"),
        ('[environment]\ngpu_types = ["H100"]', "environment.gpu_types=['H100'] is not"),
        ('[environment.tpu]\ntype = "v4"\ntopology = "2x2"', "environment.tpu={'type': 'v4'"),
        ('[environment]\nos = "windows"', "environment.os='windows' is not supported"),
        ('[environment]\nskills_dir = "/skills"', "environment.skills_dir='/skills' is not"),
        ('[[environment.mcp_servers]]\nname = "a"', "environment.mcp_servers=[{'name': 'a'}]"),
        ('[verifier]\nenvironment_mode = "separate"', "environment_mode='separate' is not"),
        ("[verifier.environment]", "verifier.environment={} is not supported"),
        ('[[verifier.collect]]\ncommand = "x"', "verifier.collect=[{'command': 'x'}] is not"),
        ('[[steps]]\nname = "one"', "steps=[{'name': 'one'}] is not supported"),
        ('multi_step_reward_strategy = "mean"', "multi_step_reward_strategy='mean' is not"),
        ('schema_version = "2.0"', "schema_version='2.0' is none of 1.0, 1.1"),
        ("[environment]\nwork_dir = '/x'", "the field environment.work_dir is unknown"),
        ("[extra]\nx = 1", "the field extra is unknown"),
        ("environment = 1", "environment must be a table"),
        ("[verifier.env]\nA = 1", "verifier.env.A=1 is not a text"),
        ('[solution.env]\nA = "${LONGSTRIDE_LOST}"', "needs the variable LONGSTRIDE_LOST; set it"),
        ("[environment]\nmemory = '2 cups'", "environment.memory='2 cups' is not a size"),
        ("[environment]\nstorage_mb = -1", "environment.storage_mb=-1 is not a number"),
        ("[environment.healthcheck]\nretries = 2", "environment.healthcheck has no command"),
        ("[agent]\ntimeout_sec = nan", "agent.timeout_sec=nan"),
    ],
)
def test_field_that_is_not_obeyed_is_refused_by_name(
    tmp_path: Path, settings: str, words: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        read_settings(task(tmp_path, settings), without_network=False)
    assert words in str(raised.value)
    assert "task.toml: " in str(raised.value) or "timeout_sec" in words


def test_fields_of_harbor_are_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSTRIDE_HOST", "here")
    settings = """
        schema_version = "1.4"
        source = "x"
        artifacts = []
        [task]
        name = "a/b"
        [metadata]
        anything = 1
        [agent]
        timeout_sec = 9
        user = "agent"
        [verifier]
        timeout_sec = 8.5
        env = { V = "${LONGSTRIDE_LOST:-else}" }
        environment_mode = "shared"
        [solution.env]
        S = "$kept"
        [environment]
        docker_image = "img:1"
        workdir = "/data"
        network_mode = "no-network"
        memory_mb = 100
        storage = "1G"
        cpus = 2
        gpus = 0
        os = "Linux"
        mcp_servers = []
        env = { E = "${LONGSTRIDE_HOST}" }
        [environment.healthcheck]
        command = "true"
        retries = 2
    """
    canary = "<!-- benchmark CANARY x -->\n# canary y\n\n# Title\n"
    files = {"instruction.md": canary}
    read = read_settings(task(tmp_path, settings, **files), without_network=False)
    assert read.instruction == "# Title"
    assert (read.image, read.work) == ("img:1", "/data")
    assert (read.variables, read.test_variables, read.solution_variables) == (
        {"E": "here"},
        {"V": "else"},
        {"S": "$kept"},
    )
    assert (read.agent_timeout_s, read.test_timeout_s) == (9.0, 8.5)
    assert (read.memory_bytes, read.disk_bytes) == (100 * MIB, 1024 * MIB)
    assert read.healthcheck == Healthcheck(argv=("bash", "-c", "true"), retries=2)


def test_task_that_asks_for_a_network_is_played_without_on_request(tmp_path: Path) -> None:
    settings = '[environment]\nallow_internet = true\n[agent]\nnetwork_mode = "public"'
    assert read_settings(task(tmp_path, settings), without_network=True).instruction == "Do it."


@pytest.mark.parametrize("name", ["trajectory.json", "tests__.harborignore"])
def test_file_that_changes_a_task_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"is not supported"):
        read_settings(task(tmp_path, **{name: ""}), without_network=False)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("parser_name: swebench", "parser_name='swebench' is not supported: the exit code"),
        ("run_tests_in_same_shell: true", "run_tests_in_same_shell=True is not supported"),
        ("run_tests_in_same_shell: 0", "run_tests_in_same_shell=0 is not supported"),
        ("max_agent_timeout_secs: 1", "task.yaml: the field max_agent_timeout_secs is unknown"),
    ],
)
def test_field_of_terminal_bench_is_refused_by_name(
    tmp_path: Path, settings: str, words: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        read_settings(bench(tmp_path, f"instruction: x\n{settings}\n"), without_network=False)
    assert words in str(raised.value)


def test_times_of_terminal_bench_have_its_defaults(tmp_path: Path) -> None:
    read = read_settings(bench(tmp_path, "instruction: x\n"), without_network=False)
    assert (read.agent_timeout_s, read.test_timeout_s) == (360.0, 60.0)


TEMPLATE = """
services:
  client:
    build:
      dockerfile: Dockerfile
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    container_name: ${T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME}
    command: [ "sh", "-c", "sleep infinity" ]
    environment:
      - TEST_DIR=${T_BENCH_TEST_DIR}
      - A=b=c
      - LONGSTRIDE_HOST
    volumes:
      - ${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}
"""


def test_compose_file_of_one_container_is_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGSTRIDE_HOST", "here")
    read = read_settings(bench(tmp_path, "instruction: x\n", TEMPLATE), without_network=False)
    assert read.variables == {"TEST_DIR": "/tests", "A": "b=c", "LONGSTRIDE_HOST": "here"}


@pytest.mark.parametrize(
    ("service", "words"),
    [
        (
            "db: {image: postgres}\nvolumes: {key: }",
            "the task has further containers (db), and a sandbox is one",
        ),
        ("client: {}", "the task has two containers, main and client"),
        ("main: {command: ./serve}", "services.main.command='./serve': no program runs beside"),
        ("main: {entrypoint: /start.sh}", "entrypoint='/start.sh': no program starts first"),
        ("main: {image: 'postgres:16'}", "image='postgres:16' is not supported; set environment"),
        ("main: {build: ..}", "build.context='..' is not supported"),
        ("main: {build: {args: {A: 1}}}", "build.args={'A': 1} is not supported"),
        ("main: {volumes: ['./a:/a']}", "volumes: './a:/a' is not supported"),
        ("main: {user: root}", "services.main: user='root' is not supported"),
        ("main: {privileged: true}", "services.main: privileged=True is not supported"),
        ("main: {}\nnetworks: {a: {internal: true}}", "networks is not supported: tasks have one"),
        ("main: {depends_on: [db]}", "the field depends_on is unknown or not supported"),
        ("main: {environment: {A: '${LONGSTRIDE_LOST}'}}", "needs the variable LONGSTRIDE_LOST"),
    ],
)
def test_compose_file_with_more_than_a_container_is_refused(
    tmp_path: Path, service: str, words: str
) -> None:
    main = "" if service.startswith("main") else "  main: {}\n"
    compose = f"services:\n{main}  {service}\n"
    folder = task(tmp_path, environment__docker_compose="")
    (folder / "environment" / "docker-compose.yaml").write_text(compose, encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        read_settings(folder, without_network=False)
    assert words in str(raised.value)
    assert str(raised.value).startswith("environment/docker-compose.yaml: ")


def test_number_is_no_truth_value() -> None:
    fields: dict[str, Any] = {"environment": {"gpus": False}}
    with pytest.raises(ConfigError, match="gpus=False is not supported"):
        check_fields(fields, HARBOR_FIELDS, "task.toml")


@pytest.mark.parametrize(
    ("settings", "has_network", "allowed"),
    [
        ("", True, None),
        ('[environment]\nnetwork_mode = "no-network"', False, None),
        ("[environment]\nallow_internet = false", False, None),
        ('[environment]\nnetwork_mode = "allowlist"', False, None),
        (
            '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["x.org"]',
            False,
            (("x.org",), ("x.org",), ("x.org",)),
        ),
        (
            '[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["x.org", "10.0.0.0/8"]\n'
            '[verifier]\nnetwork_mode = "no-network"',
            False,
            (("*",), ("x.org", "10.0.0.0/8"), ()),
        ),
        (
            '[environment]\nnetwork_mode = "no-network"\n[verifier]\nnetwork_mode = "public"',
            False,
            ((), (), ("*",)),
        ),
    ],
)
def test_network_of_each_phase_is_the_one_of_harbor(
    tmp_path: Path, settings: str, has_network: bool, allowed: object
) -> None:
    read = read_settings(
        task(tmp_path, settings), without_network=False, has_containers=True, permits_network=True
    )
    assert (read.has_network, read.allowed) == (has_network, allowed)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            '[agent]\nallowed_hosts = ["x.org"]',
            "agent.allowed_hosts needs network_mode='allowlist'",
        ),
        ('[agent]\nnetwork_mode = "some"', "agent.network_mode='some' is none of public"),
        (
            '[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["https://x.org"]',
            "agent.allowed_hosts: 'https://x.org' is",
        ),
        ('[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = [1]', "agent.allowed_hosts: "),
        ('[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = "x"', "agent.allowed_hosts: "),
    ],
)
def test_wrong_network_is_refused_by_name(tmp_path: Path, settings: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_settings(
            task(tmp_path, settings),
            without_network=False,
            has_containers=True,
            permits_network=True,
        )
    assert words in str(raised.value)


OFFLINE = (
    "You work in a Linux terminal without a network. Each answer is one shell command, in a ```bash"
    " block or as plain text. Answer submit when the task is finished."
)


def test_instruction_names_the_hosts_that_the_agent_reaches() -> None:
    assert instruction_of(()) == OFFLINE
    for hosts, words in (
        (["*"], "with a network"),
        (["x.org", "10.0.0.0/8"], "with a network that reaches only x.org, 10.0.0.0/8"),
    ):
        assert instruction_of(hosts) == OFFLINE.replace("without a network", words)


@pytest.mark.parametrize(
    ("network", "agent", "hosts"),
    [
        ("none", "", ()),
        ("task", 'network_mode = "no-network"', ()),
        ("task", "", ("*",)),
        ("task", 'network_mode = "allowlist"\nallowed_hosts = ["x.org"]', ("x.org",)),
    ],
)
def test_instruction_of_tasks_with_a_network_is_in_their_first_observation(
    tmp_path: Path, network: str, agent: str, hosts: tuple[str, ...]
) -> None:
    settings = f"[agent]\n{agent}\n" if agent else ""
    task(
        tmp_path / "a", settings, **{"tests__test.sh": "true", "environment__Dockerfile": "FROM x"}
    )
    terminal = TerminalOptions(train=str(tmp_path), network=network)
    spec = make_spec(EnvsSection(sandbox=SandboxOptions(backend="podman"), terminal=terminal))
    env: Any = spec.make(Style.COMPACT)
    (only,) = env._shared.tasks["train"]
    assert only.agent_hosts == hosts
    assert set(spec.instruction.values()) == {"" if hosts else OFFLINE}
    before = f"{instruction_of(hosts)}\n\n" if hosts else ""
    text = env._shared.opening(only, "/app")
    assert text == f"{before}Do it.\n\nThe work folder is /app."


SEPARATE = "[verifier]\nenvironment_mode = 'separate'\n"


def test_separate_verifier_has_its_own_image_limits_and_network(tmp_path: Path) -> None:
    settings = """
        artifacts = ["/out", { source = "/log/", destination = "x" }]
        [environment]
        docker_image = "agent:1"
        memory_mb = 64
        [environment.env]
        A = "1"
        [verifier.environment]
        docker_image = "tests:1"
        memory_mb = 32
        network_mode = "no-network"
    """
    folder = task(tmp_path, settings, tests__test__sh="true")
    read = read_settings(folder, without_network=False, has_containers=True, permits_network=True)
    assert read.verifier is not None
    assert read.verifier.container is not None
    assert read.artifacts == ("/logs/artifacts", "/out", "/log")
    assert (read.image, read.verifier.container.image) == ("agent:1", "tests:1")
    assert (read.memory_bytes, read.verifier.memory_bytes) == (64 * MIB, 32 * MIB)
    assert (read.has_network, read.verifier.has_network) == (True, False)
    assert (read.verifier.variables, read.verifier.has_tests) == ({}, True)


@pytest.mark.parametrize("is_of_tests", [True, False])
def test_tests_that_download_need_the_network_of_their_own_container(
    tmp_path: Path, is_of_tests: bool
) -> None:
    modes = ["no-network", "public"] if is_of_tests else ["public", "no-network"]
    settings = '[environment]\nnetwork_mode = "{}"\n[verifier.environment]\nnetwork_mode = "{}"\n'
    files = {"environment__Dockerfile": "FROM x\n", "tests__test.sh": "curl https://example.org\n"}
    folder = task(tmp_path, settings.format(*modes), **files)
    load = partial(load_task_of, folder, "here", has_containers=True, permits_network=True)
    if is_of_tests:
        assert load().tests_reach_network
        return
    with pytest.raises(ConfigError, match="downloads"):
        load()


def test_separate_verifier_without_an_image_has_a_copy_of_the_task(tmp_path: Path) -> None:
    settings = SEPARATE + "[environment]\ndocker_image = 'agent:1'\nmemory_mb = 64\n"
    read = read_settings(task(tmp_path, settings), without_network=False, has_containers=True)
    assert read.verifier is not None
    assert read.verifier.container is not None
    assert read.verifier.container.image == "agent:1"
    assert (read.verifier.memory_bytes, read.verifier.has_tests) == (64 * MIB, False)
    assert read.artifacts == ("/logs/artifacts",)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("artifacts = ['out']\n" + SEPARATE, "'out' is no absolute path"),
        ("artifacts = ['/a/../b']\n" + SEPARATE, "'/a/../b' is no absolute path"),
        ("artifacts = [{source = '/a', exclude = ['b']}]\n" + SEPARATE, "artifacts.exclude=['b']"),
        ("artifacts = [{source = '/a', service = 'db'}]\n" + SEPARATE, "artifacts.service='db'"),
        ("[verifier]\nenvironment_mode = 'other'\n", "environment_mode='other' is none"),
        (
            "[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]\n",
            "verifier.environment needs environment_mode='separate'",
        ),
        ("[verifier.environment]\ngpus = 1\n", "verifier.environment.gpus=1 is not supported"),
        (SEPARATE, "a separate verifier needs an image"),
    ],
)
def test_part_of_a_separate_verifier_that_is_not_obeyed_is_refused(
    tmp_path: Path, settings: str, words: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        read_settings(task(tmp_path, settings), without_network=False, has_containers=True)
    assert words in str(raised.value)
