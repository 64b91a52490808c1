"""OpenAI's API of responses."""

from typing import Any

from actor.api.fields import read_call, read_text, read_tools
from actor.api.requests import (
    Api,
    Event,
    Message,
    PolicyAnswer,
    PolicyRequest,
    arguments_text,
    as_model,
    check_fields,
    checked,
    invalid,
    joined,
    now,
    read_items,
    read_limit,
)
from common.text import valid_text

ROLES = ("system", "developer", "user", "assistant")
PARTS = ("input_text", "output_text", "text")
USED = {"input", "instructions", "previous_response_id", "tools", "tool_choice"}
HARMLESS: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "include": (None, []),
    "parallel_tool_calls": (None, True),
    "text": (None, {"format": {"type": "text"}}),
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
    **dict.fromkeys(("conversation", "context_management", "max_tool_calls", "prompt"), (None,)),
    **dict.fromkeys(("reasoning", "moderation", "image", "access_programs"), (None,)),
}


def _read(body: dict[str, Any]) -> PolicyRequest:
    """Return a request body of this API as a request to the policy. Raises: ApiError."""
    check_fields(body, {*USED, "max_output_tokens"}, HARMLESS)
    previous = body.get("previous_response_id") or ""
    for name in ("instructions", "previous_response_id"):
        if not isinstance(body.get(name) or "", str):
            raise invalid(f"{name}: must be text", name)
    given = body.get("input")
    if isinstance(given, str):
        messages: list[Message] = [{"role": "user", "content": valid_text(given)}]
    else:
        items = read_items(body, "input", least=1)
        messages = joined([_message(each, f"input[{i}]") for i, each in enumerate(items)])
    return PolicyRequest(
        messages=checked(messages, "input"),
        instructions=valid_text(body.get("instructions") or ""),
        previous=previous,
        tools=read_tools(body, schema="parameters"),
        max_tokens=read_limit(body, "max_output_tokens"),
        is_kept=True,
        body=body,
    )


def _message(given: dict[str, Any], place: str) -> Message:
    """Return an input item as a message of a chat template. Raises: ApiError."""
    match given.get("type", "message"):
        case "function_call":
            number = given.get("call_id")
            call = read_call(given.get("name"), given.get("arguments"), place, number=number)
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case "function_call_output":
            text = read_text(given.get("output"), f"{place}.output", kinds=PARTS)
            number = given.get("call_id")
            said = {"tool_call_id": valid_text(number)} if isinstance(number, str) else {}
            return {"role": "tool", "content": text, **said}
        case "message":
            role = given.get("role")
            if role not in ROLES:
                names = ", ".join(ROLES)
                raise invalid(f"{place}.role={role!r:.40}: must be one of {names}", "input")
            text = read_text(given.get("content"), f"{place}.content", kinds=PARTS)
            return {"role": "system" if role == "developer" else role, "content": text}
        case kind:
            known = "message, function_call or function_call_output"
            raise invalid(f"{place}.type={kind!r:.40}: must be {known}", "input")


def _reply(asked: PolicyRequest, answer: PolicyAnswer) -> dict[str, Any]:
    """Return an answer of the policy as a response body of this API."""
    state = answer.reason(calls="completed", stop="completed", length="incomplete")
    output: list[dict[str, Any]] = []
    if answer.text or not answer.calls:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        item = {"type": "message", "id": f"msg_{answer.number}", "role": "assistant"}
        output.append({**item, "status": state, "content": [part]})
    for call, name, given in answer.named_calls("call"):
        head = {"type": "function_call", "id": f"fc_{call}", "call_id": call, "status": state}
        output.append({**head, "name": name, "arguments": arguments_text(given)})
    usage = {
        "input_tokens": answer.num_prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.num_sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.num_prompt + answer.num_sampled,
    }
    is_cut = state == "incomplete"
    names = ("instructions", "max_output_tokens", "metadata", "previous_response_id")
    names += ("temperature", "top_p")
    return {
        **{name: asked.body.get(name) for name in names},
        **{"id": f"resp_{answer.number}", "object": "response", "created_at": now()},
        **{"status": state, "error": None, "model": as_model(asked)},
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        **{"output": output, "usage": usage, "parallel_tool_calls": True},
        "tools": asked.body.get("tools") or [],
        "tool_choice": asked.body.get("tool_choice") or "auto",
        "text": {"format": {"type": "text"}},
    }


def _events(_: PolicyRequest, reply: dict[str, Any]) -> list[Event]:
    """Return a response as the events of a stream."""
    begun = {**reply, "status": "in_progress", "output": [], "usage": None}
    begun["incomplete_details"] = None
    events: list[Event] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
    ]
    for index, item in enumerate(reply["output"]):
        place: dict[str, Any] = {"output_index": index}
        of_item = {**place, "item_id": item["id"]}
        is_text = item["type"] == "message"
        bare = {
            **item,
            "status": "in_progress",
            **({"content": []} if is_text else {"arguments": ""}),
        }
        events.append(("response.output_item.added", {**place, "item": bare}))
        if is_text:
            events += _text_events(of_item, item["content"][0])
        else:
            kind = "response.function_call_arguments"
            arguments = item["arguments"]
            events.append((f"{kind}.delta", {**of_item, "delta": arguments}))
            done = {"arguments": arguments, "name": item["name"]}
            events.append((f"{kind}.done", {**of_item, **done}))
        events.append(("response.output_item.done", {**place, "item": item}))
    events.append((f"response.{reply['status']}", {"response": reply}))
    return [(n, {"type": n, "sequence_number": i, **each}) for i, (n, each) in enumerate(events)]


def _text_events(of_item: dict[str, Any], part: dict[str, Any]) -> list[Event]:
    """Return the events of one text in a stream."""
    of_part = {**of_item, "content_index": 0}
    kind = "response.output_text"
    text = part["text"]
    return [
        ("response.content_part.added", {**of_part, "part": {**part, "text": ""}}),
        (f"{kind}.delta", {**of_part, "delta": text, "logprobs": []}),
        (f"{kind}.done", {**of_part, "text": text, "logprobs": []}),
        ("response.content_part.done", {**of_part, "part": part}),
    ]


RESPONSES_API = Api(read=_read, reply=_reply, events=_events)
