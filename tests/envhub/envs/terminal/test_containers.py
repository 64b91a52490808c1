"""Laws of tasks in containers. They need an image of Debian, and Podman, or TEST_ENGINE=docker."""

import asyncio
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.config.envs import ContainerOptions, EnvsSection, SandboxOptions, TerminalOptions
from envhub.env import EnvFailure, StepResult, Style
from envhub.envs.terminal.env import TerminalEnv, make_spec
from envhub.sandbox.containers import Containers, prune
from envhub.sandbox.engine import LABEL, ContainerEngine
from envhub.sandbox.interface import (
    CommandEnd,
    ContainerSpec,
    ImageBuild,
    RefusedBySandbox,
    Sandbox,
    SandboxFailed,
    SandboxFile,
    SandboxRequest,
)
from tests.envhub.envs.terminal.container_tasks import BASE, HARBOR, TASKS, write_task

ENGINE = os.environ.get("TEST_ENGINE", "podman")
OPTIONS = SandboxOptions(backend=ENGINE, start_timeout_s=300.0, disk_mib=16)
QUICK = ("no-python", "bench")  # Tasks of `make test`. `make test-long` plays all of them.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@cache
def problem() -> str:
    if missing := Containers(OPTIONS).problem():
        return missing
    exists = (
        subprocess.run(
            [ENGINE, "image", "inspect", BASE], capture_output=True, check=False
        ).returncode
        == 0
    )
    return "" if exists else f"the image {BASE} is absent"


@pytest.fixture(autouse=True)
def _need_podman() -> None:
    if reason := problem():
        pytest.skip(reason)


def options_of(folder: Path, **terminal: object) -> EnvsSection:
    """Return the options that play the tasks of a folder."""
    return EnvsSection(
        sandbox=OPTIONS,
        terminal=replace(TerminalOptions(train=str(folder)), **terminal),  # type: ignore[arg-type]
    )


def played(options: EnvsSection, actions: Sequence[str | None]) -> tuple[str, list[StepResult]]:
    """Return the first observation and the results; None is the expert's action."""

    async def play() -> tuple[str, list[StepResult]]:
        env = make_spec(options).make(Style.COMPACT)
        assert isinstance(env, TerminalEnv)
        try:
            first = await env.reset("tasks-train-0", 0)
            results: list[StepResult] = []
            for action in actions:
                results.append(await env.step(action or await env.expert_action() or ""))
            return first, results
        finally:
            await env.close()

    return asyncio.run(play())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in QUICK)) for name in TASKS]
)
def test_only_the_reference_solution_solves_a_task(name: str, tmp_path: Path) -> None:
    write_task(tmp_path, name)
    options = options_of(tmp_path)
    _, (*_, solved) = played(options, [None, None])
    assert (solved.done, solved.reward) == (True, 1.0), solved.observation
    _, [idle] = played(options, ["submit"])
    assert (idle.done, idle.reward) == (True, 0.0), idle.observation


def write(folder: Path, dockerfile: str, settings: str = "", **files: str) -> EnvsSection:
    """Write a task whose tests pass, and return its options."""
    contents = {
        "task.toml": HARBOR + settings,
        "instruction.md": "Do it.",
        "environment/Dockerfile": f"FROM {BASE}\n{dockerfile}\n",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
        **{name.replace("__", "/"): text for name, text in files.items()},
    }
    for name, text in contents.items():
        path = folder / "first" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return options_of(folder)


def test_limits_of_the_settings_hold_in_the_container(tmp_path: Path) -> None:
    options = write(tmp_path, "WORKDIR /app")
    path = tmp_path / "first" / "task.toml"
    # Less than the memory: control groups of version 1 count the written pages as memory.
    text = path.read_text(encoding="utf-8").replace("storage_mb = 512", "storage_mb = 32")
    path.write_text(text, encoding="utf-8")
    _, results = played(
        options,
        [
            "(cd /sys/fs/cgroup; cat memory/memory.limit_in_bytes memory.max) 2>/dev/null; true",
            "(cd /sys/fs/cgroup; cut -d' ' -f1 cpu/cpu.cfs_quota_us cpu.max) 2>/dev/null; true",
            "head -c 400000000 /dev/zero | tail -c 390000000 | wc -c",
            "(: > /dev/tcp/1.1.1.1/80) 2>&1 | grep -o unreachable | head -n 1",
            "head -c 64M /dev/zero > big; sleep 30",
            "rm big && ls",
        ],
    )
    texts = [result.observation for result in results]
    assert texts[0] == str(256 << 20)
    assert texts[1] == "100000"
    assert "390000000" not in texts[2]
    assert texts[3] == "unreachable"
    assert texts[4].startswith("The command wrote more than the limit of the disk.")
    assert texts[5] == "[no output]"


