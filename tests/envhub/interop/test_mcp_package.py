"""Laws of MCP servers as environments, with its own package in an environment of its own."""

import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from actor.formats.tools import ToolRenderer, make_renderer
from common.config.actor import AgentFormat
from common.errors import ConfigError
from common.formats.answers import CALLS, worded
from common.repository import ROOT
from envhub.catalogue.registry import Registry
from envhub.env import SubsetSpec
from envhub.interop.mcp_server import McpEpisode, McpOptions, Tasks
from envhub.interop.texts import BadAction, RewardRule
from tests.actor.formats.test_tools import CALLING
from tests.end_to_end.runs import Run, balances
from tests.ports import free_port
from tests.venvs import python_with

pytestmark = pytest.mark.timeout(900)  # an environment is made, an engine starts

MCP = "mcp==2.3.0"
SERVER = '''
import json, os, sys, time
from mcp.server import MCPServer
server = MCPServer("tools")
sums = {}

@server.tool()
def begin(session: str = "", start: int = 0) -> str:
    sums[session] = start
    return session or "opened"

@server.tool()
def add(number: int, session: str = "") -> str:
    """Add a number."""
    if number > 99:
        raise ValueError("too large")
    sums[session] = sums.get(session, 0) + number
    return f"sum {sums[session]} of {len(sums)}"

@server.tool()
def tell(how: str, session: str = "") -> str:
    if how == "die":
        os._exit(3)
    if how == "sleep":
        time.sleep(60)
    return "x\\\\ud800y".encode().decode("unicode_escape") if how == "odd" else "z" * 100_000

@server.tool()
def grade(answer: str, right: int, session: str = "") -> dict:
    return {"reward": (answer == str(right)) / 2, "is_success": answer == str(right)}

@server.tool()
def judge(reward: float, truncated: bool) -> dict:
    return {"reward": reward, "success": True, "truncated": truncated}

@server.tool()
def length(answer: str) -> dict:
    return {"reward": min(len(answer) / 60, 1.0)}

@server.tool()
def listed() -> str:
    """JSON lines."""
    return "\\n".join(json.dumps({"prompt": f"Say {n}.", "answer": [n, str(n)]}) for n in range(20))

if __name__ == "__main__":
    if sys.argv[1:]:
        server.run(transport="streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
'''
PLAY = """
import asyncio, json, sys
from dataclasses import astuple
from envhub.catalogue.registry import Registry
from envhub.env import EnvFailure, Style
spec = Registry([sys.argv[1]]).spec("tools")
async def play(episodes):
    told = []
    for item, actions in episodes:
        env = spec.make(Style.COMPACT)
        told.append([spec.instruction[Style.COMPACT] + await env.reset(item, 0)])
        for action in actions:
            try:
                result = await env.step(action)
            except EnvFailure as error:
                told[-1].append(str(error))
                break
            told[-1].append([result.observation, result.reward, result.done, result.is_valid,
                             result.is_success] + ["cut short"] * result.is_truncated)
        await env.close()
    await spec.stop()
    return told
print(json.dumps([asyncio.run(play(json.loads(sys.argv[2]))), spec.subsets["all"].num_test]))
"""
ITEMS = [{"prompt": "Say 7.", "answer": "Seven  7"}, {"prompt": "Say 8.", "answer": 8}]


def call(tool: str, **arguments: object) -> str:
    return f"Thought: yes.\nAction: {json.dumps({'tool': tool, 'arguments': arguments})}"


def described(folder: Path, **options: object) -> str:
    """Return the reference of the server, with its options and items written to a folder."""
    if not (folder / "server.py").exists():
        (folder / "server.py").write_text(SERVER, encoding="utf-8")
    (folder / "items.json").write_text(json.dumps(ITEMS), encoding="utf-8")
    command = [python_with(MCP, sees_ours=True), str(folder / "server.py")]
    where: dict[str, object] = {} if "url" in options else {"command": command}
    told = {"items": "items.json", "timeout_s": 60.0, **where, **options}
    (folder / "tools.yaml").write_text(yaml.safe_dump(told), encoding="utf-8")
    return f"mcp:{folder / 'tools.yaml'}"


