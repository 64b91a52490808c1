"""Reads records of several file formats: their messages, and their tokens if they have any."""

# Values from JSON have no static type until this module has checked them:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeArgument=false
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from actor.formats.thoughts import FIELDS
from common.errors import ConfigError
from tools.exchange.writing import FINGERPRINT, REST, arrow

Record = dict[str, Any]
PARQUET = ".parquet"
# Role of a message -> sender in AgentTraj, and the role if AgentTraj has none for it.
_SENDERS = {
    "user": ("human", ""),
    "system": ("human", "system"),
    "developer": ("human", "system"),
    "tool": ("human", "tool"),
    "assistant": ("gpt", ""),
    "agent": ("gpt", ""),
}
_TEXTS = ("messages", "conversations", "completion", "steps")  # Fields with an episode as text.
_ABOUT = (*("env", "item_id", "reward", "success"), *("episode_id", "segment", "num_segments"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """A row of tokens, the mask of sampled tokens, and the result of its episode."""

    item_id: str
    reward: float
    is_success: bool
    segment: int
    num_segments: int
    token_ids: np.ndarray = field(repr=False)  # [seq] int32
    mask: np.ndarray = field(repr=False)  # [seq] bool
    episode_id: str = ""  # "": the record has no id.
    logprobs: np.ndarray | None = field(default=None, repr=False)  # [seq] nats, 0 if not sampled


def item_of(about: Record, prompt: list[Any]) -> str:
    """Return the item of a record with its environment. DPO pairs the episodes of one item.

    Args:
        prompt: the texts or tokens before the first trained answer. A record without `item_id` has
            their digest as its item, so that different prompts are different items.
    """
    name = text_field(about, "item_id")
    if not name:
        name = f"prompt-{hashlib.blake2b(repr(prompt).encode(), digest_size=8).hexdigest()}"
    env = text_field(about, "env")
    return f"{env}/{name}" if env else name


def text_field(about: Record, name: str) -> str:
    """Return a field as text; "" if it is missing or null."""
    value = about.get(name)
    return "" if value is None else str(value)


def segment_of(about: Record, place: str) -> tuple[int, int]:
    """Return the index of a segment and the number of segments of its episode.

    Raises: ConfigError: a value is not a number.
    """
    fields = {"segment": 0, "num_segments": 1}
    values = {
        name: default if about.get(name) is None else about[name]
        for name, default in fields.items()
    }
    for name, value in values.items():
        if not _is_number(value):
            raise ConfigError(f"{place}: {name!r} is {value!r:.80}, not a number")
    num_segments = int(values["num_segments"])
    return (int(values["segment"]) if num_segments > 1 else 0), num_segments


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def read_records(path: Path) -> list[tuple[str, object]]:
    """Return the records of JSON lines, of one JSON list or of a Parquet file, with their places.

    Raises: ConfigError: the file cannot be read; names the record.
    """
    if path.suffix == PARQUET:
        parquet = arrow("pyarrow.parquet")
        try:
            rows: list[object] = parquet.read_table(str(path)).to_pylist()
        except (OSError, ValueError) as error:  # The errors of pyarrow have these base classes.
            raise ConfigError(f"{path}: not a Parquet file: {error}") from error
    else:
        rows = _json_records(path)
    return [(f"{path}: record {number}", row) for number, row in enumerate(rows, 1)]


def _json_records(path: Path) -> list[object]:
    """Return the records of a JSON list, or of JSON lines. Raises: ConfigError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    if text.lstrip().startswith("["):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: not JSON: {error}") from error
    records: list[object] = []
    # `splitlines` would also split at characters that JSON allows inside a text.
    lines = [line for line in text.split("\n") if line.strip()]
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: record {number} is not JSON: {error}") from error
    return records


def preference_of(record: object, place: str) -> tuple[Record, Record] | None:
    """Return the chosen and the rejected episode of a preference; None for another record.

    A preference has TRL's fields `chosen` and `rejected`, as texts or as lists of messages, after
    `prompt`. The lists may repeat the prompt. Without `prompt` both begin with the same messages.
    Answers of the prompt have weight 0. The episodes have the rewards 1 and 0. Their item is the
    place of the record, so that each record is one pair.

    Raises: ConfigError: a field is missing or malformed; names it.
    """
    if not isinstance(record, dict) or not {"chosen", "rejected"} <= record.keys():
        return None
    prompt = _messages_of(record.get("prompt", []), "user", f"{place}: 'prompt'")
    chosen = _messages_of(record["chosen"], "assistant", f"{place}: 'chosen'")
    rejected = _messages_of(record["rejected"], "assistant", f"{place}: 'rejected'")
    if prompt:
        chosen = _after_prompt(prompt, chosen, f"{place}: 'chosen'")
        rejected = _after_prompt(prompt, rejected, f"{place}: 'rejected'")
    else:
        pairs = zip(chosen, rejected, strict=False)
        num = next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
        prompt, chosen, rejected = chosen[:num], chosen[num:], rejected[num:]
    if not prompt:
        raise ConfigError(
            f"{place}: 'prompt' is missing, and 'chosen' and 'rejected' begin with other messages"
        )
    about = {"item_id": place, "tools": record.get("tools"), "system": record.get("system")}
    before = [{**message, "weight": 0} for message in prompt]
    return (
        {**about, "messages": [*before, *chosen], "reward": 1.0},
        {**about, "messages": [*before, *rejected], "reward": 0.0},
    )


def _after_prompt(prompt: list[Record], messages: list[Record], what: str) -> list[Record]:
    """Return the messages after the prompt, which they may repeat.

    Raises: ConfigError: the messages begin with another question.
    """
    if messages[: len(prompt)] == prompt:
        return messages[len(prompt) :]
    is_asked = prompt[-1].get("role") == "user"
    if is_asked and messages and messages[0].get("role") not in ("assistant", "tool"):
        raise ConfigError(
            f"{what} begins with a message of {messages[0].get('role')!r} after 'prompt', and does"
            " not repeat 'prompt'. Remove 'prompt' if the list has the whole conversation"
        )
    return messages


def _messages_of(value: object, role: str, what: str) -> list[Record]:
    """Return messages; a text is one message of the role. Raises: ConfigError."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not (isinstance(value, list) and all(map(_is_map, value))):
        raise ConfigError(f"{what} is {type(value).__name__}; give a text or a list of messages")
    return list(value)


def as_conversation(record: Record, place: str) -> Record:
    """Return a record in AgentTraj's format.

    Input is this format, messages, a prompt with its completion, or an ATIF document.

    Raises: ConfigError: the record has an unknown format; names the formats.
    """
    if {"chosen", "rejected"} <= record.keys():
        raise ConfigError(
            f"{place}: a record with 'chosen' and 'rejected' is a preference; give it as dpo.data"
        )
    if {"prompt", "completion"} <= record.keys() and "messages" not in record:
        prompt = _messages_of(record["prompt"], "user", f"{place}: 'prompt'")
        completion = _messages_of(record["completion"], "assistant", f"{place}: 'completion'")
        if prompt:
            completion = _after_prompt(prompt, completion, f"{place}: 'completion'")
        before = [{**message, "weight": 0} for message in prompt]
        record = {**record, "messages": [*before, *completion]}
    if isinstance(record.get("steps"), list):
        messages = _messages_of_steps(record["steps"], place)
        conversation = [_message(each, "role", "content", place) for each in messages]
        about = _about(record, place)
    elif isinstance(record.get("messages"), list):
        conversation = [_message(each, "role", "content", place) for each in record["messages"]]
        about = record
    elif "conversations" in record:
        return record
    else:
        raise ConfigError(
            f"{place}: no known format. A record has 'messages', 'prompt' and 'completion',"
            " 'conversations' (AgentTraj) or 'steps' (ATIF); for dpo.data also 'prompt', 'chosen'"
            f" and 'rejected'. This one has {sorted(map(str, record))}"
        )
    converted = {"conversations": conversation, **{k: about[k] for k in _ABOUT if k in about}}
    if record.get("system"):
        converted["system"] = record["system"]
    tools = record.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(map(_is_map, tools))):
        raise ConfigError(f"{place}: 'tools' must be a list of objects")
    return {**converted, "tools": [_as_tool(each) for each in tools]} if tools else converted


def _messages_of_steps(steps: list[object], place: str) -> list[object]:
    """Return the steps of an ATIF document as messages. Observations follow their steps.

    A result is a tool's message if its step has calls, else a user's. Copied steps have weight 0.
    In a document with tokens this also holds for agent steps without tokens.

    Raises: ConfigError: an observation is malformed.
    """
    has_tokens = any(_sampled_ids(step) is not None for step in steps)
    messages: list[object] = []
    for step in steps:
        if not isinstance(step, dict):
            raise ConfigError(f"{place}: a step is {type(step).__name__}, not a map")
        calls = step.get("tool_calls") or []
        is_copied = step.get("is_copied_context") is True
        is_context = is_copied or (has_tokens and _sampled_ids(step) is None)
        message = {
            **{name: step[name] for name in FIELDS if name in step},
            **{"role": step.get("source"), "content": step.get("message")},
            "tool_calls": [_call_of(call) for call in calls] if isinstance(calls, list) else calls,
        }
        messages.append({**message, "weight": 0} if is_context else message)
        observation = step.get("observation") or {}
        results = observation.get("results") if isinstance(observation, dict) else observation
        if not isinstance(results or [], list) or not all(map(_is_map, results or [])):
            raise ConfigError(f"{place}: 'observation' must have a list 'results' of objects")
        for result in results or []:
            answer = {"role": "tool" if calls else "user", "content": result.get("content") or ""}
            messages.append({**answer, "tool_call_id": result.get("source_call_id")})
    return messages


def _sampled_ids(step: object) -> object:
    """Return `completion_token_ids` of an ATIF step; None: it has none."""
    metrics = step.get("metrics") if isinstance(step, dict) else None
    return metrics.get("completion_token_ids") if isinstance(metrics, dict) else None


def _call_of(call: object) -> object:
    """Return a call of an ATIF step in the form of chat templates."""
    if not isinstance(call, dict) or "function_name" not in call:
        return call
    function = {"name": call["function_name"], "arguments": call.get("arguments")}
    return {"id": call.get("tool_call_id"), "type": "function", "function": function}


def _message(message: object, role_key: str, text_key: str, place: str) -> Record:
    """Return a message in AgentTraj's format, with all that a chat template can show.

    Raises: ConfigError: a field cannot be shown; names the record and the field.
    """
    if not isinstance(message, dict):
        raise ConfigError(f"{place}: a message is {type(message).__name__}, not a map")
    role = str(message.get(role_key))
    if role not in _SENDERS:
        raise ConfigError(f"{place}: {role_key!r} is {role!r:.80}; it must be in {[*_SENDERS]}")
    for name in ("function_call", "audio"):
        if message.get(name):
            raise ConfigError(f"{place}: {name!r} of a message cannot be shown; use tool_calls")
    sender, shown_role = _SENDERS[role]
    calls = message.get("tool_calls") or []
    if not (isinstance(calls, list) and all(map(_is_map, calls))):
        raise ConfigError(f"{place}: 'tool_calls' must be a list of objects")
    text = _text_of(message.get(text_key), f"{place}: {text_key!r}", is_optional=bool(calls))
    converted: Record = {"from": sender, "value": text}
    thoughts = next((message[name] for name in FIELDS if message.get(name)), "")
    if not isinstance(thoughts, str):
        raise ConfigError(f"{place}: thoughts are {type(thoughts).__name__}, not text")
    number = str(message.get("tool_call_id") or "") if role == "tool" else ""
    extra = {"role": shown_role, "thoughts": thoughts, "tool_calls": calls, "tool_call_id": number}
    weight = message.get("weight")
    if weight is not None and (not _is_number(weight) or weight not in (0, 1)):
        raise ConfigError(f"{place}: 'weight' is {weight!r:.40}; it must be 0 or 1")
    if sender == "gpt" and weight == 0:
        converted["loss"] = False
    return {**converted, **{name: value for name, value in extra.items() if value}}


def _text_of(content: object, what: str, *, is_optional: bool) -> str:
    """Return the text of a message; its parts are joined. Raises: ConfigError: it is not text."""
    if content is None and is_optional:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [each.get("text") if isinstance(each, dict) else each for each in content]
        kinds = {each.get("type", "text") for each in content if isinstance(each, dict)}
        if kinds <= {"text"} and all(isinstance(each, str) for each in texts):
            return "".join(map(str, texts))
        raise ConfigError(f"{what} has parts of type {sorted(map(str, kinds))}; only text is shown")
    raise ConfigError(f"{what} is {type(content).__name__}, not text")


def _as_tool(tool: Record) -> Record:
    """Return a tool in the format of chat templates."""
    return tool if "function" in tool else {"type": "function", "function": tool}


def _is_map(value: object) -> bool:
    return isinstance(value, dict)


def _about(record: Record, place: str) -> Record:
    """Return the `extra` field of an ATIF document, which describes the episode."""
    about = record.get("extra") or {}
    if not isinstance(about, dict):
        raise ConfigError(f"{place}: 'extra' is {type(about).__name__}, not a map")
    return about


def tokens_of(record: object, place: str, *, fingerprint: str | None = None) -> TokenRow | None:
    """Return the tokens of a record, None if it has none for the reading tokenizer.

    Args:
        fingerprint: that of the reading tokenizer; None accepts the tokens of any tokenizer. Tokens
            of another one are left out. Tokens without a fingerprint are left out if the record
            also has texts.

    Raises: ConfigError: the tokens are inconsistent or invalid.
    """
    if not isinstance(record, dict):
        return None
    if isinstance(record.get("steps"), list):
        if _has_other_tokens(record, _about(record, place), fingerprint):
            return None
        return _of_atif(record, place)
    if not isinstance(record.get("token_ids"), list):
        return None
    if _has_other_tokens(record, record, fingerprint):
        return None
    if "policy" in record:
        raise ConfigError(
            f"{place}: an internal record of a journal. Give the run's folder instead, or export"
            " with --format parquet"
        )
    ids = record["token_ids"]
    mask = record.get("loss_mask")
    if not isinstance(mask, list) or len(mask) != len(ids):
        raise ConfigError(f"{place}: token_ids and loss_mask must be lists of the same length")
    return _row(record, ids, mask, record.get("logprobs"), place)


def _has_other_tokens(record: Record, about: Record, fingerprint: str | None) -> bool:
    """Return whether the tokens of a record may be those of another tokenizer."""
    if fingerprint is None:
        return False
    written = text_field(about, FINGERPRINT)
    has_texts = any(record.get(name) is not None for name in _TEXTS)
    return written != fingerprint if written else has_texts


def _of_atif(record: Record, place: str) -> TokenRow | None:
    """Return the row of an ATIF document. Each agent step has the tokens of the steps before it."""
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    for step in record["steps"]:
        metrics = (step.get("metrics") or {}) if isinstance(step, dict) else {}
        if not isinstance(metrics, dict):
            raise ConfigError(f"{place}: 'metrics' is {type(metrics).__name__}, not a map")
        prompt = metrics.get("prompt_token_ids")
        sampled = metrics.get("completion_token_ids")
        if not isinstance(prompt, list) or not isinstance(sampled, list):
            continue
        if prompt[: len(ids)] != ids:
            raise ConfigError(
                f"{place}: the prompt of step {step.get('step_id')} does not begin with the tokens"
                " of the earlier steps, because its history was rewritten. Give one document for"
                " each segment"
            )
        new = len(prompt) - len(ids)
        ids = [*prompt, *sampled]
        is_trained = step.get("is_copied_context") is not True
        mask = [*mask, *[False] * new, *[is_trained] * len(sampled)]
        sampled_logprobs = metrics.get("logprobs") or [0.0] * len(sampled)
        if not isinstance(sampled_logprobs, list) or len(sampled_logprobs) != len(sampled):
            raise ConfigError(
                f"{place}: completion_token_ids and logprobs must be lists of the same length"
            )
        logprobs += [0.0] * new + sampled_logprobs
    about = _about(record, place)
    rest = about.get(REST) or []
    if not isinstance(rest, list):
        raise ConfigError(f"{place}: {REST!r} is {type(rest).__name__}, not a list of token ids")
    if not ids:
        return None
    ids += rest
    mask += [False] * len(rest)
    logprobs += [0.0] * len(rest)
    return _row(about, ids, mask, logprobs, place)


def _row(about: Record, ids: list[Any], mask: list[Any], logprobs: Any, place: str) -> TokenRow:
    """Return a checked row of tokens. Raises: ConfigError: a column is malformed."""
    if not all(type(each) is int and 0 <= each < 2**31 for each in ids):
        raise ConfigError(f"{place}: token ids must be whole numbers in [0, 2**31)")
    if not all(type(each) is bool for each in mask):
        raise ConfigError(f"{place}: loss_mask must contain only true and false")
    if logprobs is not None and not (
        isinstance(logprobs, list) and len(logprobs) == len(ids) and all(map(_is_number, logprobs))
    ):
        raise ConfigError(f"{place}: logprobs must be a list with one number for each token")
    reward = about.get("reward", 1.0)
    if not _is_number(reward):
        raise ConfigError(f"{place}: 'reward' is {reward!r:.80}, not a number")
    segment, num_segments = segment_of(about, place)
    num_prompt = mask.index(True) if True in mask else len(mask)
    return TokenRow(
        item_id=item_of(about, ids[:num_prompt]),
        reward=float(reward),
        is_success=bool(about.get("success", about.get("is_success", False))),
        segment=segment,
        num_segments=num_segments,
        episode_id=text_field(about, "episode_id"),
        token_ids=np.array(ids, dtype=np.int32),
        mask=np.array(mask, dtype=bool),
        logprobs=None if logprobs is None else np.array(logprobs, dtype=np.float32),
    )