@pytest.mark.parametrize(
    ("dockerfile", "settings", "words"),
    [
        ("RUN exit 7", "", "the build failed"),
        (
            "RUN sleep 600",
            "",
            "the build took longer than 5 s; raise environment.build_timeout_sec",
        ),
        ("RUN rm /bin/bash", "", "commands need bash"),
        ('ENTRYPOINT ["/bin/false"]', "", "container main is exited with code 1"),
        ("HEALTHCHECK --interval=1s --retries=2 CMD false", "", "its health check failed 2 times"),
        ("", "[environment.healthcheck]\ncommand = 'false'\nretries = 1", "healthcheck failed 1"),
    ],
)
@pytest.mark.long
def test_container_that_cannot_start_is_a_failure(
    tmp_path: Path, dockerfile: str, settings: str, words: str
) -> None:
    options = write(tmp_path, dockerfile, settings)
    if "sleep 600" in dockerfile:
        path = tmp_path / "first" / "task.toml"
        text = path.read_text(encoding="utf-8").replace("sec = 600.0", "sec = 5.0")
        path.write_text(text, encoding="utf-8")
    with pytest.raises(EnvFailure, match="task first: ") as raised:
        played(options, ["submit"])
    assert words in str(raised.value)


@pytest.mark.parametrize("moment", ["before", "command", "tests"])
def test_container_that_ends_is_a_failure_and_no_reward(tmp_path: Path, moment: str) -> None:
    options = write(tmp_path, "WORKDIR /app")
    waits = "touch /tmp/waits; sleep 600"
    (tmp_path / "first/tests/test.sh").write_text(f"{waits}\n", encoding="utf-8")

    async def play() -> None:
        env = make_spec(options).make(Style.COMPACT)
        assert isinstance(env, TerminalEnv)
        try:
            await env.reset("tasks-train-0", 0)
            name = env._sandbox.name  # type: ignore[union-attr]
            engine = ContainerEngine(ENGINE)
            if moment == "before":
                await engine.checked("kill", name)
            step = asyncio.create_task(env.step(waits if moment == "command" else "submit"))
            while moment != "before" and not step.done():
                if (await engine.call("exec", name, "test", "-e", "/tmp/waits")).code == 0:
                    await engine.checked("kill", name)
                    break
            await step
        finally:
            await env.close()

    with pytest.raises(EnvFailure, match="container main is exited with code 137"):
        asyncio.run(play())


def test_processes_of_the_tests_that_hold_the_output_do_not_delay_them(tmp_path: Path) -> None:
    test = "sleep 600 &\nsetsid sleep 600 &\necho 1 > /logs/verifier/reward.txt\n"
    options = write(tmp_path, "WORKDIR /app")
    (tmp_path / "first/tests/test.sh").write_text(test, encoding="utf-8")
    _, [end] = played(options, ["submit"])
    assert (end.reward, end.observation) == (1.0, "The tests passed.")


def test_verifier_without_space_for_its_reward_is_a_failure(tmp_path: Path) -> None:
    compose = "services:\n  main:\n    tmpfs: /logs:size=64k\n"
    test = "head -c 1M /dev/zero > /logs/verifier/log; echo 1 > /logs/verifier/reward.txt\n"
    options = write(tmp_path, "WORKDIR /app", **{"environment__docker-compose.yaml": compose})
    (tmp_path / "first/tests/test.sh").write_text(test, encoding="utf-8")
    (tmp_path / "first/solution").mkdir()
    (tmp_path / "first/solution/solve.sh").write_text("true\n", encoding="utf-8")
    with pytest.raises(EnvFailure, match=r"task first: .*reward.txt|the tests gave no reward"):
        played(options, ["submit"])


