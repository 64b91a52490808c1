"""Anthropic's API of messages."""

from typing import Any

from actor.api.fields import read_call, read_text, read_tools
from actor.api.requests import (
    Api,
    ApiError,
    Event,
    Message,
    PolicyAnswer,
    PolicyRequest,
    arguments_text,
    as_model,
    check_fields,
    checked,
    invalid,
    read_items,
    read_limit,
    read_stop,
)
from common.text import valid_text

USED = {"messages", "system", "tools", "tool_choice", "stop_sequences", "max_tokens"}
HARMLESS: dict[str, tuple[Any, ...]] = {
    "thinking": (None, {"type": "disabled"}),
    **dict.fromkeys(("container", "context_management", "mcp_servers", "output_config"), (None,)),
    **dict.fromkeys(("output_format", "speed", "inference_geo", "diagnostics"), (None,)),
}
KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Return an error in this API's format. The code is a part of the message."""
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    details = {"type": kind, "message": f"{error.code}: {error.message}"}
    return {"type": "error", "error": details, "request_id": None}


def _read(body: dict[str, Any]) -> PolicyRequest:
    """Return a request body of this API as a request to the policy. Raises: ApiError."""
    check_fields(body, USED, HARMLESS)
    messages: list[Message] = []
    for number, each in enumerate(read_items(body, "messages", least=1)):
        messages += _messages(each, f"messages[{number}]")
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("disable_parallel_tool_use") is False:
        body = {**body, "tool_choice": {"type": choice.get("type")}}
    return PolicyRequest(
        messages=checked(messages, "messages"),
        instructions=read_text(body.get("system"), "system"),
        tools=read_tools(body, schema="input_schema"),
        max_tokens=read_limit(body, "max_tokens"),
        stop=read_stop(body, "stop_sequences"),
        body=body,
    )


def _messages(given: dict[str, Any], place: str) -> list[Message]:
    """Return one message as messages of a chat template. Each tool result is its own message."""
    role = given.get("role")
    content = given.get("content")
    if role not in ("user", "assistant"):
        raise invalid(f"{place}.role={role!r:.40}: must be user or assistant", "messages")
    place = f"{place}.content"
    if isinstance(content, str):
        return [{"role": role, "content": read_text(content, place)}]
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[Message] = []
    for number, each in enumerate(read_items({place: content}, place, least=1)):
        here = f"{place}[{number}]"
        match role, each.get("type"):
            case _, "text":
                texts.append(each)
            case "assistant", "tool_use":
                number = each.get("id")
                calls.append(read_call(each.get("name"), each.get("input"), here, number=number))
            case "user", "tool_result":
                text = read_text(each.get("content"), f"{here}.content")
                number = each.get("tool_use_id")
                said = {"tool_call_id": valid_text(number)} if isinstance(number, str) else {}
                results.append({"role": "tool", "content": text, **said})
            case _, kind:
                raise invalid(
                    f"{here}.type={kind!r:.40}: not allowed in a message of role {role}", "messages"
                )
    text = read_text(texts, place)
    if role == "assistant":
        return [{"role": role, "content": text, **({"tool_calls": calls} if calls else {})}]
    return [*results, *([{"role": role, "content": text}] if texts else [])]


def _reply(asked: PolicyRequest, answer: PolicyAnswer) -> dict[str, Any]:
    """Return an answer of the policy as a response body of this API."""
    content: list[dict[str, Any]] = []
    if answer.text or not answer.calls:
        content.append({"type": "text", "text": answer.text})
    for call, name, arguments in answer.named_calls("toolu"):
        content.append({"type": "tool_use", "id": call, "name": name, "input": arguments})
    ended = "stop_sequence" if answer.stop else "end_turn"
    head = {"id": f"msg_{answer.number}", "type": "message", "role": "assistant"}
    return {
        **{**head, "model": as_model(asked), "content": content},
        "stop_reason": answer.reason(calls="tool_use", stop=ended, length="max_tokens"),
        "stop_sequence": answer.stop,
        "usage": {"input_tokens": answer.num_prompt, "output_tokens": answer.num_sampled},
    }


def _events(_: PolicyRequest, reply: dict[str, Any]) -> list[Event]:
    """Return a response as the events of a stream."""
    begun = {**reply, "content": [], "stop_reason": None, "stop_sequence": None}
    begun["usage"] = {**reply["usage"], "output_tokens": 0}
    events: list[Event] = [("message_start", {"message": begun})]
    for index, block in enumerate(reply["content"]):
        if block["type"] == "text":
            bare = {**block, "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            bare = {**block, "input": {}}
            partial = arguments_text(block["input"])
            delta = {"type": "input_json_delta", "partial_json": partial}
        events.append(("content_block_start", {"index": index, "content_block": bare}))
        events.append(("content_block_delta", {"index": index, "delta": delta}))
        events.append(("content_block_stop", {"index": index}))
    ended = {name: reply[name] for name in ("stop_reason", "stop_sequence")}
    usage = {"output_tokens": reply["usage"]["output_tokens"]}
    events += [("message_delta", {"delta": ended, "usage": usage}), ("message_stop", {})]
    return [(name, {"type": name, **each}) for name, each in events]


MESSAGES_API = Api(read=_read, reply=_reply, events=_events)
