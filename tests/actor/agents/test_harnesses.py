"""Laws of harnesses by name: real programs of others solve a task in its sandbox, by heart.

The packages are installed from npm and the Python index at the first test, which takes minutes.
"""

import asyncio
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from actor.agents.agents import Agents
from actor.agents.harnesses import HARNESSES, HOME
from actor.agents.installation import install
from actor.formats.renderer import Renderer
from actor.rollout.context import Turn
from actor.rollout.env_client import ExpertHint, HubStepResult
from actor.rollout.episode import EnvSession
from common.config.actor import ActorSection
from common.config.envs import EnvsSection, SandboxOptions, TerminalOptions
from common.errors import ConfigError
from common.wire.messages import EndReason, Trajectory
from envhub.env import Style
from envhub.envs.terminal.env import make_spec
from learner.ingest.intake import refusal
from tests.actor.agents.test_lineages import of_engine, trained
from tests.actor.agents.test_tool_calls import TOKENIZER
from tests.actor.rollout.playing import LEASE
from tests.envhub.envs.terminal.container_tasks import BASE
from tests.envhub.envs.terminal.test_containers import problem

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]
ROOT = Path("/var/tmp") / f"longstride-harnesses-{os.getuid()}"
RENDERER = Renderer(TOKENIZER)
MAX_TOKENS, TURN_TOKENS = 400_000, 400
COMMAND = "echo 42 > answer.txt"
INSTRUCTION = "Write the number 42 into the file answer.txt.\n"


def call(name: str, **arguments: Any) -> str:
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


def block(command: str) -> str:
    return f"I do it.\n```mswea_bash_command\n{command}\n```"


def keys(text: str, *, is_complete: bool = False) -> str:
    commands = [{"keystrokes": text, "duration": 1.0}] if text else []
    answer = {"analysis": "a", "plan": "p", "commands": commands, "task_complete": is_complete}
    return json.dumps(answer)


ANSWERS = {
    "codex": [call("exec_command", cmd=COMMAND), "done"],
    "opencode": [call("bash", command=COMMAND, description="Write the answer"), "done"],
    "qwen-code": [
        call("run_shell_command", command=COMMAND, description="Write", is_background=False),
        "done",
    ],
    "openhands": [
        call("terminal", command=COMMAND, summary="Write", security_risk="LOW"),
        call("finish", message="done", summary="End", security_risk="LOW"),
    ],
    "terminus": [
        keys(f"{COMMAND}\n"),
        *[keys("", is_complete=True)] * 2,  # It asks again before it ends.
    ],
    "aider": ["answer.txt\n```\n42\n```\n"],
    "mini-swe-agent": [block(COMMAND), block("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")],
}


@dataclass(slots=True)
class Script:
    """A policy that works off its answers in each conversation with tools or a task."""

    texts: list[str]
    sampled: list[tuple[list[int], Turn]] = field(default_factory=list[tuple[list[int], Turn]])
    num_used: int = 0

    async def act(self, ids: list[int], _: EnvSession) -> Turn:
        prompt = RENDERER.shown(ids)
        is_task = "answer.txt" in prompt and self.is_main(prompt)
        text = self.texts[min(self.num_used, len(self.texts) - 1)] if is_task else "Title"
        self.num_used += is_task
        said = [*RENDERER.completion(text), RENDERER.end_of_turn_ids[0]]
        number = len(self.sampled)
        logprobs = [-number - i / 1024 for i in range(len(said))]
        turn = Turn(said, logprobs, [3] * len(said), num_prompt=len(ids))
        self.sampled.append((list(ids), turn))
        return turn

    def is_main(self, prompt: str) -> bool:
        """Return whether a prompt is that of the agent, and not of its titles or summaries."""
        return not self.texts[0].startswith("<tool_call>") or "<tools>" in prompt


class InProcess:
    """A session of the environment `terminal` in this process."""

    first_state = ""
    start_score = 0.0

    def __init__(self, env: Any, observation: str) -> None:
        self._env = env
        self.first_observation = observation
        self.outputs: list[str] = []

    async def step(self, action: str) -> HubStepResult:
        result = await self._env.step(action)
        self.outputs.append(result.observation)
        return HubStepResult(
            observation=result.observation,
            reward=result.reward,
            done=result.done,
            is_valid=result.is_valid,
            is_success=result.done and result.reward == 1.0,
            metrics=result.metrics,
        )

    async def hint(self) -> ExpertHint:
        raise AssertionError("no hint is needed")

    async def close(self) -> None:
        await self._env.close()


