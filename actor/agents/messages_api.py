"""Anthropic's API of messages."""

from collections.abc import Sequence
from typing import Any

from actor.api.fields import read_call, read_text, read_tools
from actor.api.requests import (
    CLEARING,
    CONTEXT_EXCEEDED,
    EFFORT,
    LABEL,
    ONE_CALL,
    AnswerHead,
    AnswerPart,
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
    log_ignored,
    read_items,
    read_limit,
    read_stop,
    unsupported,
)
from actor.formats.thoughts import FIELDS
from common.text import valid_text

USED = {"messages", "system", "tools", "tool_choice", "stop_sequences", "max_tokens"}
USED |= {"thinking", "output_config"}
HARMLESS: dict[str, tuple[Any, ...]] = {
    "mcp_servers": ([],),
    **dict.fromkeys(("container", "compaction", "thread", "output_format"), ()),
}
IGNORED: dict[str, str] = {
    "context_management": CLEARING,
    "fallbacks": "no other model answers here",
    **dict.fromkeys(("betas", "billing_policy", "diagnostics", "fallback_credit_token"), LABEL),
    **dict.fromkeys(("inference_geo", "user_profile_id", "workspace_id"), LABEL),
    "speed": EFFORT,
}
# The fields `type` of `thinking`. All of them set the effort.
THINKING = ("adaptive", "between_tools", "disabled", "enabled")
EFFORTS: dict[str, str] = dict.fromkeys(("effort", "task_budget"), EFFORT)
CALL_LABELS: dict[str, str] = dict.fromkeys(("caller", "toolset_name"), LABEL)
RESULT_LABELS = {"is_error": "chat templates have no mark of a failed call", "toolset_name": LABEL}
KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Return an error in this API's format. The code is a part of the message."""
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    is_excess = error.code == CONTEXT_EXCEEDED  # Clients recognise it by the begin of its text.
    message = error.message if is_excess else f"{error.code}: {error.message}"
    details = {"type": kind, "message": message}
    return {"type": "error", "error": details, "request_id": None}


def _read(body: dict[str, Any]) -> PolicyRequest:
    """Return a request body of this API as a request to the policy. Raises: ApiError."""
    check_fields(body, USED, HARMLESS, IGNORED)
    _check_effort(body)
    messages: list[Message] = []
    for number, message in enumerate(read_items(body, "messages", least=1)):
        messages += _messages(message, f"messages[{number}]")
    if not any(message["role"] == "user" or message["role"] == "tool" for message in messages):
        raise invalid("messages: must have a message of the user", "messages")
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and "disable_parallel_tool_use" in choice:
        if choice["disable_parallel_tool_use"]:
            log_ignored("tool_choice.disable_parallel_tool_use", ONE_CALL)
        choice = {k: v for k, v in choice.items() if k != "disable_parallel_tool_use"}
        body = {**body, "tool_choice": choice}
    return PolicyRequest(
        messages=checked(messages, "messages"),
        instructions=read_text(body.get("system"), "system"),
        tools=read_tools(body, schema="input_schema"),
        max_tokens=read_limit(body, "max_tokens"),
        stop=read_stop(body, "stop_sequences"),
        body=body,
    )


def _check_effort(body: dict[str, Any]) -> None:
    """Check the fields that set the effort and the form of an answer. Raises: ApiError."""
    thinking, output = body.get("thinking"), body.get("output_config") or {}
    if thinking is not None:
        kind = thinking.get("type") if isinstance(thinking, dict) else None
        if kind not in THINKING:
            raise unsupported("thinking", thinking, f"its type must be {' or '.join(THINKING)}")
        if kind == "enabled" and type(thinking.get("budget_tokens")) is not int:
            raise unsupported("thinking", thinking, "it lacks budget_tokens")
        if kind != "disabled":
            log_ignored(f"thinking.type={kind}", EFFORT)
    if not isinstance(output, dict):
        raise invalid("output_config: must be an object", "output_config")
    check_part(output, "output_config", set(), ignored=EFFORTS, refused={"format": ()})


