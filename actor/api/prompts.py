"""Encodes the messages of a request, and cuts a sampled answer where the request limits it."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actor.api.requests import ApiError, Message, PolicyRequest, TokenLogprob, invalid, log_ignored
from actor.formats.renderer import RESULT_ID, Renderer, in_order
from actor.formats.thoughts import FIELDS

THOUGHTS = FIELDS[0]


def matched(asked: PolicyRequest) -> PolicyRequest:
    """Return the request with each tool result in the order of its call.

    The ids of calls are removed, because sampled calls have none.

    Raises: ApiError: a result has the id of no call of the answer before it.
    """
    messages: list[Message] = []
    calls: list[Message] = []  # Calls of the latest answer.
    results: list[Message] = []  # Its results so far.
    for message in (*asked.messages, None):
        if message is not None and message["role"] == "tool":
            results.append(message)
            continue
        try:
            messages += in_order(results, calls)
        except ValueError as error:
            raise invalid(f"messages: {error}", "messages") from error
        if not calls and (lone := next(filter(None, map(_id_of, results)), "")):
            text = f"messages: {RESULT_ID}={lone!r:.80}: the answer before it has no calls"
            raise invalid(text, "messages")
        results = []
        if message is not None:
            if message["role"] == "assistant":
                calls = message.get("tool_calls") or []
            messages.append(_without_ids(message))
    return replace(asked, messages=messages)


def _id_of(result: Message) -> str:
    """Return the id of the call that a result names, "" for none."""
    return str(result.get(RESULT_ID) or "")


def _without_ids(message: Message) -> Message:
    """Return a message whose calls have no ids."""
    calls: list[dict[str, Any]] = message.get("tool_calls") or []
    if not calls:
        return message
    bare = [{name: value for name, value in each.items() if name != "id"} for each in calls]
    return {**message, "tool_calls": bare}


def log_hidden_thoughts(renderer: Renderer, asked: PolicyRequest) -> None:
    """Log that the prompt has no thoughts of the history, if the chat template shows none."""
    if not renderer.thoughts.field and any(message.get(THOUGHTS) for message in asked.messages):
        log_ignored(f"messages[].{THOUGHTS}", "the chat template shows no thoughts of a history")


def continued(
    asked: PolicyRequest, earlier: Sequence[Message], thoughts: Mapping[int, str]
) -> PolicyRequest | None:
    """Return a request whose messages continue a conversation, None if they do not.

    An agent may return the thoughts of a sampled answer or leave them out. In both cases the answer
    stays as it was sampled. The new messages may have answers, too.

    Args:
        earlier: the conversation.
        thoughts: place of a sampled answer in it -> its thoughts.
    """
    new = asked.messages[len(earlier) :]
    if not earlier or not new or new[0]["role"] == "assistant":
        return None
    for number, (message, old) in enumerate(zip(asked.messages, earlier, strict=False)):
        if message != old and _without(message, thoughts.get(number)) != old:
            return None
    return replace(asked, messages=[*earlier, *new])


def _without(message: Message, thoughts: str | None) -> Message:
    """Return a message without the thoughts that the policy has sampled."""
    if message.get(THOUGHTS, "") != thoughts:
        return message
    return {name: value for name, value in message.items() if name != THOUGHTS}


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
    lengths = [first_with(decode, ids, text) for text in asked.stop]
    num = min((n for n in lengths if n is not None), default=len(ids))
    if asked.max_tokens is not None and asked.max_tokens < num:
        return AnswerCut(num_tokens=asked.max_tokens, stop=None)
    text = decode(ids[:num])
    ending = [stop for stop in asked.stop if stop in text]
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
    if asked.prompt is not None:
        plain = renderer.plain_text(ids)
        return (plain if stop is None else plain.partition(stop)[0]).strip(), []
    if asked.tools:
        return renderer.read_answer(ids, asked.tools, stop=stop)
    text = renderer.action_text(ids)
    return (text if stop is None else text.partition(stop)[0].strip()), []


def thoughts_of(renderer: Renderer, ids: list[int], asked: PolicyRequest) -> str:
    """Return the thoughts of an answer, "" for the answer to a bare prompt."""
    return "" if asked.prompt is not None else renderer.thought_text(ids)


def logprobs_of(
    renderer: Renderer, ids: list[int], logprobs: Sequence[float], asked: PolicyRequest
) -> list[TokenLogprob]:
    """Return the sampled tokens of an answer with their logprobs; [] if the request wants none."""
    if not asked.has_logprobs:
        return []
    pairs = zip(ids, logprobs, strict=True)
    return [TokenLogprob(text=renderer.shown([each]), logprob=value) for each, value in pairs]
