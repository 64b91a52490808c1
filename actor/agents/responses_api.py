"""OpenAI's API of responses."""

import secrets
from collections.abc import Sequence
from typing import Any

from actor.api.fields import (
    freeform_input,
    freeform_names,
    namespace_of,
    read_call,
    read_text,
    read_tools,
)
from actor.api.requests import (
    CLEARING,
    EFFORT,
    LABEL,
    ONE_CALL,
    Api,
    ApiError,
    ContextExceeded,
    Event,
    Message,
    PolicyAnswer,
    PolicyRequest,
    arguments_text,
    as_model,
    check_fields,
    check_part,
    checked,
    invalid,
    joined,
    log_ignored,
    now,
    read_items,
    read_limit,
)
from common.text import valid_text

ROLES = ("system", "developer", "user", "assistant")
PARTS = ("input_text", "output_text", "text")
LOGPROBS = "message.output_text.logprobs"
USED = {"input", "instructions", "previous_response_id", "tools", "tool_choice"}
USED |= {"max_output_tokens", "include", "text"}
HARMLESS: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "parallel_tool_calls": (True,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    **dict.fromkeys(("conversation", "prompt", "image", "access_programs"), ()),
}
IGNORED: dict[str, str] = {
    "reasoning": EFFORT,
    "context_management": CLEARING,
    "truncation": CLEARING,
    "max_tool_calls": "the actor runs no tools itself",
    "parallel_tool_calls": ONE_CALL,
}
LABELS: dict[str, str] = dict.fromkeys(("id", "status", "phase", "caller", "namespace"), LABEL)


def _read(body: dict[str, Any]) -> PolicyRequest:
    """Return a request body of this API as a request to the policy. Raises: ApiError."""
    check_fields(body, USED, HARMLESS, IGNORED)
    _check_reports(body)
    previous = body.get("previous_response_id") or ""
    for name in ("instructions", "previous_response_id"):
        if not isinstance(body.get(name) or "", str):
            raise invalid(f"{name}: must be text", name)
    content = body.get("input")
    if isinstance(content, str):
        messages: list[Message] = [{"role": "user", "content": valid_text(content)}]
    else:
        items = read_items(body, "input", least=1)
        read = [_message(item, f"input[{i}]") for i, item in enumerate(items)]
        messages = joined([item for item in read if item is not None])
    return PolicyRequest(
        messages=checked(messages, "input"),
        instructions=valid_text(body.get("instructions") or ""),
        previous=previous,
        tools=read_tools(body, schema="parameters"),
        max_tokens=read_limit(body, "max_output_tokens"),
        is_kept=True,
        has_logprobs=LOGPROBS in (body.get("include") or []),
        body=body,
    )


def _check_reports(body: dict[str, Any]) -> None:
    """Check the form of the answer, and the reports on it. Raises: ApiError."""
    text, reports = body.get("text") or {}, body.get("include") or []
    if not isinstance(text, dict):
        raise invalid("text: must be an object", "text")
    check_part(
        text, "text", set(), ignored={"verbosity": EFFORT}, refused={"format": ({"type": "text"},)}
    )
    if not isinstance(reports, list):
        raise invalid("include: must be a list", "include")
    if set(map(str, reports)) - {LOGPROBS}:
        log_ignored("include", "the answer has no such reports")


