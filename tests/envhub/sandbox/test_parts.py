"""Laws of the sandbox's parts that need no namespaces."""

import errno
import struct
from pathlib import Path

import pytest

from common.config.envs import SandboxOptions
from envhub.sandbox.backends import limits_of, make_backend, worker_bytes
from envhub.sandbox.cgroup import Cgroup
from envhub.sandbox.containers import Containers, Python, container_arguments
from envhub.sandbox.interface import MIB, CommandEnd, CommandResult, SandboxLimits, SandboxRequest
from envhub.sandbox.process import AUDIT, NAMES_FIRST, NUMBERS, REFUSED, filter_program

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


def test_limits_of_the_configuration_reach_the_sandbox() -> None:
    options = SandboxOptions(memory_mib=100, processes=9, file_mib=3, disk_mib=5, max_files=200)
    expected = SandboxLimits(
        memory_bytes=100 * MIB, processes=9, file_bytes=3 * MIB, disk_bytes=5 * MIB, max_files=200
    )
    assert limits_of(options) == expected
    assert worker_bytes(options, 2) == (1024 + 2 * 4 * 115) * MIB
    assert worker_bytes(SandboxOptions(backend="remote", url="http://a"), 2) == 1024 * MIB


def test_container_has_the_limits_and_no_network() -> None:
    limits = SandboxLimits(memory_bytes=100 * MIB, processes=12, disk_bytes=8 * MIB)
    request = SandboxRequest(limits=limits, folder="/work")
    python = Python(words=["python3"])
    argv = container_arguments(
        request, "box", "python:3", folder="/work", python=python, program="docker"
    )
    line = " ".join(argv)
    for words in (
        "run --rm --interactive --name box",
        "--network none",
        "--read-only",
        "--cap-drop ALL",
        "--security-opt no-new-privileges",
        "--user 1000:1000",
        f"--memory {188 * MIB} --memory-swap {188 * MIB}",
        "--pids-limit 20",
        f"--shm-size {2 * MIB}",
        f"--tmpfs /work:rw,exec,nosuid,nodev,size={8 * MIB},mode=1777",
        f"--tmpfs /tests:rw,exec,nosuid,nodev,size={2 * MIB},mode=1777",
        "--entrypoint python3 python:3 -I -S -c",
    ):
        assert words in line


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
