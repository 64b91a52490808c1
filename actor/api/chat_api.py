"""OpenAI's APIs of chat completions and of completions."""

from collections.abc import Sequence
from dataclasses import dataclass
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
    checked,
    invalid,
    log_ignored,
    now,
    openai_error,
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


def _chat_calls(asked: PolicyRequest, answer: PolicyAnswer) -> list[dict[str, Any]]:
    """Return the calls of an answer as those of a chat completion."""
    freeform = freeform_names(asked)
    calls: list[dict[str, Any]] = []
    for number, name, arguments in answer.named_calls("call"):
        if name in freeform:
            shown = {"name": name, "input": freeform_input(arguments)}
            calls.append({"id": number, "type": "custom", "custom": shown})
        else:
            shown = {"name": name, "arguments": arguments_text(arguments)}
            calls.append({"id": number, "type": "function", "function": shown})
    return calls


def _chat_entries(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return the report of a chat completion on tokens."""
    return {"content": [token.entry() for token in logprobs], "refusal": None}


def _completion_entries(logprobs: Sequence[TokenLogprob], *, start: int = 0) -> dict[str, Any]:
    """Return the report of a completion on tokens.

    Args:
        start: number of characters of the tokens before them.
    """
    lengths = [len(token.text) for token in logprobs]
    return {
        "tokens": [token.text for token in logprobs],
        "token_logprobs": [token.logprob for token in logprobs],
        "top_logprobs": None,
        "text_offset": [start + sum(lengths[:number]) for number in range(len(lengths))],
    }


def _chat_choice(asked: PolicyRequest, answer: PolicyAnswer) -> dict[str, Any]:
    """Return an answer of the policy as a choice of a chat completion."""
    calls = _chat_calls(asked, answer)
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.thoughts:
        message[FIELDS[0]] = answer.thoughts
    if calls:
        message |= {"content": answer.text or None, "tool_calls": calls}
    logprobs = _chat_entries(answer.logprobs) if asked.has_logprobs else None
    return {"message": message, "logprobs": logprobs}


def _completion_choice(asked: PolicyRequest, answer: PolicyAnswer) -> dict[str, Any]:
    """Return an answer of the policy as a choice of a completion."""
    logprobs = _completion_entries(answer.logprobs) if asked.has_logprobs else None
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
    name = f"{prefix}-{answers[0].number}"
    head = {"id": name, "object": kind, "created": now(), "model": as_model(asked)}
    return {**head, "choices": numbered, "usage": _usage(answers)}


def _usage(answers: Sequence[PolicyAnswer]) -> dict[str, int]:
    """Return the numbers of tokens of answers to one prompt."""
    num_prompt = answers[0].num_prompt
    num_sampled = sum(answer.num_sampled for answer in answers)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }


@dataclass(slots=True)
class _SentPart:
    """The part of a choice that was sent."""

    num_text: int = 0
    num_thoughts: int = 0
    num_entries: int = 0
    num_chars: int = 0  # Characters of the tokens in the entries.


class _ChunkWriter:
    """Writes the stream that both APIs share: each event has a part of one choice."""

    def __init__(self, asked: PolicyRequest, heads: Sequence[AnswerHead]) -> None:
        self._asked = asked
        kind, prefix = self._kind
        name = f"{prefix}-{heads[0].number}"
        self._head = {"id": name, "object": kind, "created": now(), "model": as_model(asked)}
        self._sent = [_SentPart() for _ in heads]

    _kind = ("text_completion", "cmpl")

    def begin(self) -> list[Event]:
        return []

    def add(self, index: int, part: AnswerPart) -> list[Event]:
        choices = self._parts(index, part)
        if choices and self._asked.has_logprobs:
            choices[-1]["logprobs"] = self._entries(self._sent[index], part.logprobs)
        sent = self._sent[index]
        sent.num_text += len(part.text)
        sent.num_thoughts += len(part.thoughts)
        sent.num_entries += len(part.logprobs)
        sent.num_chars += sum(len(token.text) for token in part.logprobs)
        return [self._chunk(index, choice) for choice in choices]

    def end(self, answers: Sequence[PolicyAnswer]) -> list[Event]:
        events = [
            event for index, answer in enumerate(answers) for event in self._ended(index, answer)
        ]
        options = self._asked.body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            events.append(("", {**self._head, "choices": [], "usage": _usage(answers)}))
        return [*events, ("", {})]  # The last event is [DONE].

    def fail(self, error: ApiError) -> list[Event]:
        return [("", openai_error(error))]

    def _parts(self, index: int, part: AnswerPart) -> list[dict[str, Any]]:
        """Return a part of a choice in the form of the API."""
        return [{"text": part.text}] if part else []

    def _entries(self, sent: _SentPart, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the report on further tokens."""
        return _completion_entries(logprobs, start=sent.num_chars)

    def _ended(self, index: int, answer: PolicyAnswer) -> list[Event]:
        """Return the events of the rest and of the end of a choice."""
        events = self.add(index, self._rest(index, answer))
        ended = {"text": "", "finish_reason": answer.reason(calls="", stop="stop", length="length")}
        return [*events, self._chunk(index, ended)]

    def _rest(self, index: int, answer: PolicyAnswer) -> AnswerPart:
        """Return the part of an answer that was not sent."""
        sent = self._sent[index]
        return AnswerPart(
            text=answer.text[sent.num_text :],
            thoughts=answer.thoughts[sent.num_thoughts :],
            logprobs=answer.logprobs[sent.num_entries :],
        )

    def _chunk(self, index: int, choice: dict[str, Any]) -> Event:
        """Return the event of a part of a choice."""
        whole = {"index": index, "logprobs": None, "finish_reason": None, **choice}
        return "", {**self._head, "choices": [whole], "usage": None}


class _ChatWriter(_ChunkWriter):
    """Writes the stream of a chat completion."""

    _kind = ("chat.completion.chunk", "chatcmpl")

    def begin(self) -> list[Event]:
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(index, {"delta": delta}) for index in range(len(self._sent))]

    def _parts(self, index: int, part: AnswerPart) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if part.thoughts:
            deltas.append({FIELDS[0]: part.thoughts})
        if part.text or (part.logprobs and not deltas):
            deltas.append({"content": part.text})
        return [{"delta": delta} for delta in deltas]

    def _entries(self, sent: _SentPart, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return _chat_entries(logprobs)

    def _ended(self, index: int, answer: PolicyAnswer) -> list[Event]:
        events = self.add(index, self._rest(index, answer))
        for number, call in enumerate(_chat_calls(self._asked, answer)):
            delta = {"tool_calls": [{"index": number, **call}]}
            events.append(self._chunk(index, {"delta": delta}))
        reason = answer.reason(calls="tool_calls", stop="stop", length="length")
        return [*events, self._chunk(index, {"delta": {}, "finish_reason": reason})]


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
    writer=_ChatWriter,
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
    writer=_ChunkWriter,
    excess=partial(
        _excess,
        shown="your prompt",
        answer="for the completion",
        remedy="your prompt; or completion length",
    ),
)
