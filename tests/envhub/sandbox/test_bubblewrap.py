"""Laws of bubblewrap's sandboxes: isolation, limits and their end."""

import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from common.config.envs import SandboxOptions
from common.repository import ROOT
from envhub.sandbox.bubblewrap import Bubblewrap, find_python, remedy_of
from envhub.sandbox.interface import (
    CommandEnd,
    RefusedBySandbox,
    Sandbox,
    SandboxFailed,
    SandboxRequest,
)
from envhub.sandbox.process import NAMES_FIRST, NUMBERS
from tests.envhub.sandbox.boxes import (
    OPTIONS,
    PATIENT_S,
    SLEEPER,
    in_sandbox,
    need_bubblewrap,
    processes_of_this,
    results_of,
    shell,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("bubblewrap")]


@pytest.fixture
def bubblewrap() -> None:
    need_bubblewrap()


def test_sandbox_shows_nothing_of_the_host() -> None:
    folder = Path(__file__).parent
    hidden, processes, rights, files = results_of(
        [
            f"ls {folder} /root /sys /boot /etc/shadow 2>&1 | grep -vc 'cannot access'",
            "ls /proc | grep -c '^[0-9]'",
            "id -u; grep -c '^Cap.*0000000000000000' /proc/self/status; cat /proc/1/{environ,mem}",
            "env | sort | cut -d= -f1 | xargs",
        ]
    )
    assert hidden.text == "0\n"
    assert int(processes.text) <= 5  # The agent, the shell, ls and grep.
    assert rights.text.startswith("1000\n5\n")  # No capability in any of the five sets.
    assert rights.text.count("Permission denied") == 2
    assert files.text == "HOME LANG PATH PWD SHLVL TERM USER _\n"


def test_sandbox_has_no_network() -> None:
    [result] = results_of(
        ["cut -d: -f1 -s /proc/net/dev | xargs; (: > /dev/tcp/8.8.8.8/53) 2>&1 | tail -1"]
    )
    assert result.text.startswith("lo\n")
    assert "Network is unreachable" in result.text


def test_only_the_sandboxs_own_folders_are_writable() -> None:
    folders = "/ /usr /usr/bin /etc /dev /run /proc/sys/kernel /home /app /tmp"
    [result] = results_of(
        [f"for d in {folders}; do (: > $d/new) 2>/dev/null && echo $d; done; true"]
    )
    assert result.text.split() == ["/app", "/tmp"]


def test_fork_bomb_ends_at_the_limit_of_processes() -> None:
    bomb, after = results_of(
        [
            "python3 -c '\nimport os\nn = 0\ntry:\n    while True:\n        if os.fork() == 0:\n"
            "            import time; time.sleep(600)\n        n += 1\n"
            "except OSError as e:\n    print(n, e.strerror)'",
            "ls /proc | grep -c '^[0-9]'",
        ]
    )
    num, _, words = bomb.text.strip().partition(" ")
    assert words == "Resource temporarily unavailable"
    assert int(num) <= 16
    assert int(after.text) <= 5


def test_memory_beyond_the_limit_ends_the_processes() -> None:
    hog = "python3 -c 'x = bytearray(45 << 20); import time; time.sleep(600)' & "
    result, after = results_of([f"{hog}{hog}{hog}wait", "echo alive"])
    assert (result.ended_by, after.text) == (CommandEnd.MEMORY, "alive\n")


def test_memory_of_one_process_is_refused_at_twice_the_limit() -> None:
    [result] = results_of(["python3 -c 'bytearray(200 << 20)' 2>&1 | tail -1"])
    assert result.text == "MemoryError\n"


def test_disk_is_limited_in_each_folder() -> None:
    fill = "for i in 1 2 3 4; do dd if=/dev/zero of=$d/f$i bs=1M count=4 2>/dev/null; done"
    [result] = results_of(
        [f"for d in /app /tmp /home/agent /dev/shm; do {fill}; du -sm $d | cut -f1; done"]
    )
    assert result.text.split() == ["8", "8", "2", "2"]  # The smaller folders have a quarter.


def test_number_of_files_is_limited() -> None:
    result, after = results_of(
        ["i=0; while :; do mkdir d$i && touch d$i/{1..50}; i=$((i+1)); done", "rm -rf d*; ls"]
    )
    assert (result.ended_by, after.text) == (CommandEnd.FILES, "")


def test_command_above_the_limit_of_files_creates_few() -> None:
    fill = "i=0; while :; do mkdir d$i && touch d$i/{1..50}; i=$((i+1)); done"
    _, few, many = results_of(
        [fill, "touch state; sleep 0.3; echo alive", "touch x{1..20}; sleep 9"]
    )
    assert (few.ended_by, few.text) == (CommandEnd.EXIT, "alive\n")
    assert many.ended_by is CommandEnd.FILES


def test_calls_that_evade_the_limits_are_refused() -> None:
    memory = "python3 -c 'import os; os.memfd_create(\"x\")'"
    spaces = "unshare --user --map-root-user --mount mount -t tmpfs none /tmp"
    first, second = results_of([f"{memory} 2>&1 | tail -1", spaces])
    assert "Operation not permitted" in first.text
    assert second.exit_code != 0


