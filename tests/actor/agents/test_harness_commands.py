"""Laws of the commands that run a harness; `test_harnesses` runs the real ones."""

import json
import os
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from actor.agents.harnesses import (
    HARNESSES,
    HOME,
    NODE_RELAY,
    Harness,
    PolicyAccess,
    command_of,
    harness_of,
    script_of,
)
from actor.agents.installation import (
    HarnessPackage,
    copy_python,
    find_python,
    folder_of,
    install,
    python_of,
)
from common.config.actor import ActorSection, AgentLifetime, AgentServerOptions
from common.config.load import load_config
from common.errors import ConfigError
from tests.ports import free_port

CODEX = HARNESSES["codex"].package
AIDER = HARNESSES["aider"].package
ACCESS = PolicyAccess(url="http://127.0.0.1:8080/episode/g.1/v1", key="secret-of-the-episode")
PATH = os.environ["PATH"]
# Asks the policy, and prints what a harness sees.
ASK = """
import json, os, pathlib, socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as policy:
    policy.sendall(b"question")
    answer = policy.recv(100).decode()
home = pathlib.Path(os.environ["HOME"])
shown = {"answer": answer, "task": sys.argv[2], "variables": dict(os.environ)}
shown["settings"] = (home / "folder/settings").read_text()
shown["libraries"] = os.environ.get("LD_LIBRARY_PATH", "")
print(json.dumps(shown))
"""
ENDPOINT = ["actor.endpoint=true", "actor.agent_lifetime=episode"]


def test_lone_word_names_a_harness_or_a_program() -> None:
    for word in (*HARNESSES, "/usr/bin/agent"):
        agent = load_config("quickstart", [*ENDPOINT, f"actor.agent={word}"]).actor.agent
        assert agent == [word]
        assert harness_of(agent) == ("" if word.startswith("/") else word)
    assert harness_of(["codex", "exec"]) == ""


@pytest.mark.slow
def test_harness_reaches_the_policy_and_sees_its_own_variables(tmp_path: Path) -> None:
    copy_python(sys.executable, tmp_path / "python")
    task = "Say 'hi' \"now\".\nThen $HOME `id`."
    place = tmp_path / "policy"
    port = free_port()
    harness = Harness(
        package=HarnessPackage(name="x", package="x", version="1", python=((3, 10), (3, 14))),
        command=lambda folder, text: [*(python_of(folder), "-c", ASK, f"{port}", text)],
        files=lambda _: {"folder/settings": "of its home"},
        variables=lambda access: {"OPENAI_API_KEY": access.key, "OPENAI_BASE_URL": access.url},
    )
    script = script_of(
        harness, tmp_path, task=task, access=ACCESS, place=f"{place}", port=port
    ).replace(HOME, f"{tmp_path}/home")
    with socket.socket(socket.AF_UNIX) as policy:
        policy.bind(f"{place}")
        policy.listen()
        policy.settimeout(60)
        with subprocess.Popen(
            ["bash", "-c", script], stdout=subprocess.PIPE, encoding="utf-8", env={"PATH": PATH}
        ) as process:
            client, _ = policy.accept()
            assert client.recv(100) == b"question"
            client.sendall(b"answer")
            client.close()
            assert process.stdout is not None
            shown = json.loads(process.stdout.read())
    assert shown["answer"] == "answer"
    assert shown["task"] == task
    assert shown["settings"] == "of its home"
    names = {"HOME", "LANG", "TERM", "TMPDIR", "OPENAI_API_KEY", "OPENAI_BASE_URL"}
    assert set(shown["variables"]) - {"PWD", "SHLVL", "_", "LC_CTYPE"} == {"PATH", *names}
    assert shown["variables"]["PATH"] == PATH
    assert shown["libraries"] == ""


@pytest.mark.slow
def test_copied_python_needs_no_other_file_of_its_machine(tmp_path: Path) -> None:
    copy_python(sys.executable, tmp_path / "python")
    probe = "import ctypes, json, sqlite3, ssl, sys; print(json.dumps([sys.prefix, *sys.path[1:]]))"
    text = subprocess.check_output([python_of(f"{tmp_path}"), "-c", probe], encoding="utf-8")
    assert all(path.startswith(f"{tmp_path}/python") for path in json.loads(text))


def test_harness_without_its_python_is_refused_with_the_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}")
    law = r"actor\.agent=aider: it needs Python 3\.12 or newer, below 3\.13; no python3\.12 is on"
    with pytest.raises(ConfigError, match=law):
        find_python(replace(AIDER, python=((3, 12), (3, 13))))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="the relay needs Node")
def test_relay_of_node_forwards_connections_and_the_exit_code(tmp_path: Path) -> None:
    place = f"{tmp_path}/policy"
    port = free_port()
    ask = f"exec 3<>/dev/tcp/127.0.0.1/{port}; printf question >&3; cat <&3; exit 7"
    argv = ["node", "-e", NODE_RELAY, "--", place, f"{port}", "bash", "-c", ask, "-y"]
    with socket.socket(socket.AF_UNIX) as policy:
        policy.bind(place)
        policy.listen()
        policy.settimeout(60)
        with subprocess.Popen(argv, stdout=subprocess.PIPE, encoding="utf-8") as process:
            client, _ = policy.accept()
            assert client.recv(100) == b"question"
            client.sendall(b"answer")
            client.close()
            assert process.stdout is not None
            assert process.stdout.read() == "answer"
            assert process.wait(60) == 7


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
        install(CODEX, tmp_path)


def test_endpoint_with_a_certificate_is_refused_by_its_key() -> None:
    agents = AgentServerOptions(tls_certificate="a.pem", tls_key="a.key")
    cfg = ActorSection(endpoint=True, agent=["codex"], agents=agents)
    with pytest.raises(ConfigError, match=r"actor\.agents\.tls_certificate=a\.pem: must be empty"):
        command_of(cfg)


@pytest.mark.slow
def test_actors_that_start_together_install_a_harness_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npm = tmp_path / "npm"
    npm.write_text('#!/bin/sh\necho run >> "$LOG"\nsleep 0.5\n: > "$6/new"\n', encoding="utf-8")
    npm.chmod(0o755)
    monkeypatch.setenv("LOG", f"{tmp_path}/log")
    monkeypatch.setenv("PATH", f"{tmp_path}:{PATH}")
    root = tmp_path / "harnesses"
    left = folder_of(CODEX, root) / "left"
    earlier = os.umask(0o077)
    try:
        left.parent.mkdir(parents=True)
        left.write_text("of an interrupted installation", encoding="utf-8")
        with ThreadPoolExecutor(3) as pool:
            folders = {*pool.map(lambda _: install(CODEX, root), range(3))}
    finally:
        os.umask(earlier)
    assert folders == {left.parent}
    assert (tmp_path / "log").read_text(encoding="utf-8") == "run\n"
    assert {path.name for path in left.parent.iterdir()} == {"new", "installed"}
    # The user of a sandbox reads it.
    for path in (root, root / "sockets", left.parent, left.parent / "new"):
        assert path.stat().st_mode & 0o044 == 0o044


def test_folder_that_others_can_change_is_refused_by_its_key(tmp_path: Path) -> None:
    root = tmp_path / "shared"
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(ConfigError, match=r"actor\.harnesses=.*shared: another user can change"):
        install(CODEX, root)
    assert list(root.iterdir()) == []