def _message(item: dict[str, Any], place: str) -> Message | None:
    """Return an input item as a message of a chat template; None: no template shows it.

    Raises: ApiError.
    """
    kind = item.get("type", "message")
    number = item.get("call_id")
    match kind:
        case "function_call":
            check_part(item, place, {"name", "arguments", "call_id"}, ignored=LABELS)
            call = read_call(item.get("name"), item.get("arguments"), place, number=number)
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case "custom_tool_call":
            check_part(item, place, {"name", "input", "call_id"}, ignored=LABELS)
            call = read_call(item.get("name"), {"input": item.get("input")}, place, number=number)
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case "function_call_output" | "custom_tool_call_output":
            check_part(item, place, {"output", "call_id", "name"}, ignored=LABELS)
            text = read_text(item.get("output"), f"{place}.output", kinds=PARTS)
            named = {"tool_call_id": valid_text(number)} if isinstance(number, str) else {}
            return {"role": "tool", "content": text, **named}
        case "message":
            check_part(item, place, {"role", "content"}, ignored=LABELS)
            role = item.get("role")
            if role not in ROLES:
                names = ", ".join(ROLES)
                raise invalid(f"{place}.role={role!r:.40}: must be one of {names}", "input")
            text = read_text(item.get("content"), f"{place}.content", kinds=PARTS)
            return {"role": "system" if role == "developer" else role, "content": text}
        case "reasoning":
            log_ignored("input[].type=reasoning", "no prompt shows the reasoning of other models")
            return None
        case _:
            names = "message, reasoning, function_call, custom_tool_call or one of their outputs"
            raise invalid(f"{place}.type={kind!r:.40}: must be {names}", "input")


def _reply(asked: PolicyRequest, answers: Sequence[PolicyAnswer]) -> dict[str, Any]:
    """Return the answer of the policy as a response body of this API."""
    (answer,) = answers
    state = answer.reason(calls="completed", stop="completed", length="incomplete")
    output: list[dict[str, Any]] = []
    if answer.text or not answer.calls:
        entries = [token.entry() for token in answer.logprobs]
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": entries}
        item = {"type": "message", "id": f"msg_{answer.number}", "role": "assistant"}
        output.append({**item, "status": state, "content": [part]})
    freeform, namespaces = freeform_names(asked), namespace_of(asked.body)
    for call, name, arguments in answer.named_calls("call"):
        head = {"id": f"fc_{call}", "call_id": call, "status": state, "name": name}
        if name in namespaces:
            head["namespace"] = namespaces[name]
        if name in freeform:
            item = {"type": "custom_tool_call", "input": freeform_input(arguments)}
        else:
            item = {"type": "function_call", "arguments": arguments_text(arguments)}
        output.append({**head, **item})
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
        empty: dict[str, Any] = {"content": []}
        if item["type"] != "message":
            name = "input" if item["type"] == "custom_tool_call" else "arguments"
            empty = {name: ""}
        bare = {**item, "status": "in_progress", **empty}
        events.append(("response.output_item.added", {**place, "item": bare}))
        if item["type"] == "message":
            events += _text_events(of_item, item["content"][0])
        elif item["type"] == "custom_tool_call":
            kind = "response.custom_tool_call_input"
            events.append((f"{kind}.delta", {**of_item, "delta": item["input"]}))
            events.append((f"{kind}.done", {**of_item, "input": item["input"]}))
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
        (f"{kind}.delta", {**of_part, "delta": text, "logprobs": part["logprobs"]}),
        (f"{kind}.done", {**of_part, "text": text, "logprobs": part["logprobs"]}),
        ("response.content_part.done", {**of_part, "part": part}),
    ]


def _excess(error: ContextExceeded) -> ApiError:
    """Return the error of this API for a prompt that is too long."""
    text = "Your input exceeds the context window of this model. Please adjust your input and"
    return error.worded(f"{text} try again. {error.reason}.", "input")


def _excess_events(asked: PolicyRequest, error: ApiError) -> list[Event]:
    """Return the events of a stream that fails, as this API reports a prompt that is too long."""
    number = f"resp_{secrets.token_hex(12)}"
    head = {"id": number, "object": "response", "created_at": now(), "model": as_model(asked)}
    begun = {**head, "status": "in_progress", "error": None, "output": [], "usage": None}
    begun |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    details = {"code": error.code, "message": error.message}
    events: list[Event] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
        ("response.failed", {"response": {**begun, "status": "failed", "error": details}}),
    ]
    return [(n, {"type": n, "sequence_number": i, **each}) for i, (n, each) in enumerate(events)]


RESPONSES_API = Api(
    read=_read, reply=_reply, events=_events, excess=_excess, excess_events=_excess_events
)
