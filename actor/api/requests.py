"""Requests and answers of agents, independent of the API, and the errors of invalid requests."""

# JSON values have no known type until they are checked here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import json
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

from common.text import valid_text

logger = logging.getLogger(__name__)

CONTEXT_EXCEEDED = "context_length_exceeded"
REPLACEMENT = "\ufffd"  # A decoder writes it for a part of a character.
NUMBER = re.compile(r"\[\d+\]")  # A position in the path of a field.

Message = dict[str, Any]  # In the format of chat templates: role, content, optional tool_calls.
Event = tuple[str, dict[str, Any]]  # (name, payload) of a stream's event; name "": none
ANSWERED = {"model", "stream", "stream_options"}  # Fields that only change the response's form.
SAMPLING = "the configuration of the run sets the sampling, which the learner has to know"
LABEL = "it does not change the answer"
EFFORT = "the policy has no setting of effort or length"
CLEARING = "the agent's history stays as it is; a prompt that does not fit gets a 400"
CACHE = "the actor keeps its own caches"
ONE_CALL = "the policy cannot be limited to one call of a tool; an answer may have several"
IGNORED = {  # field -> why it has no effect here
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "seed"), SAMPLING),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty"), SAMPLING),
    **dict.fromkeys(("user", "metadata", "client_metadata", "safety_identifier"), LABEL),
    **dict.fromkeys(("store", "service_tier", "moderation"), LABEL),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_options"), CACHE),
    **dict.fromkeys(("prompt_cache_retention", "cache_control"), CACHE),
}
STREAM_OPTIONS = {"include_usage", "include_obfuscation"}
WHY = {
    "tool_choice": "the policy cannot be forced to call a tool; use auto or none",
    "chat_template_kwargs": "the run sets them for all prompts (model.chat_template_kwargs)",
}
CHOICES = (None, "auto", "none", {"type": "auto"}, {"type": "none"})


class ApiError(Exception):
    """Raised for a request that cannot be answered; its `code` names the reason."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param


class ContextExceeded(ApiError):
    """Raised for a prompt that leaves no room for an answer; each API has its own words for it."""

    def __init__(self, *, num_prompt: int, num_answer: int, max_tokens: int) -> None:
        """Describe the excess in tokens: of the prompt, of the longest answer, of the context."""
        self.num_prompt = num_prompt
        self.num_answer = num_answer
        self.max_tokens = max_tokens
        self.reason = (
            f"The prompt has {num_prompt} tokens, the answer up to {num_answer}; the maximum"
            f" context length is {max_tokens} tokens"
        )
        super().__init__(400, CONTEXT_EXCEEDED, self.reason, "messages")

    def worded(self, message: str, param: str) -> ApiError:
        """Return the error with the words of an API."""
        return ApiError(self.status, self.code, message, param)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRequest:
    """A request for one answer."""

    messages: list[Message] = field(default_factory=list)  # Messages of a conversation.
    prompt: str | list[int] | None = None  # Prompt of a bare completion.
    instructions: str = ""  # System text before the conversation.
    previous: str = ""  # Id of the answer that the messages continue.
    # Tools in the format of chat templates.
    tools: list[dict[str, Any]] = field(default_factory=list)
    max_tokens: int | None = None  # Maximum tokens of the answer; None: `actor.max_turn_tokens`.
    stop: list[str] = field(default_factory=list)  # Texts that end the answer.
    is_kept: bool = False  # A later request may continue this answer by its id.
    num_answers: int = 1
    has_logprobs: bool = False  # The response reports the logprobs of sampled tokens.
    body: dict[str, Any] = field(default_factory=dict)  # The original request.

    @property
    def is_streamed(self) -> bool:
        """Whether the response is a stream of events."""
        return bool(self.body.get("stream"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A sampled token of an answer."""

    text: str  # With special tokens.
    logprob: float  # Nats, under the distribution that was sampled from.

    def entry(self) -> dict[str, Any]:
        """Return the token as OpenAI's APIs report it. A part of a character has no bytes."""
        is_whole = REPLACEMENT not in self.text
        encoded = list(self.text.encode()) if is_whole else None
        return {"token": self.text, "logprob": self.logprob, "bytes": encoded, "top_logprobs": []}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyAnswer:
    """The policy's answer, as it is reported to the agent."""

    number: str  # Unique number of the answer.
    text: str
    calls: list[dict[str, Any]]  # Calls in the format of chat templates.
    is_stopped: bool  # False: cut at the limit of tokens.
    stop: str | None  # The text of `PolicyRequest.stop` that ended the answer.
    num_prompt: int
    num_sampled: int
    thoughts: str = ""  # Thoughts of the answer, which are no part of `text`.
    # All sampled tokens, those of thoughts, calls and the end included; [] unless requested.
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])

    @property
    def message(self) -> Message:
        """The answer as a message of the conversation."""
        message: Message = {"role": "assistant", "content": self.text}
        return {**message, "tool_calls": self.calls} if self.calls else message

    def message_with_ids(self, prefix: str) -> Message:
        """Return the answer as a message whose calls have the ids of `named_calls`."""
        ids = [name for name, _, _ in self.named_calls(prefix)]
        calls = [{**call, "id": name} for call, name in zip(self.calls, ids, strict=True)]
        return {**self.message, "tool_calls": calls} if calls else self.message

    def named_calls(self, prefix: str) -> list[tuple[str, str, dict[str, Any]]]:
        """Return id, name and arguments of each call."""
        functions = [
            (call["function"]["name"], call["function"]["arguments"]) for call in self.calls
        ]
        return [(f"{prefix}_{self.number}{i}", *call) for i, call in enumerate(functions)]

    def reason(self, *, calls: str, stop: str, length: str) -> str:
        """Return the reason for the answer's end, as a constant of an API."""
        if not (self.is_stopped or self.stop):
            return length
        return calls if self.calls else stop


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """The fields of an answer that exist before its first token."""

    number: str  # The same as in `PolicyAnswer`.
    num_prompt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPart:
    """A further part of an answer in progress."""

    text: str = ""
    thoughts: str = ""
    logprobs: list[TokenLogprob] = field(
        default_factory=list[TokenLogprob]
    )  # The same as in the answer.

    def __bool__(self) -> bool:
        return bool(self.text or self.thoughts or self.logprobs)


