"""Laws of parsing an action from an answer, and of answers without one."""

import pytest

from actor.policy import PolicyConfig, PolicySection
from common.config.actor import ActorSection, AgentFormat, AgentOptions, ContextKind
from common.config.envhub import EnvhubSection
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.formats.answers import (
    BARE,
    CALLS,
    REACT,
    TEXT_ANSWERS,
    TOOL_FORM,
    read_any,
    read_react,
    sent,
    tools_text,
    worded,
)

CALL = '<tool_call>\n{"name": "maze", "arguments": {"action": "go"}}\n</tool_call>'
LLAMA = '{"name": "maze", "parameters": {"action": "go"}}'
MISTRAL = '[{"name": "maze", "arguments": {"action": "go"}, "id": "call00000"}]'
CODER = "<function=maze>\n<parameter=action>\ngo\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ("Thought:\nI see it.\n\nAction:\ngo to red ball 1", "go to red ball 1"),
        ("Action: a\nb ", "a\nb"),
        ("go to red ball 1", None),
        ("", None),
        ("Thought: x\nAction:", None),
        ("Action: a\nObservation: b\nAction: c", None),  # a whole story of its own
    ],
)
def test_react_parser_accepts_only_a_single_action(answer: str, action: str | None) -> None:
    assert read_react(answer) == action
    assert read_react(answer, is_whole=True) == (None if action is None else answer)


@pytest.mark.parametrize("given", [{"act": "up"}, {"action": 3}, {"action": " "}, {}])
def test_call_without_an_action_is_none(given: dict) -> None:
    assert sent([("maze", given)], ["maze"], has_one=True) is None


def test_only_single_known_tool_call_is_sent() -> None:
    call = ("maze", {"action": " move up "})
    assert sent([call], ["maze"], has_one=True) == "move up"
    assert sent([call], ["other"], has_one=True) is None
    assert sent([call, call], ["maze"], has_one=True) is None
    assert sent([], ["maze"], has_one=True) is None


def test_lone_surrogate_in_a_call_becomes_replacement() -> None:
    assert sent([("maze", {"action": "a\ud83d"})], ["maze"], has_one=True) == "a\ufffd"


def test_letters_in_a_call_stay_unescaped() -> None:
    told = sent([("note", {"text": "\u5b57"})], ["note"], has_one=False)
    assert told == '{"tool": "note", "arguments": {"text": "\u5b57"}}'


def test_environment_tools_are_called_by_name() -> None:
    told = sent([("add", {"a": 1})], ["add", "sub"], has_one=False)
    assert told == '{"tool": "add", "arguments": {"a": 1}}'


def test_instruction_gains_missing_format_description_once() -> None:
    assert worded(AgentFormat.PLAIN, "Play.") == "Play."
    assert worded(AgentFormat.REACT, "Play.") == f"Play.\n\n{REACT}"
    assert worded(AgentFormat.REACT, "") == REACT
    assert worded(AgentFormat.PLAIN, f"Play.\n{BARE}") == f"Play.\n{BARE}"
    assert worded(AgentFormat.REACT, f"Play.\n{BARE}") == f"Play.\n\n{REACT}"
    assert worded(AgentFormat.FUNCTION_CALL, f"Play.\n{BARE}") == f"Play.\n\n{CALLS}"
    assert worded(AgentFormat.REACT, "Say Action: and it.") == "Say Action: and it."
    assert worded(AgentFormat.FUNCTION_CALL, "Play.") == f"Play.\n\n{CALLS}"
    told = f"Add.\n{TOOL_FORM}\nQuickly."  # of tools that no template lists
    assert worded(AgentFormat.REACT, told) == told
    assert worded(AgentFormat.FUNCTION_CALL, told) == f"{told}\n\n{CALLS}"


def test_template_listed_tools_are_not_repeated() -> None:
    schema = {"properties": {"a": {"type": "integer"}}}
    tools = [{"name": n, "description": "Tools:\n- x", "input_schema": schema} for n in "ab"]
    for form in (TOOL_FORM, TOOL_FORM + TEXT_ANSWERS):
        told = f"Add.\n{tools_text(tools)}\n{form}\nQuickly."
        assert "- a: Tools: - x arguments: {" in told
        assert worded(AgentFormat.PLAIN, told) == worded(AgentFormat.REACT, told) == told
        assert worded(AgentFormat.FUNCTION_CALL, told) == f"Add.\n{CALLS}\nQuickly."


def test_replay_parses_actions_of_every_format() -> None:
    assert read_any(AgentFormat.PLAIN, "go") == "go"
    assert read_any(AgentFormat.REACT, "Thought: x\nAction: go") == "go"
    assert read_any(AgentFormat.REACT, "go") == ""
    for call in (CALL, LLAMA, MISTRAL, CODER):
        assert read_any(AgentFormat.FUNCTION_CALL, call) == "go"
    assert read_any(AgentFormat.FUNCTION_CALL, CALL + CALL) == ""
    assert read_any(AgentFormat.FUNCTION_CALL, "go") == ""
    own = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    told = '{"tool": "add", "arguments": {"a": 1}}'
    assert read_any(AgentFormat.FUNCTION_CALL, own) == told


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"envhub": EnvhubSection(style="agentgym")}, "envhub.style='agentgym'"),
        ({"policy": PolicySection(url="http://127.0.0.1:1/v1", model="m")}, "policy.url="),
    ],
)
def test_function_call_conflicts_are_refused_by_name(changes: dict, named: str) -> None:
    PolicyConfig(**changes)
    with pytest.raises(ConfigError, match=named):
        PolicyConfig(actor=ActorSection(format=AgentFormat.FUNCTION_CALL), **changes)


@pytest.mark.parametrize("own", [{"plan": True}, {"reflect_on_invalid": True}])
def test_plans_and_reflections_are_refused_beside_branches(own: dict) -> None:
    with pytest.raises(ConfigError, match=r"actor\.context='fold': .* with actor\.plan"):
        RunConfig(actor=ActorSection(context=ContextKind.FOLD, **own))


@pytest.mark.parametrize(
    "own", [{"format": AgentFormat.REACT}, {"plan": True}, {"reflect_every": 2}]
)
def test_agents_with_own_loop_reject_a_format(own: dict) -> None:
    with pytest.raises(ConfigError, match=rf"actor\.{next(iter(own))}.*actor\.endpoint=true"):
        RunConfig(actor=ActorSection(endpoint=True, agent=["x"], **own))


def test_answer_format_identifies_an_evaluation() -> None:
    assert AgentOptions(context_turns=9).of_answers() == {}
    told = AgentOptions(format=AgentFormat.REACT, plan=True)
    assert told.of_answers() == {"format": "react", "plan": True}