def make_task(folder: Path) -> None:
    """Write a task in Harbor's form, whose tests compare a file."""
    files = {
        "instruction.md": INSTRUCTION,
        "task.toml": 'version = "1.0"\n',
        "environment/Dockerfile": f"FROM {BASE}\nWORKDIR /app\n",
        "tests/test.sh": '[ "$(cat /app/answer.txt)" = 42 ] && r=1 || r=0\n'
        "echo $r > /logs/verifier/reward.txt\n",
    }
    for name, text in files.items():
        path = folder / "answer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def played(
    name: str, tasks: Path, policy: Script, backend: str = "bwrap"
) -> tuple[Trajectory, list[str]]:
    """Return the episode of a harness, and what its commands printed."""
    envs = EnvsSection(
        terminal=TerminalOptions(train=f"{tasks}", command_timeout_s=900.0, output_chars=6000),
        sandbox=SandboxOptions(
            backend=backend,
            mounts=[f"{ROOT}"],
            memory_mib=4096,
            processes=512,
            max_files=50_000,
            disk_mib=512,
        ),
    )
    spec = make_spec(envs)
    sessions: list[InProcess] = []

    async def open_session() -> EnvSession:
        env: Any = spec.make(Style.COMPACT)
        sessions.append(InProcess(env, await env.reset("tasks-train-0", 0)))
        return sessions[-1]

    async def run() -> Trajectory:
        cfg = ActorSection(
            endpoint=True,
            agent=[name],
            harnesses=f"{ROOT}",
            max_model_len=MAX_TOKENS,
            max_turn_tokens=TURN_TOKENS,
        )
        agents = Agents(cfg, actor="actor-0", renderer=RENDERER)
        lease = replace(LEASE, horizon=10, deadline_s=1000.0)
        try:
            return await agents.play(
                lease, open_session=open_session, act=policy.act, task=("", ""), may_repeat=False
            )
        finally:
            await agents.close()

    trajectory = asyncio.run(run())
    return trajectory, sessions[0].outputs


@pytest.fixture
def task(tmp_path: Path) -> Path:
    make_task(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", HARNESSES)
def test_scripted_policy_solves_a_task_through_each_harness(name: str, task: Path) -> None:
    try:
        install(HARNESSES[name].package, ROOT)
    except ConfigError as error:
        if "needs Python" not in f"{error}":
            raise
        pytest.skip(str(error))
    policy = Script(ANSWERS[name])
    trajectory, outputs = played(name, task, policy)
    assert (trajectory.end_reason, trajectory.reward) == (EndReason.DONE, 1.0), outputs
    assert trained(trajectory) == of_engine(policy.sampled)
    assert set(trained(trajectory).values()) == {1}
    assert refusal(trajectory, learner_version=4, max_group_size=2, vocab_size=999) == ""


@pytest.mark.parametrize("name", ["qwen-code", "mini-swe-agent"])
def test_harness_plays_in_the_container_of_its_task(name: str, task: Path) -> None:
    if reason := problem():
        pytest.skip(reason)
    install(HARNESSES[name].package, ROOT)
    policy = Script(ANSWERS[name])
    trajectory, outputs = played(name, task, policy, "podman")
    assert (trajectory.end_reason, trajectory.reward) == (EndReason.DONE, 1.0), outputs
    assert trained(trajectory) == of_engine(policy.sampled)


def test_harness_has_an_empty_environment_and_no_other_network(
    task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGSTRIDE_SECRET", "of the host")
    install(HARNESSES["mini-swe-agent"].package, ROOT)
    probe = "env; timeout 3 bash -c '</dev/tcp/192.0.2.1/80' || echo no network; cat /proc/net/dev"
    policy = Script([block(f"{probe} | tee seen.txt; {COMMAND}"), *ANSWERS["mini-swe-agent"][1:]])
    _, outputs = played("mini-swe-agent", task, policy)
    shown = RENDERER.shown(policy.sampled[1][0])
    assert "no network" in shown, outputs
    assert f"HOME={HOME}" in shown
    assert "of the host" not in shown
    assert "LONGSTRIDE" not in shown