def _messages(message: dict[str, Any], place: str) -> list[Message]:
    """Return one message as messages of a chat template. Each tool result is its own message."""
    role = message.get("role")
    content = message.get("content")
    if role not in ("user", "assistant", "system"):
        text = f"{place}.role={role!r:.40}: must be user, assistant or system"
        raise invalid(text, "messages")
    check_part(message, place, {"role", "content"})
    place = f"{place}.content"
    if isinstance(content, str):
        return [{"role": role, "content": read_text(content, place)}]
    texts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[Message] = []
    for number, block in enumerate(read_items({place: content}, place, least=1)):
        here = f"{place}[{number}]"
        match role, block.get("type"):
            case _, "text":
                texts.append(block)
            case "assistant", "thinking":
                check_part(block, here, {"thinking"}, ignored={"signature": LABEL})
                thoughts.append(read_text(block.get("thinking"), f"{here}.thinking"))
            case "assistant", "tool_use":
                check_part(block, here, {"id", "name", "input"}, ignored=CALL_LABELS)
                name, arguments = block.get("name"), block.get("input")
                calls.append(read_call(name, arguments, here, number=block.get("id")))
            case "user", "tool_result":
                check_part(block, here, {"content", "tool_use_id"}, ignored=RESULT_LABELS)
                text = read_text(block.get("content"), f"{here}.content")
                call = block.get("tool_use_id")
                named = {"tool_call_id": valid_text(call)} if isinstance(call, str) else {}
                results.append({"role": "tool", "content": text, **named})
            case _, kind:
                raise invalid(
                    f"{here}.type={kind!r:.40}: not allowed in a message of role {role}", "messages"
                )
    text = read_text(texts, place)
    if role == "assistant":
        answer: Message = {"role": role, "content": text}
        answer |= {FIELDS[0]: "".join(thoughts)} if any(thoughts) else {}
        return [answer | ({"tool_calls": calls} if calls else {})]
    return [*results, *([{"role": role, "content": text}] if texts else [])]


def _message_head(asked: PolicyRequest, number: str) -> dict[str, Any]:
    """Return the fields of a response that exist before its answer."""
    head = {"id": f"msg_{number}", "type": "message", "role": "assistant"}
    return {**head, "model": as_model(asked)}


def _reply(asked: PolicyRequest, answers: Sequence[PolicyAnswer]) -> dict[str, Any]:
    """Return the answer of the policy as a response body of this API."""
    (answer,) = answers
    content: list[dict[str, Any]] = []
    if answer.text or not answer.calls:
        content.append({"type": "text", "text": answer.text})
    for call, name, arguments in answer.named_calls("toolu"):
        content.append({"type": "tool_use", "id": call, "name": name, "input": arguments})
    ended = "stop_sequence" if answer.stop else "end_turn"
    return {
        **{**_message_head(asked, answer.number), "content": content},
        "stop_reason": answer.reason(calls="tool_use", stop=ended, length="max_tokens"),
        "stop_sequence": answer.stop,
        "usage": {"input_tokens": answer.num_prompt, "output_tokens": answer.num_sampled},
    }


class _MessageWriter:
    """Writes an answer as the stream of this API: a block of text, then its calls."""

    def __init__(self, asked: PolicyRequest, heads: Sequence[AnswerHead]) -> None:
        self._asked = asked
        (self._head,) = heads
        self._num_text: int | None = None  # Characters of the text that were sent; None: no block.

    def begin(self) -> list[Event]:
        message = {
            **_message_head(self._asked, self._head.number),
            **{"content": [], "stop_reason": None, "stop_sequence": None},
            "usage": {"input_tokens": self._head.num_prompt, "output_tokens": 0},
        }
        return [_event("message_start", message=message)]

    def add(self, index: int, part: AnswerPart) -> list[Event]:
        return self._text(part.text) if part.text else []

    def end(self, answers: Sequence[PolicyAnswer]) -> list[Event]:
        (answer,) = answers
        reply = _reply(self._asked, answers)
        events: list[Event] = []
        for index, block in enumerate(reply["content"]):
            if block["type"] == "text":
                events += self._text(answer.text[self._num_text or 0 :])
            else:
                bare = {**block, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": arguments_text(block["input"])}
                events.append(_event("content_block_start", index=index, content_block=bare))
                events.append(_event("content_block_delta", index=index, delta=delta))
            events.append(_event("content_block_stop", index=index))
        ended = {name: reply[name] for name in ("stop_reason", "stop_sequence")}
        usage = {"output_tokens": reply["usage"]["output_tokens"]}
        events.append(_event("message_delta", delta=ended, usage=usage))
        return [*events, _event("message_stop")]

    def fail(self, error: ApiError) -> list[Event]:
        return [("error", anthropic_error(error))]

    def _text(self, text: str) -> list[Event]:
        """Return the events of a further text of the first block."""
        events: list[Event] = []
        if self._num_text is None:
            self._num_text = 0
            block = {"type": "text", "text": ""}
            events.append(_event("content_block_start", index=0, content_block=block))
        elif not text:
            return []
        self._num_text += len(text)
        delta = {"type": "text_delta", "text": text}
        return [*events, _event("content_block_delta", index=0, delta=delta)]


def _event(name: str, /, **fields: Any) -> Event:
    """Return an event of this API, whose payload has its name."""
    return name, {"type": name, **fields}


def _excess(error: ContextExceeded) -> ApiError:
    """Return the error of this API for a prompt that is too long."""
    if error.num_prompt > error.max_tokens:
        text = f"prompt is too long: {error.num_prompt} tokens > {error.max_tokens} maximum"
    else:
        text = (
            f"input length and `max_tokens` exceed context limit: {error.num_prompt} +"
            f" {error.num_answer} > {error.max_tokens}, decrease input length or `max_tokens` and"
            " try again"
        )
    return error.worded(text, "messages")


MESSAGES_API = Api(read=_read, reply=_reply, writer=_MessageWriter, excess=_excess)
