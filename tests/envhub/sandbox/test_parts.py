"""Laws of the sandbox's parts that need no namespaces."""

import asyncio
import errno
import struct
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from common.config.envs import SandboxOptions
from envhub.sandbox.backends import limits_of, make_backend, worker_bytes
from envhub.sandbox.cgroup import Cgroup
from envhub.sandbox.containers import (
    ContainerGroup,
    Containers,
    is_alive,
    owner_text,
    size_of_files,
)
from envhub.sandbox.engine import (
    ContainerEngine,
    ContainerImage,
    digest_of_build,
    read_image_settings,
)
from envhub.sandbox.interface import (
    MIB,
    CommandEnd,
    CommandResult,
    ContainerMount,
    ContainerSpec,
    Healthcheck,
    ImageBuild,
    SandboxFailed,
    SandboxLimits,
    SandboxRequest,
    ServiceState,
)
from envhub.sandbox.process import (
    AUDIT,
    NAMES_FIRST,
    NUMBERS,
    REFUSED,
    AgentSandbox,
    Launch,
    filter_program,
)

ALLOW = 0x7FFF0000
REFUSE = 0x00050000 | errno.EPERM


def verdict(program: bytes, machine: int, number: int, arguments: tuple[int, ...] = (0, 0)) -> int:
    """Return the value of a filter, computed as the kernel does."""
    fields = {0: number, 4: machine, 16: arguments[0], 24: arguments[1]}
    lines = list(struct.iter_unpack("=HBBI", program))
    loaded, place = 0, 0
    while True:
        code, if_true, if_false, value = lines[place]
        place += 1
        if code == 0x20:
            loaded = fields[value]
        elif code == 0x06:
            return value
        else:
            is_true = loaded == value if code == 0x15 else loaded >= value
            place += if_true if is_true else if_false


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filter_refuses_only_the_listed_calls(machine: str) -> None:
    program = filter_program(machine)
    refused = {n for n in range(600) if verdict(program, AUDIT[machine], n) == REFUSE}
    assert refused == set(REFUSED[machine].values())
    assert verdict(program, AUDIT[machine], 0) == ALLOW
    assert verdict(program, AUDIT[machine], 0x40000000) == REFUSE  # The x32 ABI.
    assert verdict(program, 0x40000003, 0) == REFUSE  # System calls of 32 bits.


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("name", NAMES_FIRST)
def test_filter_refuses_calls_that_name_the_first_process(machine: str, name: str) -> None:
    program, audit, number = filter_program(machine), AUDIT[machine], NUMBERS[machine][name]
    for index, value in NAMES_FIRST[name]:
        arguments = (value, 0) if index == 0 else (0, value)
        assert verdict(program, audit, number, arguments) == REFUSE
        assert verdict(program, audit, number, (0, 0)) == ALLOW
        assert verdict(program, audit, number, (7, 7)) == ALLOW
        assert verdict(program, audit, 39, arguments) == ALLOW  # Another call, such as getpid.


def test_unknown_machine_has_no_filter() -> None:
    assert filter_program("riscv64") == b""


