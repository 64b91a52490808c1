"""Encodes the messages of a request, and cuts a sampled answer where the request limits it."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from actor.api.requests import ApiError, Message, PolicyRequest, invalid
from actor.formats.renderer import Renderer
from actor.formats.thoughts import FIELDS


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCut:
    """The part of a sampled answer that a request takes."""

    num_tokens: int
    stop: str | None  # The text of `PolicyRequest.stop` that ended the answer.


def check_tools(renderer: Renderer, asked: PolicyRequest) -> None:
    """Check that the chat template has what a request needs for tools. Raises: ApiError."""
    has_calls = any(each.get("tool_calls") for each in asked.messages)
    needs_tools = asked.tools or has_calls or any(m["role"] == "tool" for m in asked.messages)
    if needs_tools and isinstance(why := renderer.calls, str):
        raise ApiError(400, "unsupported_parameter", f"tools: {why}", "tools")


def encode_messages(
    renderer: Renderer, messages: list[Message], *, tools: Sequence[dict[str, Any]]
) -> list[int]:
    """Return the token ids of a conversation, up to the start of the assistant's turn.

    A conversation in which user and assistant alternate without thoughts is encoded as an episode
    is.

    Raises: ApiError: the chat template refuses the conversation.
    """
    roles = [each["role"] for each in messages]
    has_more = any(each.get("tool_calls") or each.get(FIELDS[0]) for each in messages)
    alternates = roles == ["user", *["assistant", "user"] * (len(roles) // 2)]
    try:
        if alternates and not tools and not has_more:
            return renderer.conversation([each["content"] for each in messages])
        return renderer.of_messages(messages, tools=tools)
    except ValueError as error:
        raise invalid(str(error), "messages") from error


def cut_answer(
    decode: Callable[[list[int]], str], ids: list[int], asked: PolicyRequest
) -> AnswerCut:
    """Return how much of an answer a request takes: its limit of tokens and its stop texts.

    The whole answer was sampled. Its start equals a shorter answer, up to the token that completes
    the stop text.
    """
    found = [first_with(decode, ids, text) for text in asked.stop]
    num = min((n for n in found if n is not None), default=len(ids))
    if asked.max_tokens is not None and asked.max_tokens < num:
        return AnswerCut(num_tokens=asked.max_tokens, stop=None)
    text = decode(ids[:num])
    ending = [each for each in asked.stop if each in text]
    return AnswerCut(num_tokens=num, stop=min(ending, key=text.find, default=None))


def first_with(decode: Callable[[list[int]], str], ids: list[int], text: str) -> int | None:
    """Return the smallest number of tokens whose text contains `text`; None: none does."""
    if text not in decode(ids):
        return None
    return bisect_left(range(len(ids)), True, key=lambda num: text in decode(ids[:num]))


def read_turn(
    renderer: Renderer, ids: list[int], asked: PolicyRequest, stop: str | None
) -> tuple[str, list[dict[str, Any]]]:
    """Return the text and the tool calls of an answer that was cut by `cut_answer`.

    Thoughts are no part of the text. To a bare prompt no template adds the start of thoughts, so
    that all text is the answer.
    """
    plain = renderer.plain_text(ids)
    plain = plain if stop is None else plain.partition(stop)[0]
    if asked.prompt is not None:
        return plain.strip(), []
    if stop is not None:
        return renderer.thoughts.text(plain).strip(), []
    if asked.tools:
        return renderer.read_answer(ids, asked.tools)
    return renderer.action_text(ids), []


def thoughts_of(renderer: Renderer, ids: list[int], asked: PolicyRequest) -> str:
    """Return the thoughts of an answer, "" for the answer to a bare prompt."""
    return "" if asked.prompt is not None else renderer.thought_text(ids)