@pytest.mark.parametrize(
    ("dockerfile", "action", "words"),
    [
        ("RUN exit 7", "submit", "the build failed"),
        ("COPY . /tests", "rm /usr/bin/tar; submit", ""),
    ],
)
@pytest.mark.long
def test_separate_verifier_that_cannot_start_is_a_failure(
    tmp_path: Path, dockerfile: str, action: str, words: str
) -> None:
    """A tar that the agent removed is the agent's fault: its reward is 0."""
    options = write(tmp_path, "WORKDIR /app", tests__Dockerfile=f"FROM {BASE}\n{dockerfile}\n")
    settings = tmp_path / "first" / "task.toml"
    text = settings.read_text(encoding="utf-8")
    text = text.replace("[verifier]", '[verifier]\nenvironment_mode = "separate"')
    settings.write_text(text, encoding="utf-8")
    if words:
        with pytest.raises(EnvFailure, match=words):
            played(options, [action])
        return
    _, (*_, end) = played(options, [*action.split("; ")])
    assert (end.reward, end.done) == (0.0, True)


@pytest.mark.long
def test_build_over_its_time_leaves_no_process(tmp_path: Path) -> None:
    seconds = f"{60_000 + os.getpid()}"
    (tmp_path / "Dockerfile").write_text(f"FROM {BASE}\nRUN sleep {seconds}\n", encoding="utf-8")
    spec = ContainerSpec(build=ImageBuild(context=tmp_path, timeout_s=10.0))
    with pytest.raises(SandboxFailed, match="the build took longer than 10 s"):
        asyncio.run(Containers(OPTIONS)._images.get(spec))
    assert seconds not in [word for each in psutil.process_iter() for word in words_of(each)]


