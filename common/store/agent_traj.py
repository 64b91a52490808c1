"""Conversations as AgentGym stores them: JSON lines of {"conversations", "item_id"}.

Each message is {"from": "human" | "gpt", "loss": true | false | null, "value": text}; only gpt
messages are imitated, unless their loss is false.
"""

# What JSON holds is of no known type until it is checked here:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeArgument=false
import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

from common.errors import ConfigError
from common.text import valid_text

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    is_agent: bool
    is_trained: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One episode in words."""

    item_id: str
    messages: list[Message]
    reward: float = 1.0  # a record without one is a demonstration


def read_conversations(path: Path) -> list[Conversation]:
    """Return all conversations of a JSON-lines file, or of a JSON file that holds one list.

    Halves of characters in a text become U+FFFD; how many texts had some is logged.

    Raises:
        ConfigError: no such file, or a record that is not of this form; names its number.
    """
    if not path.exists():
        raise ConfigError(f"sft.demonstrations={path}: no such file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    try:
        records = json.loads(text) if text.lstrip().startswith("[") else _lines(text, path)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    told = [_conversation(record, f"{path}: record {i + 1}") for i, record in enumerate(records)]
    read = [replace(each, messages=[*map(_repaired, each.messages)]) for each in told]
    num_broken = sum(
        a.text != b.text
        for was, now in zip(told, read, strict=True)
        for a, b in zip(was.messages, now.messages, strict=True)
    )
    if num_broken:
        logger.warning("%s: replaced halves of characters in %d messages", path, num_broken)
    return read


def _repaired(message: Message) -> Message:
    return replace(message, text=valid_text(message.text))


def _lines(text: str, path: Path) -> list[object]:
    records: list[object] = []
    lines = [line for line in text.split("\n") if line.strip()]  # splitlines knows other ends, too
    for i, line in enumerate(lines):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}: record {i + 1} is not JSON: {error}") from error
    return records


def _conversation(record: object, place: str) -> Conversation:
    if not isinstance(record, dict) or not isinstance(record.get("conversations"), list):
        raise ConfigError(f"{place}: no list under 'conversations'")
    messages = []
    for message in record["conversations"]:
        if not isinstance(message, dict):
            raise ConfigError(f"{place}: a message is {type(message).__name__}, not a map")
        sender, value = message.get("from"), message.get("value")
        if sender not in ("human", "gpt") or not isinstance(value, str):
            raise ConfigError(f"{place}: a message needs 'from' human|gpt and a text 'value'")
        is_agent = sender == "gpt"
        is_trained = is_agent and message.get("loss") is not False
        messages.append(Message(is_agent=is_agent, is_trained=is_trained, text=value))
    reward = record.get("reward", 1.0)
    if isinstance(reward, bool) or not isinstance(reward, (int, float)):
        raise ConfigError(f"{place}: 'reward' is {reward!r}, not a number")
    return Conversation(
        item_id=str(record.get("item_id", "")), messages=messages, reward=float(reward)
    )
