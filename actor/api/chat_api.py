"""OpenAI's APIs of chat completions and of completions."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from actor.api.fields import (
    THINKING_BLOCKS,
    freeform_input,
    freeform_names,
    read_call,
    read_text,
    read_thoughts,
    read_tools,
)
from actor.api.requests import (
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
    checked,
    invalid,
    log_ignored,
    now,
    read_items,
    read_limit,
    read_num_answers,
    read_stop,
    unsupported,
)
from actor.formats.renderer import RESULT_ID
from actor.formats.thoughts import FIELDS
from common.text import valid_text

ROLES = ("system", "developer", "user", "assistant", "tool")
HARMLESS: dict[str, tuple[Any, ...]] = {"logit_bias": ({},)}
CHAT: dict[str, tuple[Any, ...]] = {
    **HARMLESS,
    "top_logprobs": (0,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "chat_template_kwargs": ({},),
    **dict.fromkeys(("audio", "web_search_options"), ()),
}
CHAT_IGNORED: dict[str, str] = {
    **dict.fromkeys(("reasoning_effort", "verbosity"), EFFORT),
    "prediction": "the actor does not use it to sample faster",
    "parallel_tool_calls": ONE_CALL,
}
MESSAGE_FIELDS = {"role", "content", "tool_calls", RESULT_ID, THINKING_BLOCKS, *FIELDS}
# Fields of a message without effect on the prompt.
LABELS = {"name", "id", "index", "status", "type", "annotations", "cache_control", "metadata"}
LABELS |= {"provider_specific_fields", "reasoning_details"}
COMPLETION_FIELDS: dict[str, tuple[Any, ...]] = {
    **HARMLESS,
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}


def _read_chat(body: dict[str, Any]) -> PolicyRequest:
    """Return a chat request as a request to the policy. Raises: ApiError."""
    used = {"messages", "tools", "tool_choice", "stop", "max_tokens", "max_completion_tokens"}
    check_fields(body, used | {"n", "logprobs"}, CHAT, CHAT_IGNORED)
    has_logprobs = body.get("logprobs")
    if has_logprobs not in (None, False, True):
        raise invalid("logprobs: must be true or false", "logprobs")
    items = read_items(body, "messages", least=1)
    messages = [_message(each, f"messages[{i}]") for i, each in enumerate(items)]
    return PolicyRequest(
        messages=checked(messages, "messages"),
        tools=read_tools(body, schema="parameters", inner="function"),
        max_tokens=read_limit(body, "max_completion_tokens", "max_tokens"),
        stop=read_stop(body, "stop"),
        num_answers=read_num_answers(body),
        has_logprobs=bool(has_logprobs),
        body=body,
    )


def _message(raw: dict[str, Any], place: str) -> Message:
    """Return a message of a request as a message of a chat template. Raises: ApiError."""
    role = raw.get("role")
    if role not in ROLES:
        names = ", ".join(ROLES)
        raise invalid(f"{place}.role={role!r:.40}: must be one of {names}", "messages")
    if raw.get("tool_calls") and role != "assistant":
        raise invalid(f"{place}.tool_calls: only an assistant message has calls", "messages")
    if raw.get(RESULT_ID) and role != "tool":
        text = f"{place}.{RESULT_ID}: only a message of role tool is the result of a call"
        raise invalid(text, "messages")
    _check_message(raw, place)
    text = read_text(raw.get("content"), f"{place}.content")
    if raw.get("content") is None and role != "assistant":
        raise invalid(f"{place}.content: must be text", "messages")
    message: Message = {"role": "system" if role == "developer" else role, "content": text}
    if role == "tool" and (call := raw.get(RESULT_ID)) is not None:
        if not isinstance(call, str):
            raise invalid(f"{place}.{RESULT_ID}: must be text", "messages")
        message[RESULT_ID] = valid_text(call)
    if role == "assistant":
        message |= _answer_fields(raw, place)
    return message


def _check_message(raw: dict[str, Any], place: str) -> None:
    """Reject fields of a message that would change the prompt but are not shown in it.

    Raises: ApiError.
    """
    for name, value in raw.items():
        if name in MESSAGE_FIELDS or value in (None, "", [], {}):
            continue
        if name in LABELS:
            log_ignored(f"messages[].{name}", LABEL)
            continue
        if name == "function_call":
            raise unsupported("messages", f"{place}.{name}", "use tool_calls")
        raise ApiError(
            400, "unknown_parameter", f"Unknown parameter: {place}.{name:.80}", "messages"
        )


def _answer_fields(raw: dict[str, Any], place: str) -> Message:
    """Return thoughts and calls of an answer as fields of a message. Raises: ApiError."""
    answer: Message = {}
    if thoughts := read_thoughts(raw, place):
        answer[FIELDS[0]] = thoughts
    calls: list[Message] = []
    for number, call in enumerate(read_items(raw, "tool_calls")):
        here = f"{place}.tool_calls[{number}]"
        is_freeform = call.get("type") == "custom"
        function = call.get("custom" if is_freeform else "function")
        if not isinstance(function, dict):
            raise invalid(f"{here}.function: must be an object", "messages")
        name, arguments = function.get("name"), function.get("arguments")
        if is_freeform:
            arguments = {"input": function.get("input")}
        calls.append(read_call(name, arguments, here, number=call.get("id")))
    return {**answer, "tool_calls": calls} if calls else answer


def _read_completion(body: dict[str, Any]) -> PolicyRequest:
    """Return a completion request as a request to the policy. Raises: ApiError."""
    check_fields(body, {"prompt", "stop", "max_tokens", "n", "logprobs"}, COMPLETION_FIELDS)
    num_top = body.get("logprobs")
    if num_top is not None and (type(num_top) is not int or num_top != 0):
        raise unsupported("logprobs", num_top, "0 reports the sampled tokens, without others")
    return PolicyRequest(
        prompt=_prompt(body.get("prompt")),
        max_tokens=read_limit(body, "max_tokens"),
        stop=read_stop(body, "stop"),
        num_answers=read_num_answers(body),
        has_logprobs=num_top is not None,
        body=body,
    )


def _prompt(prompt: object) -> str | list[int]:
    """Return the prompt of a completion request: text or token ids. Raises: ApiError."""
    if isinstance(prompt, str) and prompt:
        return valid_text(prompt)
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    raise invalid("prompt: must be a text or a list of token ids", "prompt")


def _chat_choice(asked: PolicyRequest, answer: PolicyAnswer) -> dict[str, Any]:
    """Return an answer of the policy as a choice of a chat completion."""
    freeform = freeform_names(asked)
    calls: list[dict[str, Any]] = []
    for number, name, arguments in answer.named_calls("call"):
        if name in freeform:
            shown = {"name": name, "input": freeform_input(arguments)}
            calls.append({"id": number, "type": "custom", "custom": shown})
        else:
            shown = {"name": name, "arguments": arguments_text(arguments)}
            calls.append({"id": number, "type": "function", "function": shown})
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.thoughts:
        message[FIELDS[0]] = answer.thoughts
    if calls:
        message |= {"content": answer.text or None, "tool_calls": calls}
    entries = [token.entry() for token in answer.logprobs]
    logprobs = {"content": entries, "refusal": None} if asked.has_logprobs else None
    return {"message": message, "logprobs": logprobs}


def _completion_choice(asked: PolicyRequest, answer: PolicyAnswer) -> dict[str, Any]:
    """Return an answer of the policy as a choice of a completion."""
    logprobs = None
    if asked.has_logprobs:
        lengths = [len(token.text) for token in answer.logprobs]
        logprobs = {
            "tokens": [token.text for token in answer.logprobs],
            "token_logprobs": [token.logprob for token in answer.logprobs],
            "top_logprobs": None,
            "text_offset": [sum(lengths[:number]) for number in range(len(lengths))],
        }
    return {"text": answer.text, "logprobs": logprobs}


def _reply_chat(asked: PolicyRequest, answers: Sequence[PolicyAnswer]) -> dict[str, Any]:
    """Return answers of the policy as a chat completion."""
    choices = [_chat_choice(asked, answer) for answer in answers]
    return _reply(asked, answers, "chat.completion", "chatcmpl", choices)


def _reply_completion(asked: PolicyRequest, answers: Sequence[PolicyAnswer]) -> dict[str, Any]:
    """Return answers of the policy as a completion."""
    choices = [_completion_choice(asked, answer) for answer in answers]
    return _reply(asked, answers, "text_completion", "cmpl", choices)


def _reply(
    asked: PolicyRequest,
    answers: Sequence[PolicyAnswer],
    kind: str,
    prefix: str,
    choices: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return the response body that both APIs share, with one choice for each answer."""
    ended = [each.reason(calls="tool_calls", stop="stop", length="length") for each in answers]
    numbered = [
        {"index": index, **choice, "finish_reason": reason}
        for index, (choice, reason) in enumerate(zip(choices, ended, strict=True))
    ]
    num_prompt = answers[0].num_prompt
    num_sampled = sum(answer.num_sampled for answer in answers)
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }
    name = f"{prefix}-{answers[0].number}"
    head = {"id": name, "object": kind, "created": now(), "model": as_model(asked)}
    return {**head, "choices": numbered, "usage": usage}


