"""Conversations in AgentGym's format: JSON lines of {"conversations", "item_id"}.

Each message is {"from": "human" | "gpt", "loss": true | false | null, "value": text}. Only gpt
messages are trained on, unless their loss is false.
"""

# Values from JSON have no static type until this module has checked them:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeArgument=false
import itertools
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.formats.calls import each_text
from common.text import valid_text
from tools.exchange.records import as_conversation, item_of, read_records, segment_of, text_field

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation."""

    is_agent: bool
    is_trained: bool
    text: str
    role: str = ""  # "system" or "tool"; "": user or assistant, by `is_agent`.
    thoughts: str = ""  # Text of a field for thoughts, such as reasoning_content.
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    call_id: str = ""  # Id of the call that a tool result belongs to; "": it has none.

    @property
    def chat_role(self) -> str:
        """Role of the message in a chat template."""
        return self.role or ("assistant" if self.is_agent else "user")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One episode as text messages."""

    item_id: str
    messages: list[Message]
    reward: float = 1.0  # Records without a reward are demonstrations.
    is_success: bool = False  # True if the record has "success": true.
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    env: str = ""  # "": the record names no environment.
    episode_id: str = ""  # "": the record has no id.
    segment: int = 0  # Index within the episode.
    num_segments: int = 1  # Number of segments of the episode.
    place: str = field(default="", compare=False)  # File and number of the record.

    @property
    def item(self) -> str:
        """Item with its environment; without an id a digest of the first prompt."""
        prompt = list(itertools.takewhile(lambda message: not message.is_trained, self.messages))
        return item_of({"env": self.env, "item_id": self.item_id}, [*prompt, self.tools])


def read_conversations(path: Path) -> list[Conversation]:
    """Return all conversations of JSON lines, of one JSON list, or of a Parquet file.

    A record has AgentTraj's format, is {"messages": [{"role", "content"}]} or an ATIF document.
    Unpaired surrogates in a text become U+FFFD. The number of repaired texts is logged.

    Raises:
        ConfigError: the file is missing, or a record has an unknown format; names its number.
    """
    if not path.exists():
        raise ConfigError(f"sft.demonstrations={path}: no such file")
    return valid_conversations(
        [conversation_of(record, place) for place, record in read_records(path)], path
    )


def valid_conversations(conversations: list[Conversation], path: Path) -> list[Conversation]:
    """Return conversations without unpaired surrogates. The number of repairs is logged."""
    read = [
        replace(
            conversation,
            messages=list(map(_valid, conversation.messages)),
            tools=_valid_values(conversation.tools),
        )
        for conversation in conversations
    ]
    num_broken = sum(
        a != b
        for was, now in zip(conversations, read, strict=True)
        for a, b in zip(was.messages, now.messages, strict=True)
    )
    if num_broken:
        logger.warning("%s: replaced unpaired surrogates in %d messages", path, num_broken)
    return read


def _valid(message: Message) -> Message:
    return replace(
        message,
        text=valid_text(message.text),
        thoughts=valid_text(message.thoughts),
        calls=_valid_values(message.calls),
    )


def _valid_values(values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return each_text(values, valid_text)


def _with_system(system: object, messages: list[Message], place: str) -> list[Message]:
    """Return the messages with the field `system` of their record as the first one.

    Raises: ConfigError: the field is not text, or the messages have another system message.
    """
    if not system:
        return messages
    if not isinstance(system, str):
        raise ConfigError(f"{place}: 'system' is {type(system).__name__}, not text")
    texts = [message.text for message in messages if message.role == "system"]
    if texts == [system]:
        return messages
    if texts:
        raise ConfigError(
            f"{place}: 'system' differs from the system message of the record; remove one of them"
        )
    first = Message(is_agent=False, is_trained=False, text=system, role="system")
    return [first, *messages]


def conversation_of(record: object, place: str) -> Conversation:
    """Return the conversation of a record. Raises: ConfigError: it is malformed."""
    if isinstance(record, dict):
        record = as_conversation(record, place)
    if not isinstance(record, dict) or not isinstance(record.get("conversations"), list):
        raise ConfigError(f"{place}: 'conversations' must be a list")
    messages = []
    for message in record["conversations"]:
        if not isinstance(message, dict):
            raise ConfigError(f"{place}: a message is {type(message).__name__}, not a map")
        sender = message.get("from")
        value = message.get("value")
        if sender not in ("human", "gpt") or not isinstance(value, str):
            raise ConfigError(f"{place}: a message needs 'from' (human or gpt) and a text 'value'")
        is_agent = sender == "gpt"
        messages.append(
            Message(
                is_agent=is_agent,
                is_trained=is_agent and message.get("loss") is not False,
                text=value,
                role=str(message.get("role") or ""),
                thoughts=str(message.get("thoughts") or ""),
                calls=message.get("tool_calls") or [],
                call_id=str(message.get("tool_call_id") or ""),
            )
        )
    messages = _with_system(record.get("system"), messages, place)
    reward = record.get("reward", 1.0)
    if isinstance(reward, bool) or not isinstance(reward, (int, float)):
        raise ConfigError(f"{place}: 'reward' is {reward!r}, not a number")
    segment, num_segments = segment_of(record, place)
    return Conversation(
        item_id=text_field(record, "item_id"),
        messages=messages,
        reward=float(reward),
        is_success=record.get("success") is True,
        tools=record.get("tools") or [],
        env=text_field(record, "env"),
        episode_id=text_field(record, "episode_id"),
        segment=segment,
        num_segments=num_segments,
        place=place,
    )
