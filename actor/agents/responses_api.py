"""OpenAI's API of responses."""

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
    AnswerHead,
    AnswerPart,
    Api,
    ApiError,
    ContextExceeded,
    Event,
    Message,
    PolicyAnswer,
    PolicyRequest,
    TokenLogprob,
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
    return {
        **_response_head(asked, answer.number),
        "status": state,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        **{"output": output, "usage": usage},
    }


def _response_head(asked: PolicyRequest, number: str) -> dict[str, Any]:
    """Return a response in progress, without its answer."""
    names = ("instructions", "max_output_tokens", "metadata", "previous_response_id")
    names += ("temperature", "top_p")
    return {
        **{name: asked.body.get(name) for name in names},
        **{"id": f"resp_{number}", "object": "response", "created_at": now()},
        **{"status": "in_progress", "error": None, "model": as_model(asked)},
        **{"incomplete_details": None, "output": [], "usage": None, "parallel_tool_calls": True},
        "tools": asked.body.get("tools") or [],
        "tool_choice": asked.body.get("tool_choice") or "auto",
        "text": {"format": {"type": "text"}},
    }


class _ResponseWriter:
    """Writes an answer as the stream of this API: an item of text, then its calls."""

    def __init__(self, asked: PolicyRequest, heads: Sequence[AnswerHead]) -> None:
        self._asked = asked
        (head,) = heads
        self._begun = _response_head(asked, head.number)
        self._message = f"msg_{head.number}"
        self._num_events = 0
        self._num_text: int | None = None  # Characters of the text that were sent; None: no item.
        self._num_entries = 0
        self._waiting: list[TokenLogprob] = []  # Tokens without a text so far.

    def begin(self) -> list[Event]:
        names = ("response.created", "response.in_progress")
        return [self._event(name, response=self._begun) for name in names]

    def add(self, index: int, part: AnswerPart) -> list[Event]:
        self._waiting += part.logprobs
        return self._text(part.text, self._waiting) if part.text else []

    def end(self, answers: Sequence[PolicyAnswer]) -> list[Event]:
        (answer,) = answers
        reply = _reply(self._asked, answers)
        reply["created_at"] = self._begun["created_at"]
        events: list[Event] = []
        for index, item in enumerate(reply["output"]):
            if item["type"] == "message":
                events += self._text(
                    answer.text[self._num_text or 0 :], answer.logprobs[self._num_entries :]
                )
                events += self._text_end(item["content"][0])
            else:
                events += self._call(index, item)
            events.append(self._event("response.output_item.done", output_index=index, item=item))
        return [*events, self._event(f"response.{reply['status']}", response=reply)]

    def fail(self, error: ApiError) -> list[Event]:
        details = {"code": error.code, "message": error.message}
        failed = {**self._begun, "status": "failed", "error": details}
        return [self._event("response.failed", response=failed)]

    def _event(self, name: str, /, **fields: Any) -> Event:
        """Return the next event, with its number."""
        self._num_events += 1
        return name, {"type": name, "sequence_number": self._num_events - 1, **fields}

    def _text(self, text: str, logprobs: Sequence[TokenLogprob]) -> list[Event]:
        """Return the events of a further text of the answer."""
        events: list[Event] = []
        if self._num_text is None:
            self._num_text = 0
            item = {"type": "message", "id": self._message, "role": "assistant"}
            item |= {"status": "in_progress", "content": []}
            events.append(self._event("response.output_item.added", output_index=0, item=item))
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            events.append(self._of_text("response.content_part.added", part=part))
        elif not (text or logprobs):
            return []
        self._num_text += len(text)
        self._num_entries += len(logprobs)
        entries = [token.entry() for token in logprobs]
        self._waiting = []
        delta = self._of_text("response.output_text.delta", delta=text, logprobs=entries)
        return [*events, delta]

    def _text_end(self, part: dict[str, Any]) -> list[Event]:
        """Return the events of the end of the answer's text."""
        whole = {"text": part["text"], "logprobs": part["logprobs"]}
        return [
            self._of_text("response.output_text.done", **whole),
            self._of_text("response.content_part.done", part=part),
        ]

    def _of_text(self, name: str, /, **fields: Any) -> Event:
        """Return an event of the answer's text."""
        return self._event(name, output_index=0, item_id=self._message, content_index=0, **fields)

    def _call(self, index: int, item: dict[str, Any]) -> list[Event]:
        """Return the events of a call, up to the end of its item."""
        name = "input" if item["type"] == "custom_tool_call" else "arguments"
        kind = "custom_tool_call_input" if name == "input" else "function_call_arguments"
        bare = {**item, "status": "in_progress", name: ""}
        place = {"output_index": index, "item_id": item["id"]}
        done = {name: item[name]} if name == "input" else {name: item[name], "name": item["name"]}
        return [
            self._event("response.output_item.added", output_index=index, item=bare),
            self._event(f"response.{kind}.delta", **place, delta=item[name]),
            self._event(f"response.{kind}.done", **place, **done),
        ]


def _excess(error: ContextExceeded) -> ApiError:
    """Return the error of this API for a prompt that is too long."""
    text = "Your input exceeds the context window of this model. Please adjust your input and"
    return error.worded(f"{text} try again. {error.reason}.", "input")


RESPONSES_API = Api(
    read=_read, reply=_reply, writer=_ResponseWriter, excess=_excess, streams_excess=True
)