def _chat_events(asked: PolicyRequest, reply: dict[str, Any]) -> list[Event]:
    """Return a chat completion as the events of a stream."""
    parts = [part for choice in reply["choices"] for part in _deltas(choice)]
    return _chunks(asked, {**reply, "object": "chat.completion.chunk"}, parts)


def _deltas(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a stream that together are one choice."""
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if message.get(FIELDS[0]):
        deltas.append({FIELDS[0]: message[FIELDS[0]]})
    if message["content"]:
        deltas.append({"content": message["content"]})
    for number, call in enumerate(message.get("tool_calls", [])):
        deltas.append({"tool_calls": [{"index": number, **call}]})
    index = choice["index"]
    parts: list[dict[str, Any]] = []
    for delta in deltas:
        parts.append({"index": index, "delta": delta, "finish_reason": None})
    parts[-1]["logprobs"] = choice["logprobs"]
    return [*parts, {"index": index, "delta": {}, "finish_reason": choice["finish_reason"]}]


def _completion_events(asked: PolicyRequest, reply: dict[str, Any]) -> list[Event]:
    """Return a completion as the events of a stream."""
    return _chunks(asked, reply, reply["choices"])


def _chunks(
    asked: PolicyRequest, reply: dict[str, Any], parts: list[dict[str, Any]]
) -> list[Event]:
    """Return a response as the events of a stream, one event for each part of a choice."""
    choices = [[{"index": 0, "logprobs": None, **part}] for part in parts]
    events: list[Event] = [("", {**reply, "choices": each, "usage": None}) for each in choices]
    options = asked.body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        events.append(("", {**reply, "choices": []}))
    return [*events, ("", {})]  # The last event is [DONE].


def _excess(error: ContextExceeded, *, shown: str, answer: str, remedy: str) -> ApiError:
    """Return the error of OpenAI's API for a prompt that is too long."""
    total = error.num_prompt + error.num_answer
    text = (
        f"This model's maximum context length is {error.max_tokens} tokens. However, you requested"
        f" {total} tokens ({error.num_prompt} in {shown}, {error.num_answer} {answer})."
        f" Please reduce {remedy}."
    )
    return error.worded(text, "messages" if "messages" in shown else "prompt")


CHAT_API = Api(
    read=_read_chat,
    reply=_reply_chat,
    events=_chat_events,
    excess=partial(
        _excess,
        shown="the messages",
        answer="in the completion",
        remedy="the length of the messages or completion",
    ),
)
COMPLETION_API = Api(
    read=_read_completion,
    reply=_reply_completion,
    events=_completion_events,
    excess=partial(
        _excess,
        shown="your prompt",
        answer="for the completion",
        remedy="your prompt; or completion length",
    ),
)
