"""Laws of sandboxes of the package Harbor. They need the package, in an environment of its own."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from common.config.envs import EnvsSection, SandboxOptions, TerminalOptions
from envhub.env import StepResult, Style
from envhub.envs.terminal.env import TerminalEnv, make_spec
from envhub.sandbox.backends import make_backend
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

    async def both() -> None:
        assert (await play(None, None))[-1].reward == 1.0
        late, kept, idle = await play("echo a > kept; sleep 100", "cat kept", "submit")
        assert late.observation.startswith("The command took longer than")
        assert (kept.observation, idle.reward) == ("a", 0.0)

    asyncio.run(both())
