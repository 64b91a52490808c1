"""Laws of OpenEnv with its own package, in an environment of its own."""

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.runs import Run, balances
from tests.envhub.agentgym.agentgym_clients import DIRECT, serve_envs
from tests.ports import free_port
from tests.venvs import python_with

pytestmark = pytest.mark.timeout(900)  # an environment is made, an engine starts

OPENENV = "openenv==0.10.0"
PLAY = """
import json, sys
from openenv import GenericEnvClient
url, actions = sys.argv[1], json.loads(sys.argv[2])
with GenericEnvClient(base_url=url).sync() as env:
    begun = env.reset(split="test", index=0)
    results = [env.step({"message": action}) for action in actions]
    told = [(r.observation["text"], r.reward, r.done) for r in results]
    print(json.dumps([begun.observation["text"], told, env.state(), begun.metadata["item_id"]]))
"""


def echo_command(folder: Path) -> tuple[list[str], str]:
    """Write the echo environment of the package's own `init`; return what serves it, and where."""
    python = python_with(OPENENV)
    quiet: dict[str, Any] = {"check": True, "stdout": subprocess.DEVNULL}
    command = [python, "-m", "openenv.cli", "init", "echo_env", "--output-dir", str(folder)]
    subprocess.run(command, timeout=240, stderr=subprocess.DEVNULL, **quiet)
    app = folder / "echo_env" / "server" / "app.py"
    app.write_text(
        app.read_text(encoding="utf-8").replace(
            "max_concurrent_envs=1,", "max_concurrent_envs=16,"
        ),
        encoding="utf-8",
    )
    port = free_port()
    served = [python, "-m", "uvicorn", "echo_env.server.app:app", "--port", str(port)]
    return served, f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def listening(command: list[str], folder: Path, url: str) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a server that answers."""
    server = subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 180.0
        while True:
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"{url}/health", **DIRECT)
                break
            assert time.monotonic() < deadline_s
            assert server.poll() is None
            time.sleep(0.1)
        yield server
    finally:
        server.terminate()
        server.wait(timeout=20)


@contextlib.contextmanager
def echo_server(folder: Path) -> Iterator[str]:
    """Yield the URL of the echo environment."""
    command, url = echo_command(folder)
    with listening(command, folder, url):
        yield url


@pytest.mark.long
@pytest.mark.slow
def test_its_client_plays_our_environment() -> None:
    python = python_with(OPENENV)
    with serve_envs("textcraft") as hub, httpx.Client(base_url=hub, **DIRECT) as client:
        item = client.get("/v1/envs/textcraft/tasks").json()
        item_id = next(iter(item.values()))["test"][0]
        body = {"env": "textcraft", "item_id": item_id}
        opened = client.post("/v1/sessions", json=body).json()
        path, actions, told = f"/v1/sessions/{opened['session_id']}", [], []
        while not told or not told[-1][2]:
            actions.append(client.get(f"{path}/hint").json()["expert_action"])
            step = {"action": actions[-1], "seq": len(actions)}
            answer = client.post(f"{path}/step", json=step).json()
            told.append([answer["observation"], answer["reward"], answer["done"]])
        command = [python, "-c", PLAY, f"{hub}/openenv/textcraft", json.dumps(actions)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60)
        assert done.returncode == 0, done.stderr[-2000:]
        first, theirs, state, theirs_id = json.loads(done.stdout)
        assert (first, theirs, theirs_id) == (opened["observation"], told, item_id)
        assert state["step_count"] == len(actions)
        assert theirs[-1][1:] == [1.0, True]


@pytest.mark.slow
@pytest.mark.long
def test_its_echo_environment_is_trained_on_here(tmp_path: Path) -> None:
    with echo_server(tmp_path) as url:
        where = ["env.dialect=openenv", f"env.url={url}", "tasks=[{env: openenv, subset: all}]"]
        told = ["env.observation_field=echoed_message", "train.num_steps=2", "eval.num_items=2"]
        with Run(tmp_path, *where, *told) as run:
            assert run.wait() == 0, run.output
            assert run.left_over() == []
        ledger = run.read("ledger.json")
        assert balances(ledger)
        assert (ledger["version"], ledger["failed"]) == (2, 0)
        assert ledger["trained"] >= 8
        assert any(line["reward/mean"] > 0 for line in run.metrics())


@pytest.mark.slow
@pytest.mark.long
def test_trl_trains_two_steps_on_our_textcraft(tmp_path: Path, repository: Path) -> None:
    python = python_with(OPENENV, "trl==1.16.0", sees_ours=True)
    model = repository / "configs/policies/tiny"
    script = repository / "docs/examples/trl_textcraft.py"
    with serve_envs("textcraft") as hub:
        done = subprocess.run(
            [python, str(script), f"{hub}/openenv/textcraft", str(model), "2"],
            capture_output=True,
            encoding="utf-8",
            timeout=250,
            cwd=tmp_path,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        counts = httpx.get(f"{hub}/healthz", **DIRECT).json()
    steps = re.findall(r"^step (\d): reward ([\d.]+) grad ([\d.]+)", done.stdout, re.MULTILINE)
    assert [int(step) for step, _, _ in steps] == [1, 2]
    assert all(float(norm) > 0 for _, _, norm in steps)
    assert (counts["num_created"], counts["num_sessions"]) == (8, 0)  # two groups of four
    assert counts["num_steps"] >= 8
