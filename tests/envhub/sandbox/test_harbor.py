"""Laws of sandboxes of the package Harbor. They need the package, in an environment of its own."""

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from common.config.envs import EnvsSection, SandboxOptions, TerminalOptions
from envhub.env import StepResult, Style
from envhub.envs.terminal.env import TerminalEnv, make_spec
from envhub.sandbox.backends import make_backend
from envhub.sandbox.harbor import HarborSandboxes
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
from tests.envhub.envs.terminal.container_tasks import write_task

OPTIONS = SandboxOptions(backend="harbor:podman", start_timeout_s=300.0)


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    problem = make_backend(OPTIONS).problem()
    assert "harbor:podman needs the package harbor" in problem
    assert "uv tool install harbor" in problem


@pytest.mark.slow
def test_interpreter_without_the_package_is_named() -> None:
    for python, words in (("/usr/bin/false", "has ended"), ("/lost/python", "No such file")):
        problem = make_backend(replace(OPTIONS, harbor_python=python)).problem()
        assert words in problem
        assert "harbor:podman: " in problem


# Stands in for the package: its sandboxes are shells of this machine, which end no process.
PACKAGE = """
import asyncio, os, pathlib, shutil, types
from enum import Enum
class EnvironmentType(Enum):
    PODMAN = "podman"
class EnvironmentConfig:
    def __init__(self, **settings): self.settings = settings
NetworkPolicy = EnvironmentConfig
class TrialPaths:
    def __init__(self, trial_dir): pass
    def mkdir(self): pass
class EnvironmentFactory:
    run_preflight = staticmethod(lambda provider: None)
    create_environment = staticmethod(lambda **words: Environment(words))
class Environment:
    def __init__(self, words):
        self.title, self.is_lost = words["environment_name"], False
        self.log = pathlib.Path(os.environ["PACKAGE_LOG"])
    async def start(self, force_build):
        self.note("start")
        if self.title == "slow":
            await asyncio.sleep(60)
    async def stop(self, delete):
        self.note("stop")
    async def exec(self, command, env=None, timeout_sec=None, user=None):
        if self.is_lost:
            raise RuntimeError("no answer")
        if "kill -9" in command:
            return types.SimpleNamespace(stdout="", stderr="", return_code=137)
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", command, stdout=-1, env={**os.environ, **(env or {})})
        try:
            async with asyncio.timeout(timeout_sec):
                output, _ = await process.communicate()
        except TimeoutError:
            process.kill()
            self.is_lost = "lose" in command
            raise RuntimeError("over its time")
        text = output.decode()
        if self.title == "terminal":
            text = text.replace("\\n", "\\r\\n")
        return types.SimpleNamespace(stdout=text, stderr="", return_code=process.returncode)
    async def upload_file(self, source, target):
        shutil.copy(source, target)
    def note(self, text):
        with self.log.open("a") as file:
            file.write(text + "\\n")
"""
MODULES = ("environments/factory", "models/environment_type", "models/task/config")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SandboxOptions:
    """Return the options of sandboxes that are shells of this machine."""
    for module in (*MODULES, "models/trial/paths"):
        path = tmp_path / "packages" / "harbor" / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("from stand_in import *\n", encoding="utf-8")
    (tmp_path / "packages" / "stand_in.py").write_text(PACKAGE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    monkeypatch.setenv("PACKAGE_LOG", str(tmp_path / "log"))
    return replace(OPTIONS, harbor_python=sys.executable)


@asynccontextmanager
async def backend(options: SandboxOptions) -> AsyncIterator[HarborSandboxes]:
    sandboxes = HarborSandboxes(options)
    try:
        yield sandboxes
    finally:
        if sandboxes._process is not None:
            await sandboxes._process.close()


async def create(sandboxes: HarborSandboxes, folder: Path, title: str = "task") -> Sandbox:
    context = folder / title / "environment"
    context.mkdir(parents=True)
    container = ContainerSpec(build=ImageBuild(context=context))
    return await sandboxes.create(SandboxRequest(folder=str(folder), container=container))


@pytest.mark.slow
def test_command_over_its_time_in_a_lost_sandbox_is_a_failure(
    package: SandboxOptions, tmp_path: Path
) -> None:
    async def work() -> None:
        async with backend(package) as sandboxes:
            sandbox = await create(sandboxes, tmp_path)
            late = await sandbox.exec(["sleep", "9"], timeout_s=1.0, max_output_bytes=9)
            assert late.ended_by is CommandEnd.TIMEOUT
            argv = ["sh", "-c", "sleep 9 # lose"]
            with pytest.raises(SandboxFailed, match="no answer"):
                await sandbox.exec(argv, timeout_s=1.0, max_output_bytes=9)

    asyncio.run(work())


@pytest.mark.slow
def test_sandbox_whose_start_is_cancelled_is_deleted(
    package: SandboxOptions, tmp_path: Path
) -> None:
    log = tmp_path / "log"

    async def work() -> None:
        async with backend(package) as sandboxes, asyncio.timeout(30.0):
            starting = asyncio.create_task(create(sandboxes, tmp_path, "slow"))
            while not log.exists():
                await asyncio.sleep(0.05)
            starting.cancel()
            while log.read_text(encoding="utf-8") != "start\nstop\n":
                await asyncio.sleep(0.05)

    asyncio.run(work())


@pytest.mark.slow
def test_output_of_a_terminal_is_that_of_a_pipe(package: SandboxOptions, tmp_path: Path) -> None:
    async def work() -> None:
        async with backend(package) as sandboxes:
            sandbox = await create(sandboxes, tmp_path, "terminal")
            argv = ["sh", "-c", r"printf 'a\nb\r\n'; echo $PAGER; cat"]
            result = await sandbox.exec(argv, timeout_s=60.0, max_output_bytes=100)
            assert (result.output, result.num_bytes) == (b"a\nb\r\ncat\n", 9)

    asyncio.run(work())


@pytest.mark.slow
def test_output_and_files_of_a_sandbox_of_harbor_are_its_own(
    package: SandboxOptions, tmp_path: Path
) -> None:
    async def work() -> None:
        async with backend(package) as sandboxes:
            sandbox = await create(sandboxes, tmp_path)
            code = "print('a' * 500_000 + 'z' * 500_000, end='')"
            argv = [sys.executable, "-c", code]
            result = await sandbox.exec(argv, timeout_s=60.0, max_output_bytes=100)
            assert result.num_bytes == 1_000_000
            assert result.text == f"{'a' * 50}\n[999900 bytes were left out here]\n{'z' * 50}"
            await sandbox.write_all([SandboxFile(path="b/it's", content=b"\0\xff", mode=0o600)])
            assert await sandbox.read("b/it's", max_bytes=2) == b"\0\xff"
            for path, max_bytes, words in (
                ("b/it's", 1, "more than 1 bytes"),
                ("lost", 9, "No such file"),
                ("b", 9, "not a regular file"),
            ):
                with pytest.raises(RefusedBySandbox, match=words):
                    await sandbox.read(path, max_bytes=max_bytes)
            with pytest.raises(RefusedBySandbox, match="the command with its quotes has"):
                await sandbox.exec(["true", "'" * 50_000], timeout_s=60.0, max_output_bytes=9)

    asyncio.run(work())


def test_exit_code_125_is_no_missing_folder(package: SandboxOptions, tmp_path: Path) -> None:
    async def work() -> None:
        async with backend(package) as sandboxes:
            sandbox = await create(sandboxes, tmp_path)
            limits = {"timeout_s": 60.0, "max_output_bytes": 100}
            result = await sandbox.exec(["sh", "-c", "exit 125"], **limits)
            assert (result.exit_code, result.num_bytes) == (125, 0)
            with pytest.raises(RefusedBySandbox, match=r"the folder /lost cannot be entered"):
                await sandbox.exec(["true"], folder="/lost", **limits)

    asyncio.run(work())


def need_harbor() -> None:
    if shutil.which("harbor") is None or shutil.which("podman-compose") is None:
        pytest.skip("the commands harbor and podman-compose are missing")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("provider", "words"),
    [("modal", "MODAL_TOKEN_ID"), ("e2b", "E2B_API_KEY"), ("lost", "is none of docker")],
)
def test_missing_key_is_named(
    provider: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    need_harbor()
    for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET", "E2B_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert words in make_backend(replace(OPTIONS, backend=f"harbor:{provider}")).problem()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_task_is_solved_in_a_sandbox_of_harbor(tmp_path: Path) -> None:
    need_harbor()
    write_task(tmp_path, "no-python")
    terminal = TerminalOptions(train=str(tmp_path), network="task", command_timeout_s=20.0)
    spec = make_spec(EnvsSection(sandbox=OPTIONS, terminal=terminal))

    async def play(*actions: str | None) -> list[StepResult]:
        env = spec.make(Style.COMPACT)
        assert isinstance(env, TerminalEnv)
        try:
            await env.reset("tasks-train-0", 0)
            return [await env.step(each or await env.expert_action() or "") for each in actions]
        finally:
            await env.close()
            sandboxes = env._shared.backend
            assert isinstance(sandboxes, HarborSandboxes)
            assert sandboxes._process is not None
            await sandboxes._process.close()

    async def both() -> None:
        assert (await play(None, None))[-1].reward == 1.0
        late, kept, idle = await play("echo a > kept; sleep 100", "cat kept", "submit")
        assert late.observation.startswith("The command took longer than")
        assert (kept.observation, idle.reward) == ("a", 0.0)

    asyncio.run(both())
