"""Joins the parts of an agent's history that belong together: calls with results, and thoughts."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from actor.api.requests import Message, PolicyRequest, invalid
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


def check_thoughts(renderer: Renderer, asked: PolicyRequest, own: Collection[str] = ()) -> None:
    """Check that the chat template shows the thoughts in a history.

    Args:
        own: thoughts that the policy has sampled. An agent may return them in any case.

    Raises: ApiError.
    """
    if renderer.thoughts.field:
        return
    for number, each in enumerate(asked.messages):
        if each.get(THOUGHTS) and each[THOUGHTS] not in own:
            raise invalid(
                f"messages[{number}].{THOUGHTS}: the chat template shows no thoughts of earlier"
                " answers; remove the field, or give a template that shows it"
                " (model.chat_template)",
                "messages",
            )


def continued(
    asked: PolicyRequest, earlier: Sequence[Message], thoughts: Mapping[int, str]
) -> PolicyRequest | None:
    """Return a request whose messages continue a conversation, None if they do not.

    An agent may return the thoughts of a sampled answer or leave them out. In both cases the answer
    stays as it was sampled.

    Args:
        earlier: the conversation.
        thoughts: place of a sampled answer in it -> its thoughts.
    """
    new = asked.messages[len(earlier) :]
    if not earlier or not new or any(each["role"] == "assistant" for each in new):
        return None
    for number, (each, own) in enumerate(zip(asked.messages, earlier, strict=False)):
        if each != own and _without(each, thoughts.get(number)) != own:
            return None
    return replace(asked, messages=[*earlier, *new])


def _without(message: Message, thoughts: str | None) -> Message:
    """Return a message without the thoughts that the policy has sampled."""
    if message.get(THOUGHTS, "") != thoughts:
        return message
    return {name: value for name, value in message.items() if name != THOUGHTS}
