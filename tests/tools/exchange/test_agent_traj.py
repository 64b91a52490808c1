"""Laws of the conversation format."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from tools.exchange.agent_traj import Conversation, Message, conversation_of, read_conversations
from tools.exchange.records import preference_of

RECORD = {
    "item_id": "babyai_3",
    "conversations": [
        {"from": "human", "loss": None, "value": "Play."},
        {"from": "gpt", "loss": False, "value": "OK."},
        {"from": "human", "loss": None, "value": "A ball.\u2028A key.\n"},
        {"from": "gpt", "loss": True, "value": "go"},
    ],
}


def write(tmp_path: Path, *records: Any) -> Path:
    path = tmp_path / "traj.jsonl"
    lines = (r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_only_agent_messages_with_loss_are_trained(tmp_path: Path) -> None:
    (got,) = read_conversations(write(tmp_path, RECORD))
    assert got.item_id == "babyai_3"
    assert [(m.is_agent, m.is_trained) for m in got.messages] == [
        (False, False),
        (True, False),
        (False, False),
        (True, True),
    ]
    assert got.messages[2].text == "A ball.\u2028A key.\n"


def test_json_lines_and_list_are_equivalent(tmp_path: Path) -> None:
    path = tmp_path / "traj.json"
    path.write_text(json.dumps([RECORD, RECORD], indent=2), encoding="utf-8")
    assert read_conversations(path) == read_conversations(write(tmp_path, RECORD, "", RECORD))


def test_record_without_item_id_is_read(tmp_path: Path) -> None:
    message = {"from": "gpt", "value": "go"}
    assert read_conversations(write(tmp_path, {"conversations": [message]})) == [
        Conversation(item_id="", messages=[Message(is_agent=True, is_trained=True, text="go")])
    ]


ASKED = {"from": "human", "value": "Q"}
ANSWERED = {"from": "gpt", "value": "A"}
MESSAGES = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": [ASKED, ANSWERED]},
        {"messages": MESSAGES},
        {"messages": [SYSTEM, *MESSAGES]},
        {"prompt": "Q", "completion": "A"},
        {"prompt": "Q", "completion": MESSAGES},
    ],
)
def test_field_system_becomes_the_first_message(tmp_path: Path, record: Any) -> None:
    (got,) = read_conversations(write(tmp_path, {**record, "system": "Be brief."}))
    texts = [(message.chat_role, message.text) for message in got.messages]
    assert texts == [("system", "Be brief."), ("user", "Q"), ("assistant", "A")]


def test_field_system_of_a_preference_is_in_both_episodes() -> None:
    record = {"prompt": "Q", "chosen": "A", "rejected": "B", "system": "Be brief."}
    pair = preference_of(record, "here")
    assert pair is not None
    for episode in pair:
        assert conversation_of(episode, "here").messages[0].text == "Be brief."


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"messages": MESSAGES, "system": ["x"]}, "record 2: 'system' is list, not text"),
        (
            {"messages": [SYSTEM, *MESSAGES], "system": "x"},
            "record 2: 'system' differs from the system message",
        ),
        (
            {"prompt": "P", "completion": MESSAGES},
            "record 2: 'completion' begins with a message of 'user' after 'prompt'",
        ),
        ('{"conversations": [', "record 2 is not JSON"),
        (42, "record 2: 'conversations' must be a list"),
        (
            {"item_id": "x"},
            "record 2: no known format. A record has 'messages'.* one has .'item_id'.$",
        ),
        ({"chosen": "a", "rejected": "b"}, "record 2: .* is a preference; give it as dpo.data"),
        ({"conversations": "hello"}, "record 2: .conversations. must be a list"),
        ({"conversations": ["hello"]}, "record 2: a message is str"),
        ({"conversations": [{"from": "system", "value": ""}]}, "record 2: a message needs 'from'"),
        ({"conversations": [{"from": "gpt", "value": None}]}, "record 2: a message needs"),
    ],
)
def test_malformed_record_is_named(tmp_path: Path, record: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_conversations(write(tmp_path, RECORD, record))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"traj\.jsonl: no such file"):
        read_conversations(tmp_path / "traj.jsonl")


def test_lone_surrogates_are_replaced_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    messages = [{"from": "human", "value": "a \ud83d"}, {"from": "gpt", "value": "b"}]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"conversations": messages}) + "\n", encoding="utf-8")
    (conversation,) = read_conversations(path)
    assert [message.text for message in conversation.messages] == ["a \ufffd", "b"]
    assert "replaced unpaired surrogates in 1 messages" in caplog.text
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_conversations(path)