def test_time_limit_ends_processes_that_ignore_signals() -> None:
    stubborn = "trap '' TERM INT HUP; setsid sleep 600 & while :; do sleep 600; done"
    first, after = results_of([stubborn, "ls /proc | grep -c '^[0-9]'"], timeout_s=5.0)
    assert (first.ended_by, first.exit_code) == (CommandEnd.TIMEOUT, -signal.SIGKILL)
    assert int(after.text) <= 5


def test_processes_cannot_stop_the_agent() -> None:
    _, after = results_of(["kill -KILL 1; kill -STOP 1; kill -TERM 1", "echo alive"])
    assert after.text == "alive\n"


CALLS = """
import ctypes, errno, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
room = ctypes.create_string_buffer(4096)
for name, number, arguments in json.loads(sys.argv[1]):
    filled = [ctypes.c_long(each) for each in arguments]
    filled += [ctypes.byref(room)] * (6 - len(filled))
    ctypes.set_errno(0)
    libc.syscall(ctypes.c_long(number), *filled)
    print(name, errno.errorcode.get(ctypes.get_errno(), 0))
"""
STATE = (
    "cat /proc/1/limits; cut -d' ' -f18,19,41 /proc/1/stat; taskset -p 1; chrt -p 1; ionice -p 1"
)


def test_no_call_reaches_the_first_process() -> None:
    numbers = NUMBERS[platform.machine()]
    calls = [
        (name, numbers[name], [value] if index == 0 else [0, value])
        for name, arguments in NAMES_FIRST.items()
        for index, value in arguments
    ]

    async def work(sandbox: Sandbox) -> list[str]:
        before = await shell(sandbox, STATE)
        argv = ["python3", "-c", CALLS, json.dumps(calls)]
        tried = await sandbox.exec(argv, timeout_s=PATIENT_S, max_output_bytes=10_000)
        after = await shell(sandbox, STATE)
        assert after.text == before.text
        return tried.text.splitlines()

    assert in_sandbox(work) == [f"{name} EPERM" for name, _, _ in calls]


def test_programs_change_the_first_process_in_nothing() -> None:
    tries = [
        "prlimit --pid 1 --nofile=1:1",
        "renice -n 5 -p 1",
        "renice -n 5 -g 1",
        "renice -n 5 -u 1000",
        "chrt --idle -p 0 1",
        "taskset -p 1 1",
        "ionice -c 3 -p 1",
        "ionice -c 3 -P 1",
        "ionice -c 3 -u 1000",
        "echo 1000 > /proc/1/oom_score_adj",
        "echo 19 > /proc/1/autogroup",
    ]
    before, *tried, after = results_of([STATE, *tries, STATE])
    assert [each.exit_code != 0 for each in tried] == [True] * len(tries)
    assert after.text == before.text


def test_processes_may_change_their_own_limits() -> None:
    command = (
        "prlimit --pid $$ --nofile=20:20 && ulimit -n && renice -n 12 -p $$ && ionice -c 3 -p $$"
    )
    [result] = results_of([command])
    assert (result.text.splitlines()[0], result.exit_code) == ("20", 0)


def test_long_output_keeps_both_ends() -> None:
    [result] = results_of(["echo first; head -c 3000000 /dev/zero | tr '\\0' x; echo last"])
    assert result.num_bytes == 3_000_011
    assert result.text.startswith("first\nx")
    assert result.text.endswith("xlast\n")
    assert "[2990011 bytes were left out here]" in result.text


def test_background_process_continues_only_if_it_is_kept() -> None:
    async def work(sandbox: Sandbox) -> list[str]:
        found: list[str] = []
        for keeps in (True, False):
            await shell(sandbox, SLEEPER, keeps_processes=keeps)
            found.append((await shell(sandbox, "pgrep -c sleep", keeps_processes=True)).text)
            await sandbox.kill()
        return found

    assert in_sandbox(work) == ["1\n", "0\n"]


def test_background_process_may_write_after_its_command() -> None:
    async def work(sandbox: Sandbox) -> str:
        late = "(sleep 0.5; yes | head -c 1000000; echo end > done) & true"
        await shell(sandbox, late, keeps_processes=True)
        wait = "until [ -s done ]; do sleep 0.05; done; cat done"
        return (await shell(sandbox, wait, keeps_processes=True)).text

    assert in_sandbox(work) == "end\n"


def test_files_are_written_and_read_only_inside() -> None:
    async def work(sandbox: Sandbox) -> None:
        content = os.urandom(3 << 20)
        await sandbox.write("/app/a/b", content, mode=0o755)
        assert await sandbox.read("/app/a/b", max_bytes=4 << 20) == content
        assert (await shell(sandbox, "stat -c %a a/b")).text == "755\n"
        links = f"ln -s {__file__} link; ln -s /proc/1/mem mem; mkfifo pipe; ln -s /dev/zero zero"
        await shell(sandbox, links)
        for name in ("link", "mem", "pipe", "zero", "lost", "a"):
            with pytest.raises(RefusedBySandbox):
                await sandbox.read(f"/app/{name}", max_bytes=100)
        with pytest.raises(RefusedBySandbox, match=r"Is a directory|not a regular file"):
            await sandbox.write("/app/a", b"")
        with pytest.raises(RefusedBySandbox, match="3145728 bytes, more than 10"):
            await sandbox.read("/app/a/b", max_bytes=10)
        with pytest.raises(RefusedBySandbox, match="No space left"):
            await sandbox.write("/app/large", bytes(9 << 20))
        assert (await shell(sandbox, "echo alive")).text == "alive\n"

    in_sandbox(work)


