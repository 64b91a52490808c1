"""Laws of harnesses by name: real programs of others solve a task in its sandbox, by heart.

The packages are installed from npm and the Python index at the first test, which takes minutes.
"""

import asyncio
import json
import os
import shlex
from collections.abc import Callable
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
from actor.rollout.episode import EnvSession, OnTokens
from common import repository
from common.config.actor import ActorSection
from common.config.envs import EnvsSection, SandboxOptions, TerminalOptions
from common.errors import ConfigError
from common.wire.messages import EndReason, Trajectory
from envhub.env import Style
from envhub.envs.terminal.env import make_spec
from learner.ingest.intake import refusal
from tests.actor.agents.endpoint import part_of
from tests.actor.agents.test_lineages import of_engine, trained
from tests.actor.agents.test_tool_calls import TOKENIZER
from tests.actor.rollout.playing import LEASE
from tests.envhub.envs.terminal.container_tasks import BASE
from tests.envhub.envs.terminal.test_containers import ENGINE, problem

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]
ROOT = Path("/var/tmp") / f"longstride-harnesses-{os.getuid()}"
SHIPPED = repository.ROOT / "configs/data/terminal"
WORDS = ("server.log", "photos", "settings.json", "count.py")  # Each is in one instruction.
RENDERER = Renderer(TOKENIZER)
MAX_TOKENS, TURN_TOKENS = 400_000, 400
COMMAND = "echo 42 > answer.txt"
TMUX = "RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends tmux >/dev/null\n"
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


# Task of the repository -> the commands that solve it. The first one looks around.
COUNT = (
    "import collections, sys\n"
    "counts = collections.Counter(sys.stdin.read().lower().split())\n"
    "for word, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:3]:\n"
    "    print(word, count)\n"
)
COMMANDS = {
    "answer": [COMMAND],
    "count-errors": ["head -n 3 server.log", "grep -c '^[^ ]* ERROR' server.log > errors.txt"],
    "rename-files": [
        "ls photos",
        'cd photos; for f in *; do mv -- "$f" "$(echo "$f" | tr "A-Z " "a-z_")"; done; cd ..',
    ],
    "word-counts": [
        f"printf '%s' {shlex.quote(COUNT)} > count.py",
        "echo a b a | python3 count.py",
    ],
}
# aider writes files, and runs no command. It adds a line end to each file.
FILES = {
    "answer": ("answer.txt", "42\n"),
    "count-errors": ("errors.txt", "ERRORS\n"),
    "repair-json": (
        "settings.json",
        '{"name": "store", "port": 8080, "paths": ["/a", "/b"],'
        ' "limits": {"users": 25, "rate": 1.5}}\n',
    ),
    "word-counts": ("count.py", COUNT),
}
CALLS: dict[str, Callable[[str], str]] = {
    "codex": lambda command: call("exec_command", cmd=command),
    "opencode": lambda command: call("bash", command=command, description="Do it"),
    "qwen-code": lambda command: call(
        "run_shell_command", command=command, description="Do it", is_background=False
    ),
    "openhands": lambda command: call(
        "terminal", command=command, summary="Do it", security_risk="LOW"
    ),
    "terminus": lambda command: keys(f"{command}\n"),
    "mini-swe-agent": block,
}
ENDS = {
    "codex": ["done"],
    "opencode": ["done"],
    "qwen-code": ["done"],
    "openhands": [call("finish", message="done", summary="End", security_risk="LOW")],
    "terminus": [keys("", is_complete=True)] * 2,  # It asks again before it ends.
    "mini-swe-agent": [block("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")],
}


def tasks_of(name: str) -> list[str]:
    """Return the tasks of the repository that a harness plays."""
    return [task for task in (FILES if name == "aider" else COMMANDS) if task != "answer"]


def answers_to(name: str, task: str) -> list[str]:
    """Return the answers with which a harness solves a task."""
    if name == "aider":
        path, content = FILES[task]
        log = (SHIPPED / task / "environment/server.log") if task == "count-errors" else None
        number = (
            sum(line.split()[1] == "ERROR" for line in log.read_text(encoding="utf-8").splitlines())
            if log
            else 0
        )
        return [f"{path}\n```\n{content.replace('ERRORS', f'{number}')}```\n"]
    return [*map(CALLS[name], COMMANDS[task]), *ENDS[name]]


