"""Laws of thoughts and invalid calls in an episode: what the environment and the policy receive."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from actor.formats.renderer import Renderer
from actor.formats.tools import ToolRenderer
from actor.rollout.context import Turn
from common.config.actor import AgentFormat, AgentOptions, ContextKind, KeepThinking
from common.config.load import load_config
from common.errors import ConfigError
from common.segments import as_rows, refusal_of_segments
from common.wire.messages import EndReason, Trajectory
from tests.actor.agents.endpoint import ByHeart, endpoint
from tests.actor.formats.trl_templates import tokenizer_of
from tests.actor.rollout.playing import LEASE, Count, go_on, play

SAID = ["Why a?\n</think>\n\nAction: a", "Why b?\n</think>\n\nAction: b", "</think>\n\nAction: c"]
THINKER = Renderer(tokenizer_of("qwen3_5_think"))


def turns(renderer: Renderer, texts: Sequence[str]) -> list[Turn]:
    found: list[Turn] = []
    for text in texts:
        ids = [*renderer.completion(text), renderer.end_of_turn_ids[0]]
        found.append(Turn(ids, [-0.5] * len(ids), [0] * len(ids)))
    return found


def played(
    keep: KeepThinking,
    *,
    horizon: int = 3,
    keeps_last: bool = False,
    text: str = "ab",
    max_tokens: int = 2_000,
    **agent: Any,
) -> tuple[Trajectory, list[str], list[str]]:
    """Return the trajectory, the actions that the environment received, and the prompts."""
    session = Count([replace(go_on(), observation=text)] * 3)
    options = AgentOptions(format=AgentFormat.REACT, keep_thinking=keep, **agent)
    prompts: list[list[int]] = []
    got = play(
        session,
        lease=replace(LEASE, horizon=horizon),
        keeps_last=keeps_last,
        turns=turns(THINKER, SAID),
        prompts=prompts,
        render=THINKER,
        max_tokens=max_tokens,
        turn_tokens=50,
        options=options,
    )
    return got, session.actions, [THINKER.shown(each) for each in prompts]


@pytest.mark.parametrize("keep", KeepThinking)
def test_environment_receives_actions_without_thoughts(keep: KeepThinking) -> None:
    got, actions, prompts = played(keep)
    assert actions == ["a", "b", "c"]
    assert got.num_invalid_actions == 0
    thoughts = [[f"Why {each}?" in prompt for each in "ab"] for prompt in prompts]
    assert (
        thoughts
        == {
            KeepThinking.ALL: [[False, False], [True, False], [True, True]],
            KeepThinking.LAST: [[False, False], [True, False], [False, True]],
            KeepThinking.NONE: [[False, False], [False, False], [False, False]],
        }[keep]
    )


@pytest.mark.parametrize("context", [ContextKind.FULL, ContextKind.WINDOW])
@pytest.mark.parametrize("keep", KeepThinking)
def test_each_answer_is_trained_once_behind_its_own_prompt(
    keep: KeepThinking, context: ContextKind
) -> None:
    got, _, prompts = played(keep, context=context)
    assert refusal_of_segments(got) == ""
    rows = as_rows(got)
    assert len(rows) == {KeepThinking.ALL: 1, KeepThinking.LAST: 2, KeepThinking.NONE: 3}[keep]
    learnt: list[int] = []
    answers = [each.token_ids for each in turns(THINKER, SAID)]
    for row in rows:
        mask = row.loss_mask.tolist()
        learnt += [
            i for i, is_learnt in zip(row.token_ids.tolist(), mask, strict=True) if is_learnt
        ]
        starts = [i + 1 for i, (a, b) in enumerate(pairwise(mask)) if b and not a]
        shown = [THINKER.shown(row.token_ids[:start].tolist()) for start in starts]
        assert set(shown) <= set(prompts), "an answer follows the prompt that sampled it"
    assert learnt == [i for each in answers for i in each]


@pytest.mark.parametrize("context", [ContextKind.FULL, ContextKind.WINDOW])
@pytest.mark.parametrize("keep", KeepThinking)
def test_critic_reads_the_end_at_the_form_of_the_next_prompt(
    keep: KeepThinking, context: ContextKind
) -> None:
    _, _, prompts = played(keep, context=context)
    for horizon in (1, 2):
        got, _, asked = played(keep, horizon=horizon, keeps_last=True, context=context)
        assert (got.num_turns, len(asked)) == (horizon, horizon)
        last = got.token_ids[got.segment_starts[-1] if got.segment_starts.size else 0 :]
        assert THINKER.shown(last.tolist()) == prompts[horizon]
        assert not got.loss_mask[-1]
        assert refusal_of_segments(got) == ""
        plain, _, _ = played(keep, horizon=horizon, context=context)
        rows = as_rows(got)
        assert sum(int(row.loss_mask.sum()) for row in rows) == int(plain.loss_mask.sum())
        assert all(row.loss_mask.any() for row in rows)


@pytest.mark.parametrize("keep", KeepThinking)
def test_window_with_room_drops_no_turn(keep: KeepThinking) -> None:
    _, _, prompts = played(keep, context=ContextKind.WINDOW, context_turns=1)
    assert prompts == played(keep)[2]


def test_end_that_does_not_fit_is_cut_behind_answers_without_thoughts() -> None:
    keep = KeepThinking.NONE
    whole, _, _ = played(keep, horizon=1, keeps_last=True)
    last = whole.token_ids[whole.segment_starts[-1] :]
    text = "y" * 3_000
    got, _, _ = played(keep, keeps_last=True, text=text, max_tokens=len(last) + 60)
    assert (got.end_reason, got.num_turns) == (EndReason.CONTEXT_FULL, 1)
    shown = THINKER.shown(got.token_ids[got.segment_starts[-1] :].tolist())
    assert "Why a?" not in shown
    assert "[cut here: " in shown
    assert len(got.token_ids[got.segment_starts[-1] :]) <= len(last) + 60


def test_invalid_call_reaches_the_policy_as_a_reason() -> None:
    tool = {"name": "go", "description": "", "parameters": {"type": "object", "properties": {}}}
    render = ToolRenderer(tokenizer_of("qwen2_5"), env="x").of("house", [tool])
    call = '<tool_call>\n{"name": "NAME", "arguments": {}}\n</tool_call>'
    texts = [call.replace("NAME", "fly"), call[:-20], call.replace("NAME", "go")]
    session = Count([go_on(is_valid=False), go_on(is_valid=False), go_on()])
    prompts: list[list[int]] = []
    got = play(
        session,
        turns=turns(render, texts),
        prompts=prompts,
        render=render,
        max_tokens=2_000,
        turn_tokens=50,
        options=AgentOptions(format=AgentFormat.FUNCTION_CALL),
    )
    assert session.actions == [
        json.dumps({"tool": "fly", "arguments": {}}),  # The environment may offer it later.
        "",
        json.dumps({"tool": "go", "arguments": {}}),
    ]
    assert got.invalid_turns.tolist() == [True, True, False]
    assert not got.end_reason.is_infrastructure_failure
    whole = render.shown(prompts[-1])
    assert "no tool" not in whole
    assert "[invalid call: the call cannot be read: " in whole


def test_answer_without_a_call_is_a_valid_turn_and_two_calls_are_none() -> None:
    tool = {"name": "go", "description": "", "parameters": {"type": "object", "properties": {}}}
    render = ToolRenderer(tokenizer_of("qwen2_5"), env="x").of("house", [tool])
    call = '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>'
    session = Count([go_on(), go_on(is_valid=False), go_on(is_valid=False)])
    prompts: list[list[int]] = []
    got = play(
        session,
        turns=turns(render, ["It is {a}.", f"{call}\n{call}", "No."]),
        prompts=prompts,
        render=render,
        max_tokens=2_000,
        turn_tokens=80,
        options=AgentOptions(format=AgentFormat.FUNCTION_CALL),
    )
    assert session.actions == ["It is {a}.", "", "No."]
    assert got.invalid_turns.tolist() == [False, True, True]
    assert "invalid call" not in render.shown(prompts[1])
    asked = "<|im_start|>user\n"
    assert render.shown(prompts[1]).endswith(f"{asked}ab<|im_end|>\n<|im_start|>assistant\n")
    assert f"{asked}<tool_response>\n[invalid call" in render.shown(prompts[2])
    assert "[invalid call: the answer has 2 calls; give one]\nab" in render.shown(prompts[2])


def test_agent_receives_thoughts_apart_from_the_answer() -> None:
    policy = ByHeart(["Why?\n</think>\n\ngo left", "It is red."], renderer=THINKER)

    async def check() -> None:
        async with endpoint(policy) as at:
            body: dict[str, Any] = {"messages": [{"role": "user", "content": "Which way?"}]}
            status, reply = await at.post("/v1/chat/completions", body)
            assert status == 200
            message = reply["choices"][0]["message"]
            assert message == {
                "role": "assistant",
                "content": "go left",
                "reasoning_content": "Why?",
            }
            body["messages"] += [message, {"role": "user", "content": "And now?"}]
            status, reply = await at.post("/v1/chat/completions", body)
            assert at.tape.starts == [0]  # The agent's history is continued as it was sampled.
            status, reply = await at.post("/v1/completions", {"prompt": "The ball?"})
            assert reply["choices"][0]["text"] == "It is red."

    asyncio.run(check())


def test_dropped_thoughts_are_refused_beside_other_repetitions() -> None:
    for others, key in {
        "actor.context=summary": r"actor\.keep_thinking='none': must be all beside actor\.context",
        "actor.plan=true": r"actor\.keep_thinking='none': must be all beside actor\.plan",
        "algorithm.policy_loss=gspo": r"algorithm\.policy_loss='gspo': .*keep_thinking=none",
    }.items():
        with pytest.raises(ConfigError, match=key):
            load_config("quickstart", ["actor.keep_thinking=none", others])