class KernelFolder:
    """A folder with the files that the kernel would make in a control group."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "cgroup.controllers").write_text("memory pids", encoding="ascii")


def test_group_is_missing_without_version_2_or_its_controllers(tmp_path: Path) -> None:
    assert Cgroup.create(SandboxLimits(), tmp_path) is None  # Version 1.
    KernelFolder(tmp_path)
    assert Cgroup.create(SandboxLimits(), tmp_path) is None  # No memory.max in the new group.
    assert [each.name for each in tmp_path.iterdir()] == ["cgroup.controllers"]
    assert Cgroup.create(SandboxLimits(), tmp_path / "lost") is None


def test_group_is_removed_once_its_processes_have_ended(tmp_path: Path) -> None:
    folder = tmp_path / "group"
    folder.mkdir()
    (folder / "cgroup.kill").write_text("0", encoding="ascii")

    async def main() -> str:
        removing = asyncio.create_task(Cgroup(folder).remove())
        await asyncio.sleep(0.1)
        asked = (folder / "cgroup.kill").read_text(encoding="ascii")
        (folder / "cgroup.kill").unlink()  # The kernel now lets the folder go.
        await removing
        return asked

    assert asyncio.run(main()) == "1"
    assert not folder.exists()


def test_failed_start_leaves_no_group(tmp_path: Path) -> None:
    folder = tmp_path / "group"
    folder.mkdir()
    launch = Launch(argv=["/lost/program"], options={}, memory=Cgroup(folder))
    with pytest.raises(SandboxFailed, match="cannot start"):
        asyncio.run(AgentSandbox.start(launch, folder="/app", timeout_s=30.0))
    assert not folder.exists()


def test_group_that_takes_no_process_fails_the_start(tmp_path: Path) -> None:
    argv = ["sh", "-c", r"printf '\000\000\000\002{}'; cat"]  # A reply: its length, and no field.
    launch = Launch(argv=argv, options={}, memory=Cgroup(tmp_path / "lost"))
    with pytest.raises(SandboxFailed, match="control group"):
        asyncio.run(AgentSandbox.start(launch, folder="/app", timeout_s=30.0))


def test_limits_of_the_configuration_reach_the_sandbox() -> None:
    options = SandboxOptions(memory_mib=100, processes=9, file_mib=3, disk_mib=5, max_files=200)
    expected = SandboxLimits(
        memory_bytes=100 * MIB, processes=9, file_bytes=3 * MIB, disk_bytes=5 * MIB, max_files=200
    )
    assert limits_of(options) == expected
    assert worker_bytes(options, 2) == (1024 + 2 * 4 * 115) * MIB
    assert worker_bytes(SandboxOptions(backend="remote", url="http://a"), 2) == 1024 * MIB


def group(request: SandboxRequest, spec: ContainerSpec, *, is_closed: bool) -> ContainerGroup:
    """Return the containers of a request, whose image has an entry point that runs a shell."""
    image = ContainerImage(digest="sha256:1", folder="/", user="", only_runs=True, healthcheck=None)
    images = {each.name: image for each in (spec, *request.services)}
    return ContainerGroup(
        ContainerEngine("docker"), request, main=spec, images=images, is_closed=is_closed, cpus=2.0
    )


def test_container_without_a_task_has_no_rights() -> None:
    limits = SandboxLimits(memory_bytes=100 * MIB, processes=12, disk_bytes=8 * MIB)
    request = SandboxRequest(limits=limits, folder="/work")
    spec = ContainerSpec(image="python:3", user="1000:1000")
    line = " ".join(group(request, spec, is_closed=True).arguments(spec))
    for words in (
        "--network none",
        "--read-only",
        "--cap-drop ALL",
        "--security-opt no-new-privileges",
        "--user 1000:1000",
        f"--memory {124 * MIB} --memory-swap {124 * MIB}",
        "--pids-limit 12",
        f"--shm-size {2 * MIB}",
        f"--tmpfs /work:rw,exec,nosuid,nodev,size={8 * MIB},mode=1777",
        f"--tmpfs /tests:rw,exec,nosuid,nodev,size={2 * MIB},mode=1777",
        "--entrypoint sh sha256:1 -c exec sleep infinity",
    ):
        assert words in line


def test_container_of_a_task_is_as_its_author_made_it() -> None:
    mounts = [
        ContainerMount(source="/task/data", target="/data", is_read_only=True),
        ContainerMount(source="/task/copy", target="/copy"),
        ContainerMount(source="common", target="/common"),
    ]
    spec = ContainerSpec(
        entrypoint=["/start"],
        command=["serve", "-p 80"],
        variables={"A": "b c"},
        user="bob",
        folder="/srv",
        mounts=mounts,
        tmpfs=["/t:size=1m"],
        is_read_only=True,
        cpus=0.5,
        memory_bytes=64 * MIB,
    )
    containers = group(SandboxRequest(), spec, is_closed=False)
    words = containers.arguments(spec)
    pairs = {f"{first} {second}" for first, second in pairwise(words)}
    volume = containers.container("volume-common")
    assert {
        "--network none",
        "--user bob",
        "--workdir /srv",
        "--env A=b c",
        "--tmpfs /t:size=1m",
        "--cpus 0.5",
        f"--memory {64 * MIB}",
        "--volume /task/data:/data:ro",
        f"--volume {volume}:/common",
    } <= pairs
    assert "--read-only" in words
    assert "--cap-drop" not in words
    assert words[-5:] == ["--entrypoint", "/start", "sha256:1", "serve", "-p 80"]


@pytest.mark.parametrize(("engine", "is_asked"), [("podman", True), ("docker", False)])
def test_container_gets_no_proxy_of_the_hub(engine: str, is_asked: bool) -> None:
    containers = replace(
        group(SandboxRequest(has_network=True), ContainerSpec(), is_closed=False),
        engine=ContainerEngine(engine),
    )
    assert ("--http-proxy=false" in containers.arguments(containers.main)) is is_asked


def test_services_share_the_network_of_one_container() -> None:
    first = ContainerSpec(name="api", after={"db": ServiceState.HEALTHY})
    second = ContainerSpec(name="db")
    main = ContainerSpec(after={"api": ServiceState.STARTED})
    request = SandboxRequest(services=[first, second])
    containers = group(request, main, is_closed=False)
    assert [spec.name for spec in containers.specs] == ["db", "api", "main"]
    network = f"container:{containers.container('network')}"
    for spec in containers.specs:
        words = containers.arguments(spec)
        assert words[words.index("--network") + 1] == network
    circle = replace(second, after={"api": ServiceState.STARTED})
    with pytest.raises(SandboxFailed, match="wait for each other"):
        _ = group(replace(request, services=[first, circle]), main, is_closed=False).specs


def test_process_of_a_label_is_alive_only_itself() -> None:
    assert is_alive(owner_text())
    boot, number, began = owner_text().split(".", 2)
    assert not is_alive(f"{boot}.{number}.{float(began) - 60:.2f}")
    assert not is_alive(f"{int(boot) - 600}.{number}.{began}")
    assert not is_alive("no label")


def test_health_check_of_an_image_is_read() -> None:
    settings = {
        "Id": "sha256:2",
        "Config": {
            "WorkingDir": "/app",
            "User": "bob",
            "Entrypoint": ["/bin/sh", "-c", "x"],
            "Healthcheck": {
                "Test": ["CMD-SHELL", "test -e /up"],
                "Interval": 2_000_000_000,
                "Retries": 5,
            },
        },
    }
    expected = Healthcheck(
        argv=["sh", "-c", "test -e /up"], interval_sec=2.0, timeout_sec=30.0, retries=5
    )
    assert read_image_settings(settings) == ContainerImage(
        digest="sha256:2", folder="/app", user="bob", only_runs=False, healthcheck=expected
    )


@pytest.mark.parametrize("name", ["docker", "podman"])
def test_missing_container_program_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    backend = make_backend(SandboxOptions(backend=name))
    assert isinstance(backend, Containers)
    assert backend.problem().startswith(f"{name} is missing; install it")


def test_missing_bubblewrap_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    problem = make_backend(SandboxOptions()).problem()
    assert "bubblewrap (bwrap) is missing; run apt-get install bubblewrap" in problem
    assert "envs.sandbox.backend=docker, podman or remote" in problem


@pytest.mark.parametrize(
    ("code", "end", "is_ok"),
    [(0, CommandEnd.EXIT, True), (1, CommandEnd.EXIT, False), (0, CommandEnd.TIMEOUT, False)],
)
def test_command_succeeds_only_by_its_own_exit(code: int, end: CommandEnd, is_ok: bool) -> None:
    result = CommandResult(exit_code=code, ended_by=end, output=b"", num_bytes=0, seconds=0.0)
    assert result.is_ok is is_ok


def test_new_data_counts_at_once_and_holes_do_not(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.truncate(64 * MIB)
        file.seek(16 * MIB)
        file.write(bytes(2 * MIB))
        file.flush()
        num_bytes, num_files = size_of_files([tmp_path])
    assert 2 * MIB <= num_bytes < 3 * MIB
    assert num_files == 1


@pytest.mark.parametrize("dockerfile", ["Dockerfile", "../Dockerfile"])
def test_changed_dockerfile_is_another_build(tmp_path: Path, dockerfile: str) -> None:
    context = tmp_path / "part"
    context.mkdir()
    build = ImageBuild(context=context, dockerfile=dockerfile)
    digests: set[str] = set()
    for base in ("debian:12", "debian:13"):
        (context / dockerfile).write_text(f"FROM {base}\n", encoding="utf-8")
        digests.add(digest_of_build(build))
    assert len(digests) == 2
