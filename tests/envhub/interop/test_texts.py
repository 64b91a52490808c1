"""Laws of what an agent's text may send to programs of others."""

from typing import Any

import pytest

from envhub.env import action_text
from envhub.interop.texts import BadAction, check_sendable, is_call, parse_json, parse_tool_call


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
    assert parse_json('Thought: {x}\nAction: {"a": "x. Action: b"}') == {"a": "x. Action: b"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"The answer is \boxed{42}.", False),
        ("Action: {1, 2}", False),
        ('{"answer": 7}', False),
        ('Thought: {"tool": "add"}\nAction: Done.', False),
        ('Action: {"id": 1, "tool": "add"}', True),
        ('I call {"tool": "add"}', True),
        ('Action: {"tool": "add", "arguments": {"a": 1}', True),
        ('Action: {"tool": "add", "arguments": {"a": "x. Action: b', True),
    ],
)
def test_text_with_a_brace_is_a_call_only_with_a_key_of_calls(text: str, expected: bool) -> None:
    assert is_call(text) is expected


def test_arguments_may_be_json_text_and_must_be_an_object() -> None:
    assert parse_tool_call('{"tool": "a", "arguments": "{\\"b\\": 1}"}', ["a"]) == ("a", {"b": 1})
    for arguments in ("[1]", '"b"', "3", "null", '"[1]"'):
        with pytest.raises(BadAction, match='"arguments" must be a JSON object'):
            parse_tool_call(f'{{"tool": "a", "arguments": {arguments}}}', ["a"])
