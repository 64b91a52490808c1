"""Laws of tasks with an image, in containers of Podman. They need Podman and an image of Debian."""

import asyncio
import importlib.util
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from common.config.envs import EnvsSection, SandboxOptions, TerminalOptions
from envhub.env import EnvFailure, StepResult, Style
from envhub.envs.terminal.env import TerminalEnv, make_spec
from envhub.sandbox.containers import Containers
from envhub.sandbox.interface import SandboxFailed, SandboxRequest
from envhub.sandbox.process import agent_text, confining_script

BASE = "localhost/debian:12"
IMAGE = f"localhost/longstride-test-{os.getpid()}"  # Test processes do not share images.
OPTIONS = SandboxOptions(backend="podman", disk_mib=16, memory_mib=256, start_timeout_s=300.0)
DOCKERFILE = f"""
FROM {BASE}
ENV TOOL=/opt/tool PATH="/opt/tool:/usr/local/bin:/usr/bin:/bin"
WORKDIR /srv/work/in
RUN mkdir /opt/tool sub && echo 'echo "tool $TOOL"' > /opt/tool/tool && chmod 755 /opt/tool/tool
RUN echo right > sub/given && chmod 400 sub/given && ln -s sub/given link && ln sub/given hard
"""
PYTHON = f"""
FROM {IMAGE}:bare
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends python3
"""
TEST = """
[ "$(cat out)" = "right tool /opt/tool" ] && [ -f extra ] && r=1 || r=0
echo $r > /logs/verifier/reward.txt
"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def build(folder: Path, tag: str, text: str) -> str:
    """Return the name of a new image, or skip the test with the reason."""
    if problem := Containers(OPTIONS).problem():
        pytest.skip(problem)
    if subprocess.run(["podman", "image", "exists", BASE], check=False).returncode != 0:
        pytest.skip(f"the image {BASE} is absent")
    (folder / tag).write_text(text, encoding="utf-8")
    argv = ["podman", "build", "--isolation", "chroot", "-q", "-t", f"{IMAGE}:{tag}"]
    built = subprocess.run(
        [*argv, "-f", str(folder / tag), str(folder)],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    if built.returncode != 0:
        pytest.skip(f"the image {tag} cannot be built: {built.stderr[-300:]}")
    return f"{IMAGE}:{tag}"


def remove(image: str) -> None:
    subprocess.run(["podman", "rmi", "--force", image], capture_output=True, check=False)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield an image without a Python."""
    yield (image := build(tmp_path_factory.mktemp("bare"), "bare", DOCKERFILE))
    remove(image)


@pytest.fixture(scope="module")
def with_python(bare: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the same image with a Python, from Debian's packages."""
    yield (image := build(tmp_path_factory.mktemp("python"), "python", PYTHON))
    remove(image)


def write_task(folder: Path, image: str, settings: str = "") -> EnvsSection:
    """Write a task with an image, and return its options."""
    files = {
        "task.toml": f'[environment]\ndocker_image = "{image}"\n{settings}',
        "instruction.md": "Write right and the tool's output into out.",
        "environment/extra": "",
        "solution/solve.sh": 'echo "$(cat link) $(tool)" > out\n',
        "tests/test.sh": TEST,
    }
    for name, text in files.items():
        path = folder / "tasks" / "first" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return EnvsSection(sandbox=OPTIONS, terminal=TerminalOptions(train=str(folder / "tasks")))


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


def check_task(folder: Path, image: str) -> None:
    """Assert that only the reference solution solves the task."""
    options = write_task(folder, image)
    first, (*_, solved) = played(options, [None, None])
    assert first.endswith("The work folder is /srv/work/in.")
    assert solved.reward == 1.0
    _, [unsolved] = played(options, ["submit"])
    assert (unsolved.reward, unsolved.is_success) == (0.0, False)


def test_task_is_solved_in_an_image_without_python(tmp_path: Path, bare: str) -> None:
    check_task(tmp_path, bare)


def test_preloaded_library_is_none_of_the_image(
    tmp_path: Path, bare: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", torch_library("libgomp"))
    check_task(tmp_path, bare)


def torch_library(name: str) -> str:
    """Return the path of a library that lies beside torch's own."""
    folder = Path(str(importlib.util.find_spec("torch").origin)).parent / "lib"  # type: ignore[union-attr]
    return str(next(folder.glob(f"{name}*")))


@pytest.mark.long
def test_task_is_solved_in_an_image_with_python(tmp_path: Path, with_python: str) -> None:
    check_task(tmp_path, with_python)
    _, [version] = played(write_task(tmp_path, with_python), ["python3 -c 'print(1)'"])
    assert version.observation == "1"


def test_files_of_an_image_belong_to_the_commands(tmp_path: Path, bare: str) -> None:
    commands = [
        "stat -c '%U %a %n' . sub sub/given; readlink link; cat hard",
        "echo new > sub/given && cat link; touch /etc/x 2>&1 | tail -c 10; ls -A /tmp/.image*",
    ]
    _, (seen, changed) = played(write_task(tmp_path, bare), commands)
    lines = seen.observation.splitlines()
    assert [line.split()[1:] for line in lines[:3]] == [
        *(["755", "."], ["755", "sub"], ["600", "sub/given"])
    ]
    assert lines[3:] == ["sub/given", "right"]
    assert changed.observation.splitlines()[:2] == ["new", "le system"]
    assert "No such file" in changed.observation


def test_folder_of_the_settings_is_that_of_the_image(tmp_path: Path, bare: str) -> None:
    options = write_task(tmp_path, bare, 'workdir = "/srv"\nenv = { TOOL = "mine" }\n')
    first, [seen] = played(options, ["pwd; cat work/in/link; tool; touch work/new"])
    assert first.endswith("The work folder is /srv.")
    assert seen.observation == "/srv\nright\ntool mine"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("WORKDIR /", "it has no WORKDIR; set environment.workdir"),
        ('ENTRYPOINT ["/start.sh"]', r"its ENTRYPOINT \['/start.sh'\] is not performed"),
        (
            "RUN head -c 20000000 /dev/zero > big",
            "/srv/work/in has 19 MiB, more than a sandbox's 16",
        ),
    ],
)
def test_image_that_cannot_be_served_is_named(
    tmp_path: Path, bare: str, lines: str, words: str
) -> None:
    image = build(tmp_path, "odd", f"FROM {bare}\n{lines}\n")
    try:
        with pytest.raises(SandboxFailed, match=rf"podman image {image}: .*{words}"):
            played(write_task(tmp_path, image), ["pwd"])
    finally:
        remove(image)


