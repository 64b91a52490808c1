"""Laws of notes and observations in rewritten contexts: they have the name of the called tool."""

import asyncio

import pytest

from actor.rollout.context import History, Room, Turn
from actor.rollout.folding import CLOSED, ENDED, OPENED, Folding
from common.config.actor import AgentOptions, ContextKind
from tests.actor.formats.test_call_shapes import NAMED, of_tools, turn_of

ASKED = "<|end|><|start|>assistant<|message|>"
RENDER = of_tools(NAMED)


def looking(text: str) -> Turn:
    call = f'{{"name": "look", "arguments": {{"at": "{text}"}}}}'
    return turn_of(RENDER, f"<tool_call>{call}</tool_call><|end|>")


async def never() -> Turn:
    raise AssertionError


def room(kind: ContextKind, max_tokens: int = 2000) -> Room:
    options = AgentOptions(context=kind, branch_turns=2)
    return Room(max_tokens=max_tokens, turn_tokens=100, options=options)


def shown(history: History) -> str:
    return RENDER.shown(history.tape.context)


@pytest.mark.parametrize("kind", [ContextKind.FOLD, ContextKind.SUBAGENT])
@pytest.mark.parametrize("has_return", [True, False])
def test_notes_of_a_branch_have_the_called_tool(kind: ContextKind, has_return: bool) -> None:
    history = Folding(RENDER, room(kind))
    opening = looking("<branch>x</branch>")
    closing = looking("<return>x</return>")

    async def play() -> None:
        await history.begin("Which way?", RENDER.first_prompt, never)
        history.tape.add(opening, 0)
        assert history.takes("<branch>x</branch>", opening, 0)
        assert shown(history).endswith(f"tool look<|message|>{OPENED}{ASKED}")
        for number in range(2 - has_return):
            step = looking("door")
            history.tape.add(step, number)
            assert await history.go_on("a wall", step, number + 1, never)
        if has_return:
            history.tape.add(closing, 1)
            assert history.takes("<return>x</return>", closing, 1)

    asyncio.run(play())
    note = f"{CLOSED}{ASKED}{RENDER.shown(closing.token_ids)}" if has_return else ENDED
    after = "<|start|>tool look<|message|>" if has_return else ""
    call = RENDER.shown(opening.token_ids)
    end = f"{call}<|start|>tool look<|message|>{note}{after}a wall{ASKED}"
    assert shown(history).endswith(end)


@pytest.mark.parametrize("kind", [ContextKind.WINDOW, ContextKind.SUMMARY])
def test_rewritten_context_shows_the_called_tool(kind: ContextKind) -> None:
    history = History(RENDER, room(kind, max_tokens=2000))
    taken = looking("door")

    async def sum_up() -> Turn:
        return turn_of(RENDER, "A door.<|end|>")

    async def play() -> None:
        await history.begin("Which way?", RENDER.first_prompt, never)
        for number in range(30):
            history.tape.add(taken, number)
            assert await history.go_on("a wall " * 30, taken, number + 1, sum_up)
            if len(history.tape.starts) > 1:
                return

    asyncio.run(play())
    assert len(history.tape.starts) == 2
    assert "tool look<|message|>a wall" in shown(history)
