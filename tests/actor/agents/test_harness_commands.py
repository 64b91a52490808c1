"""Laws of the commands that run a harness; `test_harnesses` runs the real ones."""

import os
import subprocess
from pathlib import Path

import pytest

from actor.agents.harnesses import (
    HARNESSES,
    Harness,
    PolicyAccess,
    command_of,
    harness_of,
    install,
    script_of,
)
from common.config.actor import ActorSection, AgentLifetime
from common.config.load import load_config
from common.errors import ConfigError

ACCESS = PolicyAccess(url="http://127.0.0.1:8080/episode/g.1/v1", key="secret-of-the-episode")
ENDPOINT = ["actor.endpoint=true", "actor.agent_lifetime=episode"]


def test_lone_word_names_a_harness_or_a_program() -> None:
    for word in (*HARNESSES, "/usr/bin/agent"):
        agent = load_config("quickstart", [*ENDPOINT, f"actor.agent={word}"]).actor.agent
        assert agent == [word]
        assert harness_of(agent) == ("" if word.startswith("/") else word)
    assert harness_of(["codex", "exec"]) == ""


def test_script_shows_a_harness_its_own_variables_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGSTRIDE_SECRET", "of the host")
    harness = Harness(
        package="x",
        version="1",
        is_npm=True,
        command=lambda _, task: ["sh", "-c", 'env; echo "task: $0"', task],
        files=lambda _: {},
        variables=lambda access: {"OPENAI_API_KEY": access.key, "OPENAI_BASE_URL": access.url},
    )
    task = "Say 'hi' \"now\".\nThen $HOME `id`."
    script = script_of(harness, tmp_path, task=task, access=ACCESS, place="/nowhere", port=0)
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        encoding="utf-8",
        env=dict(os.environ),
        check=True,
        timeout=60,
    )
    shown, _, printed = done.stdout.partition("task: ")
    assert printed == f"{task}\n"
    names = {line.partition("=")[0] for line in shown.splitlines()}
    own = {"HOME", "PATH", "LANG", "TERM", "TMPDIR", "OPENAI_API_KEY", "OPENAI_BASE_URL"}
    assert names - {"PWD", "SHLVL", "_", "LC_CTYPE"} == own


def test_harness_for_a_whole_run_is_refused_by_its_key() -> None:
    cfg = ActorSection(endpoint=True, agent=["codex"], agent_lifetime=AgentLifetime.RUN)
    with pytest.raises(ConfigError, match=r"actor\.agent_lifetime=run: must be episode for codex"):
        command_of(cfg)


def test_folder_that_a_sandbox_hides_is_refused_by_its_key() -> None:
    cfg = ActorSection(endpoint=True, agent=["codex"], harnesses="/tmp/harnesses")
    with pytest.raises(ConfigError, match=r"actor\.harnesses=/tmp/harnesses: must not be below"):
        command_of(cfg)


def test_missing_npm_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}")
    with pytest.raises(ConfigError, match=r"actor\.agent=codex: npm is missing; install Node 20"):
        install("codex", tmp_path)


def test_folder_that_others_can_change_is_refused_by_its_key(tmp_path: Path) -> None:
    root = tmp_path / "shared"
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(ConfigError, match=r"actor\.harnesses=.*shared: another user can change"):
        install("codex", root)
    assert list(root.iterdir()) == []