class EventWriter(Protocol):
    """Writes the answers to one request as the events of a stream."""

    def begin(self) -> list[Event]:
        """Return the events before the first part."""
        ...

    def add(self, index: int, part: AnswerPart) -> list[Event]:
        """Return the events of a further part of an answer."""
        ...

    def end(self, answers: Sequence[PolicyAnswer]) -> list[Event]:
        """Return the events of all that no part has, such as calls, and of the end."""
        ...

    def fail(self, error: ApiError) -> list[Event]:
        """Return the events of an answer that fails after its begin."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """One of the APIs that agents can use."""

    read: Callable[[dict[str, Any]], PolicyRequest]  # Raises: ApiError
    # (request, its answers) -> the response; only OpenAI's chat and completions have several
    reply: Callable[[PolicyRequest, Sequence[PolicyAnswer]], dict[str, Any]]
    # (request, its answers' heads) -> the writer of their stream
    writer: Callable[[PolicyRequest, Sequence[AnswerHead]], EventWriter]
    excess: Callable[[ContextExceeded], ApiError]  # The error in the words of the API.
    # A stream reports a prompt that is too long as an event; False: by the status 400.
    streams_excess: bool = False


def whole_stream(api: Api, asked: PolicyRequest, answers: Sequence[PolicyAnswer]) -> list[Event]:
    """Return complete answers as the events of a stream."""
    heads = [AnswerHead(number=each.number, num_prompt=each.num_prompt) for each in answers]
    writer = api.writer(asked, heads)
    return [*writer.begin(), *writer.end(answers)]


def event_text(event: Event) -> str:
    """Return a server-sent event; an empty payload is the end of the stream."""
    name, payload = event
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(payload) if payload else '[DONE]'}\n\n"


def openai_error(error: ApiError) -> dict[str, Any]:
    """Return an error in the format of OpenAI's APIs."""
    kind = "authentication_error" if error.status == 401 else "invalid_request_error"
    kind = kind if error.status < 500 else "server_error"
    details = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return {"error": details}


def invalid(text: str, param: str) -> ApiError:
    """Return the error for an invalid value."""
    return ApiError(400, "invalid_value", text, param)


def unsupported(name: str, value: object, why: str = "", *, param: str | None = None) -> ApiError:
    """Return the error for an unsupported feature."""
    text = f"{name}={value!r:.80}: {why or WHY.get(name, 'not supported here')}"
    return ApiError(400, "unsupported_parameter", text, param or name)


@cache
def log_ignored(name: str, reason: str) -> None:
    """Log that a field of requests has no effect; each field and reason once per process."""
    logger.info("ignored a field of requests field=%s reason=%s", name, reason)