@pytest.mark.parametrize("path", ["/app/\ud800", "/app/a\0b", "/app/" + "x" * 300])
def test_impossible_path_is_refused_by_name(path: str) -> None:
    async def work(sandbox: Sandbox) -> None:
        for call in (sandbox.read(path, max_bytes=10), sandbox.write(path, b"x")):
            with pytest.raises(RefusedBySandbox, match=r"surrogate|NUL|too long"):
                await call
        with pytest.raises(RefusedBySandbox):
            await shell(sandbox, "true", folder=path)
        if "x" not in path:
            with pytest.raises(RefusedBySandbox):
                await shell(sandbox, "true", variables={"A": path})
        assert (await shell(sandbox, "echo alive")).text == "alive\n"

    in_sandbox(work)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["no-such-program"], "No such file"),
        (["echo", "a\ud800"], "surrogate"),
        (["echo", "a\0b"], "NUL"),
        (["echo", "x" * 100_001], "100001 bytes"),
        ([""], "empty"),
    ],
)
def test_impossible_command_is_refused(argv: list[str], words: str) -> None:
    async def work(sandbox: Sandbox) -> None:
        with pytest.raises(RefusedBySandbox, match=words):
            await sandbox.exec(argv, timeout_s=60.0, max_output_bytes=100)
        assert (await shell(sandbox, "echo alive")).text == "alive\n"

    in_sandbox(work)


def test_deleted_sandbox_leaves_no_process() -> None:
    async def work() -> None:
        others = processes_of_this()
        sandbox = await Bubblewrap(OPTIONS).create(SandboxRequest())
        await shell(sandbox, f"setsid {SLEEPER}", keeps_processes=True)
        inside = processes_of_this() - others
        assert [each for each in inside if each.name() == "sleep"]
        await sandbox.delete()
        _, alive = psutil.wait_procs(inside, timeout=60)
        assert alive == []
        with pytest.raises(SandboxFailed, match="has ended"):
            await shell(sandbox, "true")

    asyncio.run(work())


HOLDER = """
import asyncio, sys
from tests.envhub.sandbox.boxes import OPTIONS, SLEEPER, shell
from envhub.sandbox.bubblewrap import Bubblewrap
from envhub.sandbox.interface import SandboxRequest

async def main():
    sandbox = await Bubblewrap(OPTIONS).create(SandboxRequest())
    await shell(sandbox, "setsid " + SLEEPER, keeps_processes=True)
    print("ready", flush=True)
    await shell(sandbox, "sleep 600", timeout_s=600)

asyncio.run(main())
"""


def test_killed_hub_leaves_no_sandbox() -> None:
    argv = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        inside = psutil.Process(process.pid).children(recursive=True)
        assert [each for each in inside if each.name() == "sleep"]
        process.kill()
    _, alive = psutil.wait_procs(inside, timeout=60)
    assert alive == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only a hub of root changes the user")
def test_sandbox_of_root_runs_as_an_unprivileged_user() -> None:
    async def work() -> set[int]:
        others = processes_of_this()
        sandbox = await Bubblewrap(OPTIONS).create(SandboxRequest())
        users = {each.uids().real for each in processes_of_this() - others}
        await sandbox.delete()
        return users

    assert asyncio.run(work()) == {65534}


def test_failed_start_names_the_error_and_the_remedy() -> None:
    options = SandboxOptions(mounts=["/no/such/folder"])
    problem = Bubblewrap(options).problem()
    assert "/no/such/folder" in problem
    assert "envs.sandbox.backend=docker" in problem
    with pytest.raises(SandboxFailed, match="code"):
        asyncio.run(Bubblewrap(SandboxOptions(python="/bin/false")).create(SandboxRequest()))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "bwrap: No permissions to create new namespace, likely because the kernel does not"
            " allow non-privileged user namespaces.",
            "user.max_user_namespaces",
        ),
        ("bwrap: Creating new namespace failed: Operation not permitted", "user namespaces"),
        ("bwrap: Can't mount proc on /newroot/proc: Operation not permitted", "seccomp=unconfined"),
        ("bwrap: Unknown option --disable-userns", "0.8"),
        ("anything", "envs.sandbox.backend=docker"),
    ],
)
def test_errors_of_bubblewrap_have_a_remedy(text: str, words: str) -> None:
    assert words in remedy_of(text)


def test_python_of_the_sandbox_lies_in_the_system() -> None:
    assert Path(find_python("")).resolve().is_relative_to("/usr")
    assert find_python("/opt/python") == "/opt/python"