@dataclass(slots=True)
class Script:
    """A policy that works off its answers in each conversation with tools or a task."""

    texts: list[str]
    words: str = "answer.txt"  # The prompts of the task have them.
    sampled: list[tuple[list[int], Turn]] = field(default_factory=list[tuple[list[int], Turn]])
    num_used: int = 0

    async def act(
        self, ids: list[int], _: EnvSession, /, on_tokens: OnTokens | None = None
    ) -> Turn:
        prompt = RENDERER.shown(ids)
        is_task = self.words in prompt and self.is_main(prompt)
        text = self.texts[min(self.num_used, len(self.texts) - 1)] if is_task else "Title"
        self.num_used += is_task
        said = [*RENDERER.completion(text), RENDERER.end_of_turn_ids[0]]
        number = len(self.sampled)
        logprobs = [-number - i / 1024 for i in range(len(said))]
        turn = Turn(said, logprobs, [3] * len(said), num_prompt=len(ids))
        self.sampled.append((list(ids), turn))
        if on_tokens is not None:
            for at in range(len(said) - 1):
                await asyncio.sleep(0)
                on_tokens(part_of(turn, at, at + 1))
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


def make_task(folder: Path, build: str = "") -> None:
    """Write a task in Harbor's form, whose tests compare a file.

    Args:
        build: further lines of the Dockerfile.
    """
    files = {
        "instruction.md": INSTRUCTION,
        "task.toml": 'version = "1.0"\n',
        "environment/Dockerfile": f"FROM {BASE}\n{build}WORKDIR /app\n",
        "tests/test.sh": '[ "$(cat /app/answer.txt)" = 42 ] && r=1 || r=0\n'
        "echo $r > /logs/verifier/reward.txt\n",
    }
    for name, text in files.items():
        path = folder / "answer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def played(
    name: str, tasks: Path, policy: Script, backend: str = "bwrap", item: int = 0
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
        sessions.append(InProcess(env, await env.reset(f"tasks-train-{item}", 0)))
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


def install_or_skip(name: str) -> None:
    """Install a harness. Its Python may be missing on this machine."""
    try:
        install(HARNESSES[name].package, ROOT)
    except ConfigError as error:
        if "needs Python" not in f"{error}":
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("name", "task"), [(name, task) for name in HARNESSES for task in tasks_of(name)]
)
def test_scripted_policy_solves_three_tasks_through_each_harness(name: str, task: str) -> None:
    install_or_skip(name)
    folders = sorted(each.name for each in SHIPPED.iterdir())
    instruction = next((SHIPPED / task).glob("instruction.md"), SHIPPED / task / "task.yaml")
    words = next(word for word in WORDS if word in instruction.read_text(encoding="utf-8"))
    policy = Script(answers_to(name, task), words)
    trajectory, outputs = played(name, SHIPPED, policy, item=folders.index(task))
    assert (trajectory.end_reason, trajectory.reward) == (EndReason.DONE, 1.0), outputs
    assert policy.num_used >= len(policy.texts)
    assert trained(trajectory) == of_engine(policy.sampled)
    assert set(trained(trajectory).values()) == {1}
    assert refusal(trajectory, learner_version=4, max_group_size=2, vocab_size=999) == ""


@pytest.mark.parametrize("name", HARNESSES)
def test_scripted_policy_solves_a_task_in_its_container(name: str, tmp_path: Path) -> None:
    if reason := problem():
        pytest.skip(reason)
    install_or_skip(name)
    make_task(tmp_path, build=TMUX if name == "terminus" else "")
    policy = Script(answers_to(name, "answer"))
    trajectory, outputs = played(name, tmp_path, policy, ENGINE)
    assert (trajectory.end_reason, trajectory.reward) == (EndReason.DONE, 1.0), outputs
    assert policy.num_used >= len(policy.texts)
    assert trained(trajectory) == of_engine(policy.sampled)
    assert set(trained(trajectory).values()) == {1}


def test_harness_has_an_empty_environment_and_no_other_network(
    task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGSTRIDE_SECRET", "of the host")
    install(HARNESSES["mini-swe-agent"].package, ROOT)
    probe = "env; timeout 3 bash -c '</dev/tcp/192.0.2.1/80' || echo no network; cat /proc/net/dev"
    policy = Script([block(f"{probe} | tee seen.txt; {COMMAND}"), *ENDS["mini-swe-agent"]])
    _, outputs = played("mini-swe-agent", task, policy)
    shown = RENDERER.shown(policy.sampled[1][0])
    assert "no network" in shown, outputs
    assert f"HOME={HOME}" in shown
    assert "of the host" not in shown
    assert "LONGSTRIDE" not in shown