def check_fields(
    body: dict[str, Any],
    used: set[str],
    harmless: dict[str, tuple[Any, ...]],
    ignored: dict[str, str] | None = None,
) -> None:
    """Reject unknown fields, and values that would change the answer but are not supported.

    Args:
        harmless: field -> its values without effect
        ignored: field -> why each value of it is ignored, in addition to `IGNORED`

    Raises: ApiError.
    """
    reasons = IGNORED | (ignored or {})
    for name, value in body.items():
        if name in used or name in ANSWERED or value is None:
            continue
        if any(value == each and type(value) is type(each) for each in harmless.get(name, ())):
            continue
        if name in reasons:
            log_ignored(name, reasons[name])
        elif name in harmless:
            raise unsupported(name, value)
        else:
            raise ApiError(400, "unknown_parameter", f"Unknown parameter: {name:.80}", name)
    if body.get("stream") not in (None, False, True):
        raise invalid("stream: must be true or false", "stream")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise invalid("stream_options: must be an object", "stream_options")
    if unknown := sorted(map(str, options.keys() - STREAM_OPTIONS)):
        text = f"Unknown parameter: stream_options.{unknown[0]:.80}"
        raise ApiError(400, "unknown_parameter", text, "stream_options")


def check_part(
    part: dict[str, Any],
    place: str,
    used: set[str],
    *,
    ignored: dict[str, str] | None = None,
    refused: dict[str, tuple[Any, ...]] | None = None,
) -> None:
    """Log the ignored fields of an object inside a request, and reject the refused ones.

    Args:
        place: the object's path in the request.
        ignored: field -> why it is ignored. The template shows no other unknown field either.
        refused: field -> its values without effect.

    Raises: ApiError.
    """
    anywhere = NUMBER.sub("[]", place)
    for name, value in part.items():
        if name in used or name == "type" or value in (None, "", [], {}) or value is False:
            continue
        values = (refused or {}).get(name)
        if values is None:
            reason = (ignored or {}).get(name) or IGNORED.get(name) or "no prompt shows it"
            log_ignored(f"{anywhere}.{name:.80}", reason)
        elif value not in values:
            param = place.partition("[")[0].partition(".")[0]
            raise unsupported(f"{place}.{name}", value, param=param)


MAX_CHOICES = 128


def read_num_answers(body: dict[str, Any]) -> int:
    """Return the number of answers to one request. Raises: ApiError."""
    num = body.get("n")
    if num is None:
        return 1
    if type(num) is not int or not 1 <= num <= MAX_CHOICES:
        raise invalid(f"n={num!r:.80}: a whole number from 1 to {MAX_CHOICES}", "n")
    return num


def read_limit(body: dict[str, Any], *names: str) -> int | None:
    """Return the first limit of tokens that is set. Raises: ApiError."""
    for name in names:
        limit = body.get(name)
        if limit is not None:
            if type(limit) is not int or limit < 1:
                raise invalid(f"{name}={limit!r:.80}: must be >= 1", name)
            return limit
    return None


def read_stop(body: dict[str, Any], name: str) -> list[str]:
    """Return the texts that end an answer. Raises: ApiError."""
    value = body.get(name) or []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise invalid(f"{name}: must be a text or a list of texts", name)
    return list(map(valid_text, texts))


def read_items(body: dict[str, Any], name: str, *, least: int = 0) -> list[dict[str, Any]]:
    """Return a list of objects. Raises: ApiError."""
    items = body.get(name) or []
    if not isinstance(items, list) or len(items) < least:
        raise invalid(f"{name}: must be a list of at least {least} objects", name)
    for number, item in enumerate(items):
        if not isinstance(item, dict):
            raise invalid(f"{name}[{number}]: must be an object", name)
    return items


def joined(messages: list[Message]) -> list[Message]:
    """Return the messages with consecutive assistant messages joined into one."""
    merged: list[Message] = []
    for message in messages:
        if merged and merged[-1]["role"] == message["role"] == "assistant":
            calls = [*merged[-1].get("tool_calls", []), *message.get("tool_calls", [])]
            text = merged[-1]["content"] + message["content"]
            message = {"role": "assistant", "content": text}
            message |= {"tool_calls": calls} if calls else {}
            merged.pop()
        merged.append(message)
    return merged


def checked(messages: list[Message], param: str) -> list[Message]:
    """Return the messages if the policy can answer them. Raises: ApiError."""
    if not messages or messages[-1]["role"] == "assistant":
        raise invalid(f"{param}: must end with a message that is not of the assistant", param)
    return messages


def arguments_text(arguments: dict[str, Any]) -> str:
    """Return the arguments of a call as JSON."""
    return json.dumps(arguments, ensure_ascii=False)


def now() -> int:
    """Return the timestamp of an answer, in seconds."""
    return int(time.time())


def as_model(asked: PolicyRequest) -> str:
    """Return the policy's name as given in the request."""
    return valid_text(str(asked.body.get("model") or "policy"))


def with_system(asked: PolicyRequest, before: list[Message]) -> PolicyRequest:
    """Return the request with the whole conversation as its messages."""
    if not (asked.instructions or before):
        return asked
    system = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    return replace(asked, messages=[*system, *before, *asked.messages])