def words_of(process: psutil.Process) -> list[str]:
    """Return the command line of a process; [] if it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_absent_image_is_a_failure(tmp_path: Path) -> None:
    options = write(tmp_path, "", 'docker_image = "localhost/lost:1"\n')
    with pytest.raises(EnvFailure, match="localhost/lost:1: it is absent and cannot be pulled"):
        played(options, ["submit"])


def test_network_of_a_task_is_refused_or_permitted(tmp_path: Path) -> None:
    options = write(tmp_path, "WORKDIR /app", 'network_mode = "public"\n')
    with pytest.raises(Exception, match=r"network_mode='public'.*envs.terminal.network=task"):
        make_spec(options)
    devices = "tail -n +3 /proc/net/dev | wc -l"
    permitted = replace(options, terminal=replace(options.terminal, network="task"))
    _, [seen] = played(permitted, [devices])
    assert seen.observation == "2"  # The loopback and one more.
    without = replace(options, terminal=replace(options.terminal, without_network=True))
    _, [seen] = played(without, [devices])
    assert seen.observation == "1"


@pytest.mark.long
def test_agent_and_tests_have_the_hosts_of_their_phases(tmp_path: Path) -> None:
    address = own_address()
    listed = f'network_mode = "allowlist"\nallowed_hosts = ["{address}"]\n'
    options = write(tmp_path, "WORKDIR /app", 'network_mode = "no-network"\n')
    options = replace(options, terminal=replace(options.terminal, network="task"))
    settings, test = (tmp_path / "first" / name for name in ("task.toml", "tests/test.sh"))
    closed = settings.read_text(encoding="utf-8")
    with ThreadingHTTPServer((address, 0), SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        fetch = f"exec 3<>/dev/tcp/{address}/{server.server_port}; echo 'GET /none HTTP/1.0' >&3"
        command = f"({fetch}; echo >&3; head -c 12 <&3) 2>/dev/null | grep HTTP || echo closed"
        script = (
            f'[ "$({command})" = "HTTP/1.0 404" ]; echo $((! $?)) > /logs/verifier/reward.txt\n'
        )
        test.write_text(script, encoding="utf-8")
        for phase, expected in (("agent", ("HTTP/1.0 404", 0.0)), ("verifier", ("closed", 1.0))):
            text = closed.replace(f"[{phase}]", f"[{phase}]\n{listed}")
            settings.write_text(text, encoding="utf-8")
            _, (seen, end) = played(options, [command, "submit"])
            assert (seen.observation, end.reward) == expected
        server.shutdown()


def own_address() -> str:
    """Return an address of this machine beside the loopback."""
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family is socket.AF_INET and not each.address.startswith("127."):
                return each.address
    pytest.skip("the machine has the loopback alone")


def in_container(work, request: SandboxRequest | None = None, **options):  # type: ignore[no-untyped-def]
    """Return the result of work in a new container."""

    async def perform():  # type: ignore[no-untyped-def]
        backend = Containers(replace(OPTIONS, **options))
        sandbox = await backend.create(request or SandboxRequest(image=BASE, folder=""))
        try:
            return await work(sandbox)
        finally:
            await sandbox.delete()

    return asyncio.run(perform())


async def shell(sandbox: Sandbox, command: str, *, timeout_s: float = 120.0, user: str = ""):  # type: ignore[no-untyped-def]
    return await sandbox.exec(
        ["bash", "-c", command], timeout_s=timeout_s, max_output_bytes=2000, user=user
    )


def test_command_over_its_time_ends_all_processes_and_keeps_files() -> None:
    async def work(sandbox: Sandbox) -> None:
        late = await shell(sandbox, "echo kept > /kept; sleep 600 & sleep 600", timeout_s=1.0)
        assert late.ended_by is CommandEnd.TIMEOUT
        words = "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $f; echo; done"
        after = await shell(sandbox, f"cat /kept; {words} | grep -c '^sleep 600'")
        assert after.text == "kept\n0\n"

    in_container(work)


def test_lack_of_memory_ends_a_command_before_the_container() -> None:
    async def work(sandbox: Sandbox) -> None:
        scores = await shell(sandbox, "cat /proc/1/oom_score_adj /proc/self/oom_score_adj")
        first, command = map(int, scores.text.split())
        assert command >= first + 500
        fill = "mount -t tmpfs none /tmp && cat /dev/zero > /tmp/x"
        for _ in range(3):  # Among processes of the same score, the kernel may choose any.
            full = await shell(sandbox, f"unshare -Urm sh -c '{fill}'")
            assert full.exit_code != 0
        assert (await shell(sandbox, "echo alive")).text == "alive\n"

    spec = ContainerSpec(image=BASE, memory_bytes=64 << 20)
    in_container(work, SandboxRequest(folder="", container=spec))


def test_exit_code_125_is_no_missing_folder() -> None:
    async def work(sandbox: Sandbox) -> None:
        result = await shell(sandbox, "exit 125")
        assert (result.exit_code, result.num_bytes) == (125, 0)
        with pytest.raises(RefusedBySandbox, match=r"the folder /lost cannot be entered"):
            await sandbox.exec(["true"], timeout_s=120.0, max_output_bytes=100, folder="/lost")

    in_container(work)


def test_files_enter_and_leave_a_container() -> None:
    async def work(sandbox: Sandbox) -> None:
        content = bytes(range(256)) * 5000
        files = [
            SandboxFile(path="/new/folder/run", content=content, mode=0o755),
            SandboxFile(path="/new/empty", content=b""),
        ]
        await sandbox.write_all(files)
        assert await sandbox.read("/new/folder/run", max_bytes=len(content)) == content
        assert await sandbox.read("/new/empty", max_bytes=1) == b""
        seen = await shell(sandbox, "stat -c '%u %a' /new/folder/run; mkfifo /pipe")
        assert seen.text == "0 755\n"
        for path, reason in (
            ("/lost", "No such file"),
            ("/new", "not a regular file"),
            ("/pipe", "not a regular file"),
            ("/new/folder/run", "more than 9 bytes"),
        ):
            with pytest.raises(RefusedBySandbox, match=reason):
                await sandbox.read(path, max_bytes=9)

    in_container(work)


def test_written_files_leave_nothing_on_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", f"{tmp_path}")

    async def work(sandbox: Sandbox) -> None:
        await sandbox.write("/reward.txt", b"1")
        assert not list(tmp_path.iterdir())

    in_container(work)


def test_result_that_the_engine_loses_is_no_unreadable_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's program runs the read, and loses its result as often as a file says."""
    lost = tmp_path / "lost"
    program = tmp_path / "podman"
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *"head -c"*) ;; *) exec {shutil.which("podman")} "$@" ;; esac\n'
        f'left=$(cat {lost})\n[ "$left" = 0 ] && exec {shutil.which("podman")} "$@"\n'
        f'echo $((left - 1)) > {lost}\n{shutil.which("podman")} "$@"\n'
        'echo "timed out waiting for file: internal libpod error"\nexit 255\n',
        encoding="utf-8",
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    async def work(sandbox: Sandbox) -> None:
        await sandbox.write("/reward.txt", b"1")
        lost.write_text("1", encoding="utf-8")
        assert await sandbox.read("/reward.txt", max_bytes=9) == b"1"
        lost.write_text("2", encoding="utf-8")
        with pytest.raises(SandboxFailed, match=r"podman reads no /reward\.txt"):
            await sandbox.read("/reward.txt", max_bytes=9)

    in_container(work)


