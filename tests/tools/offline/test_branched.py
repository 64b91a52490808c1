"""Laws of demonstrations in branches: what they show is what a policy would be shown."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from actor.rollout.env_client import Environments, HubStepResult
from common.config.actor import ActorSection, AgentFormat, AgentOptions, ContextKind
from common.config.tasks import TaskSection
from common.errors import ConfigError, EnvError
from common.wire.messages import PolicyKind
from tests.actor.rollout.playing import Count, go_on
from tests.actor.toy_servers import ToyHub, serve
from tests.configs import edited
from tools.evaluate.play import PlannedEpisode
from tools.offline.config import SftConfig
from tools.offline.demonstrate import _play, demonstrate, play_in_branches
from tools.offline.rows import num_episodes, read_rows
from tools.offline.scratch import make_tokenizer

PLAN = PlannedEpisode(
    episode_id="0/0", env="toy", item_id="toy-train-0", seed=0, horizon=9, policy=PolicyKind.EXPERT
)
SEEN = ["one", "two", "three", "four"]
CALL, RETURN = "<branch>jump</branch>", "<return>jump</return>"
OPENED, CLOSED = "[the branch begins]", "[turns of the branch are left out here]"


class Toys:
    """Environments of one toy, whose expert jumps."""

    def __init__(self, answers: list[Any], acknowledgement: str = "") -> None:
        self._answers, self._acknowledgement = answers, acknowledgement

    def instruction(self, env: str) -> str:
        return "Jump."

    def acknowledgement(self, env: str) -> str:
        return self._acknowledgement

    def opponent_texts(self, env: str) -> dict[str, str]:
        return {}

    async def open(self, env: str, item_id: str, *, seed: int) -> Count:
        return Count(self._answers)


def answers() -> list[HubStepResult]:
    seen = [replace(go_on(), observation=text) for text in SEEN]
    return [*seen, go_on(reward=1.0, done=True)]


def shown(
    kind: ContextKind,
    answers: list[Any],
    acknowledgement: str = "",
    unreturned: int = -1,
    **told: Any,
) -> tuple[list[list[tuple[str, Any]]], bool]:
    """Return (text, whether it is learnt; None: not the agent's) of each record's messages."""
    options = AgentOptions(context=kind, branch_instruction="!", branch_turns=4)
    toys = cast(Environments, Toys(answers, acknowledgement))
    playing = play_in_branches(toys, PLAN, replace(options, **told), unreturned)
    made, is_solved = asyncio.run(playing)
    assert {each["item_id"] for each in made} == {"toy-train-0"}
    rows = [each["conversations"] for each in made]
    assert all((m["from"] == "human") == (m["loss"] is None) for row in rows for m in row)
    return [[(m["value"], m["loss"]) for m in row] for row in rows], is_solved


class Opened(Toys):
    """The toy with tools, and with messages before its first observation."""

    def __init__(self, first_messages: list[dict[str, str]]) -> None:
        super().__init__(answers())
        self._first_messages = first_messages

    async def open(self, env: str, item_id: str, *, seed: int) -> Count:
        session = await super().open(env, item_id, seed=seed)
        tools = [{"name": "jump", "description": "Jumps.", "parameters": {}}]
        vars(session).update(tools=tools, first_messages=self._first_messages)
        return session


@pytest.mark.parametrize("roles", [["system", "user", "assistant"], []])
def test_demonstrations_begin_like_episodes(roles: list[str]) -> None:
    """`run_episode` plays those with branches, and its first prompt is that of the others."""
    toys = cast(Environments, Opened([{"role": role, "content": role} for role in roles]))
    options = AgentOptions(context=ContextKind.FOLD, branch_instruction="!", branch_turns=4)
    (branched, *_), _ = asyncio.run(play_in_branches(toys, PLAN, options))
    (whole,), _ = asyncio.run(_play(toys, PLAN, ActorSection(), 0.0))
    *before, first = whole["conversations"][: len(roles) + 1]
    assert [*before, {**first, "value": first["value"] + "!"}] == branched["conversations"][
        : len(roles) + 1
    ]
    assert first["value"].startswith("Tools:\n- jump: Jumps.")
    assert first["value"].endswith("Jump.\n\nfirst")
    shown_roles = [each.get("role", each["from"]) for each in before]
    assert shown_roles == [{"user": "human", "assistant": "gpt"}.get(role, role) for role in roles]


def test_segments_of_a_demonstration_are_one_episode(tmp_path: Path) -> None:
    options = AgentOptions(context=ContextKind.FOLD, branch_instruction="!", branch_turns=4)
    toys = cast(Environments, Toys(answers()))
    records, _ = asyncio.run(play_in_branches(toys, PLAN, options))
    path = tmp_path / "demonstrations.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    tokenizer = make_tokenizer(["jump one two three"] * 8, vocab_size=300)
    rows = read_rows(path, tokenizer=tokenizer, max_tokens=1_000, key="k")
    assert len(rows) == 3
    assert num_episodes(rows) == 1
    assert {row.item_id for row in rows} == {"toy/toy-train-0"}


def test_fold_branch_is_replaced_by_its_return() -> None:
    rows, is_solved = shown(ContextKind.FOLD, answers())
    first, jump = ("Jump.\n\nfirst!", None), ("jump", True)
    opened, left = [(CALL, True), (OPENED, None)], [(CALL, False), (CLOSED, None), (RETURN, False)]
    returned = [("four", None), (RETURN, True)]
    assert rows == [
        [first, *opened, jump, ("one", None), jump, ("two", None), (RETURN, True)],
        [first, *left, ("two", None), *opened, jump, ("three", None), jump, *returned],
        [first, *left, ("two", None), *left, ("four", None), *opened, jump],
    ]
    assert is_solved


def test_subagent_branch_shows_first_message_and_call() -> None:
    rows, _ = shown(ContextKind.SUBAGENT, answers())
    told = [text for text, _ in rows[3]]
    assert told[0].startswith("Jump.\n\nfirst")
    assert told[1:] == [CALL, f"{OPENED}\ntwo", "jump", "three", "jump", "four", RETURN]
    learnt = [text for row in rows for text, is_learnt in row if is_learnt]
    assert learnt == [*[CALL, "jump", "jump", RETURN] * 2, CALL, "jump"]


def test_unreturned_branch_ends_before_the_next_call() -> None:
    rows, _ = shown(ContextKind.FOLD, [*answers()[:3], *answers()], unreturned=0)
    first, jump, opened = "Jump.\n\nfirst!", "jump", [CALL, OPENED]
    left = [first, CALL, "[the branch was ended without a return]\none"]
    texts = [[text for text, _ in row] for row in rows]
    assert texts == [
        [first, *opened, jump, "one", jump, "two", jump, "three", jump],
        [*left, *opened, jump, "two", jump, "three", RETURN],
        [*left, CALL, CLOSED, RETURN, "three", *opened, jump, "four", jump],
    ]
    assert sum(bool(is_learnt) for row in rows for _, is_learnt in row) == 8 + 3 + 1


def test_branched_actions_keep_format_and_acknowledgement() -> None:
    react = {"format": AgentFormat.REACT, "branch_turns": 2}
    rows, _ = shown(ContextKind.FOLD, answers()[3:], "Yes.", **react)
    assert [row[1] for row in rows] == [("Yes.", False)] * 2
    assert rows[0][3][0] == CALL
    assert rows[0][5][0].endswith("Action:\njump")


def test_short_branch_and_failed_environment_raise_errors() -> None:
    with pytest.raises(ConfigError, match="branch_turns=1"):
        shown(ContextKind.FOLD, answers(), branch_turns=1)
    with pytest.raises(EnvError, match="toy-train-0: env_error: gone"):
        shown(ContextKind.FOLD, [EnvError("gone")])


def test_demonstrations_alternate_contexts_and_unreturned_branches(tmp_path: Path) -> None:
    changes = {
        "tasks": [TaskSection(env="toy", subset="a")],
        "actor.branch_turns": 2,
        "actor.branch_instruction": "!",
        "sft.num_demonstrations": 5,
        "sft.random_frac": 0.0,
        "sft.contexts": [ContextKind.FULL, ContextKind.FOLD, ContextKind.WINDOW],
    }
    path = tmp_path / "shown.jsonl"
    with serve(ToyHub().app()) as url:
        demonstrate(edited(SftConfig(), {"envhub.style": "compact", **changes}), url, "", path)
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert all(record["success"] is True for record in records)
    texts = [[each["value"] for each in record["conversations"]] for record in records]
    call, back = "<branch>go</branch>", "<return>go</return>"
    first = [f"Play.\n\nbegin a-train-{number}" for number in range(5)]
    assert texts == [
        [first[0], "go", "on", "go"],
        [f"{first[1]}!", call, OPENED, "go", "on", back],
        [f"{first[1]}!", call, CLOSED, back, "on", call, OPENED, "go"],
        [first[2], "go", "on", "go"],
        [first[3], "go", "on", "go"],
        [f"{first[4]}!", call, OPENED, "go", "on", "go"],  # of the second there is no return
    ]


def test_demonstration_has_the_calls_and_results_before_its_first_observation() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {}}}
    firsts = [
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "Look."},
        {"role": "tool", "content": "a key", "tool_call_id": "c1"},
    ]

    class WithMessages(Toys):
        async def open(self, env: str, item_id: str, *, seed: int) -> Count:
            session = await super().open(env, item_id, seed=seed)
            session.first_messages = firsts
            return session

    toys = cast(Environments, WithMessages([go_on(reward=1.0, done=True)]))
    options = AgentOptions(context=ContextKind.FOLD, branch_turns=4)
    ((plain, _), (branched, _)) = (
        asyncio.run(_play(toys, PLAN, ActorSection(), 0.0)),
        asyncio.run(play_in_branches(toys, PLAN, options)),
    )
    wanted = [
        {"from": "gpt", "loss": False, "value": "", "tool_calls": [call], "thoughts": "Look."},
        {"from": "human", "loss": None, "value": "a key", "tool_call_id": "c1", "role": "tool"},
    ]
    for records in (plain, branched):
        assert records[0]["conversations"][:2] == wanted