def test_image_without_bash_is_named(tmp_path: Path, bare: str) -> None:
    image = build(tmp_path, "odd", f"FROM {bare}\nRUN rm -f /bin/bash /usr/bin/bash\n")
    try:
        with pytest.raises(EnvFailure, match=rf"task first, image {image}: .*commands need bash"):
            played(write_task(tmp_path, image), ["pwd"])
    finally:
        remove(image)


@pytest.mark.parametrize("image", ["bare", "with_python"])
def test_program_without_rights_reaches_neither_tests_nor_first_process(
    image: str, request: pytest.FixtureRequest
) -> None:
    async def work() -> list[str]:
        options = replace(OPTIONS, image=request.getfixturevalue(image))
        sandbox = await Containers(options).create(SandboxRequest())
        await sandbox.write("/tests/agent.py", agent_text().encode())
        script = confining_script("/tests/agent.py", [])
        await sandbox.write("/tests/as-agent", script.encode(), mode=0o755)
        texts: list[str] = []
        for command in (
            "echo .5 > /logs/x; /tests/as-agent bash -c 'echo 1 > /logs/x; echo ran'; cat /logs/x",
            "/tests/as-agent cat /tests/as-agent",
            "prlimit --pid 1 --nofile=1:1 && echo changed",
            "renice -n 5 -p 1 && echo changed",
        ):
            argv = ["bash", "-c", f"({command}) 2>/dev/null"]
            result = await sandbox.exec(argv, timeout_s=60.0, max_output_bytes=1000)
            texts.append(result.text)
        await sandbox.delete()
        return texts

    assert asyncio.run(work()) == ["ran\n.5\n", "", "", ""]


def test_folder_that_an_image_lacks_is_empty(bare: str) -> None:
    async def work() -> bytes:
        sandbox = await Containers(replace(OPTIONS, image=bare)).create(SandboxRequest())
        argv = ["bash", "-c", "touch new; ls -A $PWD"]
        result = await sandbox.exec(argv, timeout_s=60.0, max_output_bytes=1000)
        await sandbox.delete()
        return result.output

    assert asyncio.run(work()) == b"new\n"


def test_absent_image_is_named(bare: str) -> None:
    with pytest.raises(SandboxFailed, match="it is absent and cannot be pulled"):
        asyncio.run(Containers(OPTIONS).create(SandboxRequest(image="localhost/lost:1")))


def test_deleted_sandbox_leaves_no_container(bare: str) -> None:
    async def work() -> None:
        sandbox = await Containers(OPTIONS).create(SandboxRequest(image=bare, folder=""))
        await sandbox.delete()

    def containers() -> set[str]:
        argv = ["podman", "ps", "--all", "--quiet", "--filter", f"ancestor={bare}"]
        return set(
            subprocess.run(argv, capture_output=True, encoding="utf-8", check=True).stdout.split()
        )

    before = containers()
    asyncio.run(work())
    assert containers() <= before
