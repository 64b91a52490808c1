"""Laws of what an agent's text may send to programs of others."""

from typing import Any

import pytest

from envhub.env import action_text
from envhub.interop.texts import BadAction, check_sendable, parse_json, parse_tool_call


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), "\ud800", nested(64), nested(20_000), 10**309, "x" * (17 << 20)],
    ids=["nan", "infinite", "half", "deep", "deeper", "large number", "long"],
)
def test_unsendable_value_is_a_bad_action(value: Any) -> None:
    with pytest.raises(BadAction, match="be sent"):
        check_sendable(value)


def test_valid_json_is_sendable() -> None:
    check_sendable({"a": nested(62), "b": 10**308, "c": "\u5b57\0", "d": None})


@pytest.mark.parametrize(
    "text", ["[" * 50_000, '{"a":' * 50_000, f'{{"a": {"9" * 5000}}}', '{"tool": [[1]]}', "{", ""]
)
def test_json_without_call_has_reason(text: str) -> None:
    with pytest.raises(BadAction):
        parse_tool_call(text, ["note"])


def test_json_with_many_digits_is_a_bad_action() -> None:
    with pytest.raises(BadAction, match="no JSON"):
        parse_json(f'{{"a": {"9" * 5000}}}')


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("Thought: x\nAction: go", "go"),
        ("Thought: x.Action: go", "go"),
        ("Action: a Action: b", "b"),
        ("SELECT 'Action: x'", "SELECT 'Action: x'"),
        ('say "a\\nAction: b"', 'say "a\\nAction: b"'),
    ],
)
def test_label_in_a_string_belongs_to_the_action(text: str, action: str) -> None:
    assert action_text(text) == action


def test_label_in_a_field_belongs_to_the_action() -> None:
    assert parse_json('{"a": "go. Action: b"}') == {"a": "go. Action: b"}
    assert parse_json('Thought: x\nAction: {"a": "Action: b"}') == {"a": "Action: b"}