def test_container_without_a_task_is_closed() -> None:
    async def work(sandbox: Sandbox) -> None:
        seen = await shell(sandbox, "id -u; touch /etc/x 2>&1 | grep -o Read-only; touch in; ls")
        assert seen.text == "1000\nRead-only\nin\n"
        await sandbox.write("/tests/given", b"given", mode=0o600)
        assert await sandbox.read("/tests/given", max_bytes=9) == b"given"

    in_container(work, SandboxRequest(folder="/work"), image=BASE)


def test_user_that_the_image_lacks_is_named() -> None:
    async def work(sandbox: Sandbox) -> None:
        with pytest.raises(SandboxFailed, match="unable to find user lara"):
            await shell(sandbox, "true", user="lara")

    in_container(work)


def owners() -> list[str]:
    """Return the labels of all containers, which name the processes that created them."""
    line = f'{{{{index .Labels "{LABEL}"}}}}'
    argv = [ENGINE, "ps", "--all", "--filter", f"label={LABEL}", "--format", line]
    listed = subprocess.run(argv, capture_output=True, encoding="utf-8", check=True)
    return listed.stdout.split()


def test_killed_hub_leaves_no_container(tmp_path: Path) -> None:
    text = f"""
import asyncio, os, signal
from common.config.envs import SandboxOptions
from envhub.sandbox.containers import Containers
from envhub.sandbox.interface import SandboxRequest
async def main():
    backend = Containers(SandboxOptions(backend="{ENGINE}", start_timeout_s=300.0))
    sandbox = await backend.create(SandboxRequest(image="{BASE}", folder=""))
    print(sandbox.name, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    argv = [os.sys.executable, "-c", text]  # type: ignore[attr-defined]
    ended = subprocess.run(argv, capture_output=True, encoding="utf-8", check=False)
    name = ended.stdout.strip()
    assert ended.returncode == -9
    assert name
    while (
        subprocess.run(
            [ENGINE, "container", "inspect", name], capture_output=True, check=False
        ).returncode
        == 0
    ):
        pass  # The guard removes it; the test's own limit ends an endless wait.


def test_container_of_an_ended_process_is_pruned() -> None:
    owner = "1.999999.0"
    argv = [ENGINE, "create", "--label", f"{LABEL}={owner}", BASE, "true"]
    left = subprocess.run(argv, capture_output=True, encoding="utf-8", check=True).stdout.strip()
    asyncio.run(prune(ContainerEngine(ENGINE)))
    gone = subprocess.run(
        [ENGINE, "container", "inspect", left], capture_output=True, check=False
    ).returncode
    assert gone != 0


@pytest.mark.long
def test_image_is_built_once_and_the_oldest_are_removed(tmp_path: Path) -> None:
    options = replace(OPTIONS, containers=ContainerOptions(max_images=2))

    def image(number: int) -> ImageBuild:
        context = tmp_path / str(number)
        context.mkdir(exist_ok=True)
        text = f"FROM {BASE}\nRUN echo {os.getpid()} {number} > /n\n"
        (context / "Dockerfile").write_text(text, encoding="utf-8")
        return ImageBuild(context=context)

    async def work() -> None:
        backend = Containers(options)
        specs = [ContainerSpec(build=image(number)) for number in (1, 1, 2, 3)]
        got = await asyncio.gather(*(backend._images.get(spec) for spec in specs[:2]))
        assert got[0] == got[1]
        for spec in specs[2:]:
            await backend._images.get(spec)
        first = await backend._engine.call("image", "inspect", got[0].digest)
        assert first.code != 0

    asyncio.run(work())


@pytest.mark.long
def test_many_tasks_start_at_the_same_time(tmp_path: Path) -> None:
    options = write(tmp_path, "WORKDIR /app")

    async def play() -> list[float]:
        shared = make_spec(options)

        async def one() -> float:
            env: Any = shared.make(Style.COMPACT)
            try:
                await env.reset("tasks-train-0", 0)
                return (await env.step("submit")).reward
            finally:
                await env.close()

        return await asyncio.gather(*(one() for _ in range(12)))

    assert asyncio.run(play()) == [1.0] * 12
