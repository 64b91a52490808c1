"""Laws of verifiers with its own package: its evaluation command on our tasks."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response

from envhub.env import Style
from tests.envhub.agentgym.agentgym_clients import native_spec, serve_app, serve_envs
from tests.venvs import python_with

pytestmark = pytest.mark.timeout(900)  # an environment is made, an engine starts

VERIFIERS = "verifiers==0.4.0"
ITEMS = ("GoToLocal-test-0", "GoToLocal-test-1")


def expert_actions(item_id: str) -> tuple[str, list[str]]:
    """Return the first observation of an item of BabyAI, and what solves it."""
    env: Any = native_spec("babyai").make(Style.AGENTGYM)
    first, actions, is_done = env.reset(item_id, 0), [], False
    while not is_done:
        actions.append(env.expert_action())
        is_done = env.step(actions[-1]).done
    return first, actions


def expert_model() -> FastAPI:
    """Return a chat model that solves the items from its first prompt."""
    known = dict(map(expert_actions, ITEMS))
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        messages = (await request.json())["messages"]
        first = next(m["content"] for m in messages if m["role"] == "user")
        actions = next(found for begun, found in known.items() if str(first).endswith(begun))
        num_said = sum(message["role"] == "assistant" for message in messages)
        text = f"Thought:\nI know.\n\nAction:\n{actions[num_said]}"
        told = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "expert"}
        parts: list[dict[str, Any]] = [
            {"delta": {"role": "assistant", "content": text}, "finish_reason": None},
            {"delta": {}, "finish_reason": "stop"},
        ]
        chunks = [json.dumps(told | {"choices": [{"index": 0, **part}]}) for part in parts]
        stream = "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"])
        return Response(stream, media_type="text/event-stream")

    return app


@pytest.mark.slow
@pytest.mark.long
def test_its_own_command_evaluates_our_babyai(tmp_path: Path, repository: Path) -> None:
    python = python_with(VERIFIERS, str(repository / "docs/examples/verifiers"))
    folder = Path(python).parent
    with serve_envs("babyai") as hub, serve_app(expert_model()) as model:
        options = {
            "env.taskset.url": hub,
            "env.taskset.env": "babyai",
            "env.taskset.split": "GoToLocal-test",
            "select.limit": "2",
            "model": "expert",
            "client.base-url": f"{model}/v1",
            "output-dir": str(tmp_path),
            "run.name": "babyai",
        }
        flags = [word for name, value in options.items() for word in (f"--{name}", value)]
        done = subprocess.run(
            [str(folder / "vf-eval"), "longstride-hub", *flags, "--no-rich", "--no-push"],
            capture_output=True,
            encoding="utf-8",
            timeout=200,
            cwd=tmp_path,
            env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "PRIME_API_KEY": "x"},
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    lines = (tmp_path / "babyai" / "traces.jsonl").read_text(encoding="utf-8").splitlines()
    episodes = [json.loads(line) for line in lines]
    assert len(episodes) == len(ITEMS)
    for episode in episodes:
        (trace,) = episode["traces"]
        assert trace["metrics"]["success"] == 1.0, trace
        assert trace["rewards"]["hub_reward"]["score"] == 1.0