def play(reference: str, *episodes: tuple[str, list[str]]) -> tuple[list[Any], int]:
    """Return the observations of the episodes and the number of test items."""
    done = subprocess.run(
        [python_with(MCP, sees_ours=True), "-c", PLAY, reference, json.dumps(episodes)],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return tuple(json.loads(done.stdout.splitlines()[-1]))


@contextlib.contextmanager
def http_server(folder: Path, *, text: str = SERVER, port: int = 0) -> Iterator[str]:
    """Yield the URL of the server over streamable HTTP, at a free port unless one is given."""
    (folder / "server.py").write_text(text, encoding="utf-8")
    if not port:
        port = free_port()
    command = [python_with(MCP, sees_ours=True), str(folder / "server.py"), str(port)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 60.0
        while True:
            with socket.socket() as knock:
                if knock.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < deadline_s
            assert server.poll() is None
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        server.kill()
        server.wait(timeout=20)


@pytest.mark.slow
@pytest.mark.parametrize(
    "revision", [pytest.param("2025-11-25", marks=pytest.mark.long), "2026-07-28"]
)
def test_stdio_tools_are_played_in_both_revisions(revision: str, tmp_path: Path) -> None:
    reference = described(tmp_path, revision=revision, max_chars=100, num_test=1, hidden=["begin"])
    actions = [
        "hello",
        call("nosuch"),
        call("begin"),
        call("add", number="x"),
        call("add", number=100),
        '{"tool": "tell", "arguments": {"how": "\\ud800"}}',
        '{"tool": "add", "arguments": {"number": %s}}' % ("[" * 5000),
        call("add", number=3),
        call("tell", how="long"),
        call("submit", answer="seven 7 "),
    ]
    episodes = [("all-train-0", actions), ("all-test-0", [call("submit", answer="9")])]
    (first, second), num_test = play(reference, *episodes)
    assert num_test == 1
    assert "- add: Add a number." in first[0]
    assert "- begin" not in first[0]
    assert first[0].endswith("Say 7.")
    invalid, valid = first[1:5] + first[6:8], [first[5], *first[8:]]
    assert all(not is_valid and not done for _, _, done, is_valid, _ in invalid), first
    assert all(is_valid for _, _, _, is_valid, _ in valid)
    assert "number: 'x' is not of type 'integer'" in first[4][0]
    assert first[5][0].startswith("Error executing tool add")  # a tool's error is an observation
    assert first[8][0] == "sum 3 of 1"
    assert first[9][0] == "z" * 100 + " [99900 more characters]"
    assert first[10] == ["Right.", 1.0, True, True, True]
    assert second[1] == ["Wrong.", 0.0, True, True, False]


MCP_TOGETHER = """
import asyncio, sys
from envhub.catalogue.registry import Registry
from envhub.env import Style
spec = Registry([sys.argv[1]]).spec("tools")
async def play():
    envs = [spec.make(Style.COMPACT) for _ in range(3)]
    await asyncio.gather(*(env.reset("all-test-0", 0) for env in envs))
    print([(await env.step(sys.argv[2])).observation for env in envs])
    for env in envs:
        await env.close()
    await spec.stop()
asyncio.run(play())
"""


@pytest.mark.long
@pytest.mark.slow
def test_concurrent_episodes_share_their_sessions_server(tmp_path: Path, repository: Path) -> None:
    reference = described(tmp_path, session="session")
    python = python_with(MCP, sees_ours=True)
    done = subprocess.run(
        [python, "-c", MCP_TOGETHER, reference, call("add", number=5)],
        capture_output=True,
        encoding="utf-8",
        timeout=240,
        cwd=repository,
    )
    told = [f"sum 5 of {number}" for number in (1, 2, 3)]
    assert done.stdout.strip() == str(told), done.stderr[-2_000:]


MCP_AGAIN = """
import asyncio, sys
from envhub.catalogue.registry import Registry
from envhub.env import EnvFailure, Style
spec = Registry([sys.argv[1]]).spec("tools")
async def play():
    env = spec.make(Style.COMPACT)
    await env.reset("all-train-0", 0)
    try:
        print((await env.step(sys.argv[2])).observation, flush=True)
    except EnvFailure as error:
        print(error, flush=True)
    await env.close()
async def all_of_them():
    for _ in range(3):
        await play()
        sys.stdin.readline()
    await spec.stop()
asyncio.run(all_of_them())
"""


@pytest.mark.long
@pytest.mark.slow
def test_restarted_server_is_used_again(tmp_path: Path, repository: Path) -> None:
    argv = [python_with(MCP, sees_ours=True), "-c", MCP_AGAIN]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(contextlib.ExitStack())
        url = server.enter_context(http_server(tmp_path))
        reference = described(tmp_path, url=url, session="session", revision="2025-11-25")
        argv += [reference, call("add", number=5)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        player = stack.enter_context(subprocess.Popen(argv, cwd=repository, **pipes))
        stack.callback(player.kill)
        assert player.stdout is not None
        assert player.stdout.readline() == "sum 5 of 1\n"
        server.close()  # The server is killed without a pending answer.
        stack.enter_context(http_server(tmp_path, port=urlsplit(url).port or 0))
        told, _ = player.communicate("\n\n\n", timeout=60)
    assert told.splitlines()[0].startswith(f"MCP server {url}: tool 'add': MCPError: Session")
    assert told.splitlines()[1:] == ["sum 5 of 1"]


@pytest.mark.long
@pytest.mark.slow
def test_session_is_an_argument_and_a_server_check_pays(tmp_path: Path) -> None:
    check = {"tool": "grade", "arguments": {"right": 8}}
    items = [{"prompt": "Say 8.", "check": check, "split": s} for s in ("train", "test")]
    with http_server(tmp_path) as url:
        reference = described(tmp_path, url=url, session="session", items="mine.json")
        (tmp_path / "mine.json").write_text("\n".join(map(json.dumps, items)), encoding="utf-8")
        moves = [call("add", number=1), call("submit", answer="8")]
        told, _ = play(reference, *[("all-train-0", moves), ("all-test-0", moves)])
    assert all("session" not in episode[0] and "grade" not in episode[0] for episode in told)
    assert [episode[1][0] for episode in told] == ["sum 1 of 1", "sum 1 of 2"]
    assert [episode[2][1:] for episode in told] == [[0.5, True, True, True]] * 2


def make_episode(*, options: McpOptions, item: dict[str, Any]) -> McpEpisode:
    tasks = Tasks(
        options=options,
        items=[item],
        places={"train": [0]},
        subset=SubsetSpec(num_train=1, num_test=0, max_turns=3),
        rule=RewardRule(),
        tools={"submit": {}, "add": {}},
        grades=False,
        shared=[],
    )
    return McpEpisode(tasks)


def test_plain_answer_may_have_braces() -> None:
    episode = make_episode(options=McpOptions(plain_answers=True), item=ITEMS[0])
    text = r"The answer is \boxed{42}."
    assert episode._parse(f"Action: {text}") == ("submit", {"answer": text})
    assert episode._parse('{"tool": "add"}') == ("add", {})
    for refused in ("", '{"tool": "add", "arguments": {'):
        with pytest.raises(BadAction):
            episode._parse(refused)


@pytest.mark.slow
def test_refusal_of_the_check_tool_is_a_failure_without_reward(tmp_path: Path) -> None:
    refusing = """
from mcp.shared.exceptions import MCPError

@server.tool()
def refuse(answer: str) -> dict:
    raise MCPError(code=-32602, message="no such answer key")

if __name__"""
    text = SERVER.replace("\nif __name__", refusing)
    (tmp_path / "server.py").write_text(text, encoding="utf-8")
    reference = described(tmp_path, items="mine.json", num_test=0)
    items = [{"prompt": "Say 8.", "check": {"tool": "refuse"}}]
    (tmp_path / "mine.json").write_text(json.dumps(items), encoding="utf-8")
    ((_, failed),), _ = play(reference, ("all-train-0", [call("submit", answer="8")]))
    assert isinstance(failed, str)
    assert "tool 'refuse'" in failed


@pytest.mark.long
@pytest.mark.slow
def test_paying_tool_may_truncate_succeed_and_pay_negative(tmp_path: Path) -> None:
    reference = described(tmp_path, submit="judge", min_reward=-1.0)
    moves = [
        [call("add", number=1), call("judge", reward=-0.5, truncated=is_cut)]
        for is_cut in (True, False)
    ]
    ((_, on, cut), (_, _, end)), _ = play(reference, *[("all-train-0", each) for each in moves])
    assert on[1] == 0.5  # nothing is paid yet: 0 of -1 to 1
    assert cut[1:] == [0.25, True, True, True, "cut short"]
    assert end[1:] == [0.25, True, True, True]


@pytest.mark.long
@pytest.mark.slow
def test_local_server_bypasses_the_proxy(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    moves = [call("submit", answer="Seven 7")]
    with http_server(tmp_path) as url:
        told, _ = play(described(tmp_path, url=url), ("all-train-0", moves))
    assert told[0][1][2] is True  # the episode is done
    reference = described(tmp_path, url="http://mcp.example:80/mcp", start_timeout_s=20.0)
    done = subprocess.run(
        [python_with(MCP, sees_ours=True), "run.py", "check-env", reference],
        cwd=repository,
        capture_output=True,
        encoding="utf-8",
        timeout=200,
    )
    assert "of http_proxy; add mcp.example to no_proxy" in done.stderr


@pytest.mark.long
@pytest.mark.slow
def test_faulty_server_fails_episode_by_name(tmp_path: Path) -> None:
    options = {"items": "tool:listed", "timeout_s": 8.0, "session": "session", "begin": "begin"}
    reference = described(tmp_path, **options)
    ends = [("all-train-0", [call("tell", how=how)]) for how in ("die", "sleep", "odd")]
    right = ("all-test-1", [call("submit", answer="19")])  # the last tenth of twenty
    (died, slept, odd, last), num_test = play(reference, *ends, right)
    assert num_test == 2
    assert "server.py: tool 'tell': MCPError: Connection closed" in died[1]
    assert "tool 'tell': no answer within 8 s" in slept[1]
    assert odd[1].startswith("MCP server ")
    assert last[1] == ["Right.", 1.0, True, True, True]  # another connection is made


@pytest.mark.long
@pytest.mark.slow
def test_function_call_of_tool_reaches_server(tmp_path: Path, repository: Path) -> None:
    reference = described(tmp_path, hidden=["tell", "listed", "begin", "length"])
    told = "import json, sys; from envhub.catalogue.registry import Registry; print(json.dumps("
    told += "Registry([sys.argv[1]]).catalogue()['tools']))"
    command = [python_with(MCP, sees_ours=True), "-c", told, reference]
    shown = subprocess.run(
        command, cwd=repository, capture_output=True, encoding="utf-8", timeout=200
    )
    assert shown.returncode == 0, shown.stderr[-3000:]
    entry = json.loads(shown.stdout)
    tools = entry["tools"]
    assert [each["name"] for each in tools] == ["add", "grade", "judge", "submit"]
    render = make_renderer(CALLING, AgentFormat.FUNCTION_CALL).of("tools", tools)
    assert isinstance(render, ToolRenderer)
    assert "Add a number." in CALLING.decode(render.first_prompt("Say 7."))
    instruction = entry["instruction"]["compact"]
    assert "- add: Add a number." in instruction
    assert worded(AgentFormat.FUNCTION_CALL, instruction) == CALLS  # the template lists the tools
    text = '<tool_call>{"name": "add", "arguments": {"number": 3}}</tool_call>'
    action = render.called(CALLING.encode(text, add_special_tokens=False))
    assert action is not None
    ((first, added),), _ = play(reference, ("all-train-0", [action]))
    assert first == instruction + "Say 7."
    assert added == ["sum 3 of 1", 0.0, False, True, False]


@pytest.mark.slow
@pytest.mark.long
def test_its_tools_are_trained_on_here(tmp_path: Path) -> None:
    with http_server(tmp_path) as url:
        options = {"items": "tool:listed", "submit": "length", "plain_answers": True}
        reference = described(tmp_path, url=url, **options)
        where = [f"envhub.envs=[{reference}]", "tasks=[{env: tools, subset: all}]"]
        told = ["train.num_steps=2", "eval.num_items=2"]
        python = python_with(MCP, sees_ours=True)
        with Run(tmp_path, *where, *told, python=python) as run:
            assert run.wait() == 0, run.output
            assert run.left_over() == []
    ledger = run.read("ledger.json")
    assert balances(ledger)
    assert (ledger["version"], ledger["failed"]) == (2, 0)
    assert ledger["trained"] >= 8
    assert any(line["reward/mean"] > 0 for line in run.metrics())


@pytest.mark.long
@pytest.mark.slow
def test_example_is_sound_by_its_own_words(repository: Path) -> None:
    python = python_with(MCP, sees_ours=True)
    done = subprocess.run(
        [python, "run.py", "check-env", "mcp:docs/examples/calculator.yaml"],
        cwd=repository,
        capture_output=True,
        encoding="utf-8",
        timeout=250,
        env={"PATH": f"{Path(python).parent}:/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("url: http://a\ncommand: [b]", "exactly one of url and command"),
        ("command: [b]\nrevision: '2024'", "revision='2024': must be one of auto, 2025-11-25"),
        ("command: [b]\ntimeout: 3", "timeout"),
        ("command: [b]\nmax_turns: many", "max_turns"),
        ("command: [b", "expected"),
        ("command: [b]", r"mcp: the Python package is missing.*pip install jsonschema 'mcp>=2\.3"),
    ],
)
def test_impossible_mcp_server_is_refused_by_name(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"(?s){why}"):
        Registry([f"mcp:{tmp_path / 'tools.yaml'}"])
