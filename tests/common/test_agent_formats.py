"""Laws of how an action is found in an answer, and of what is none."""

import pytest

from common.agent_formats import (
    CALLS,
    NAME,
    REACT,
    TOOL_FORM,
    VALUE,
    CallForm,
    read_any,
    read_react,
    sent,
    worded,
)
from common.config.evaluation import AgentFormat, AgentOptions, ContextKind
from common.config.run_config import ActorSection, EnvhubSection, PolicySection, RunConfig
from common.errors import ConfigError

QWEN = f'<tool_call>\n{{"name": "{NAME}", "arguments": {{"action": "{VALUE}"}}}}\n</tool_call>'
LLAMA = f'{{"name": "{NAME}", "parameters": {{"action": "{VALUE}"}}}}'
MISTRAL = f'[TOOL_CALLS] [{{"name": "{NAME}", "arguments": {{"action": "{VALUE}"}}, "id": "c"}}]'
AS_TEXT = f'<call>{{"name": "{NAME}", "arguments": "{{\\"action\\": \\"{VALUE}\\"}}"}}</call>'
XML = (
    f"<tool_call>\n<function={NAME}>\n<parameter=action>\n{VALUE}\n</parameter>\n</function>\n"
    "</tool_call>"
)
FORMS = {"qwen": QWEN, "llama": LLAMA, "mistral": MISTRAL, "as_text": AS_TEXT, "xml": XML}
ANY_FORM = pytest.mark.parametrize("call", FORMS.values(), ids=FORMS)


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
def test_react_reads_the_one_action_and_no_other(answer: str, action: str | None) -> None:
    assert read_react(answer) == action
    assert read_react(answer, is_whole=True) == (None if action is None else answer)


@ANY_FORM
def test_a_call_is_read_as_the_template_writes_it(call: str) -> None:
    form = CallForm.of(call)
    mine = call.replace(NAME, "maze").replace(VALUE, "move up")
    for answer in (mine, f"I go up.\n{mine}\n", mine.replace("\n", " ")):
        assert form.read(answer) == ("maze", {"action": "move up"}), answer
    assert sent(form.read(mine), ["maze"], has_one=True) == "move up"
    assert sent(form.read(mine), ["other"], has_one=True) is None


@ANY_FORM
def test_what_is_not_one_call_is_no_action(call: str) -> None:
    form = CallForm.of(call)
    mine = call.replace(NAME, "maze").replace(VALUE, "move up")
    for answer in ("", "move up", mine[: len(mine) // 2], mine + mine, "{" * 5000, "[" * 9000):
        assert sent(form.read(answer), ["maze"], has_one=True) is None, answer[:80]


@pytest.mark.parametrize("arguments", ['{"act": "up"}', '{"action": 3}', '{"action": " "}', "[]"])
def test_a_call_without_an_action_is_none(arguments: str) -> None:
    call = CallForm.of(QWEN).read(f'<tool_call>{{"name": "maze", "arguments": {arguments}}}')
    assert sent(call, ["maze"], has_one=True) is None


def test_half_a_character_in_a_call_is_sent_as_a_text() -> None:
    call = CallForm.of(LLAMA).read('{"name": "maze", "parameters": {"action": "a\\ud83d"}}')
    assert sent(call, ["maze"], has_one=True) == "a\ufffd"


def test_tools_of_an_environment_are_called_by_name() -> None:
    call = CallForm.of(QWEN).read('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    assert sent(call, ["add", "sub"], has_one=False) == '{"tool": "add", "arguments": {"a": 1}}'


def test_a_template_whose_calls_cannot_be_read_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"actor\.format=function_call: .* not found"):
        CallForm.of("<tool_call>something</tool_call>")


def test_an_instruction_says_the_form_unless_it_does_already() -> None:
    assert worded(AgentFormat.PLAIN, "Play.") == "Play."
    assert worded(AgentFormat.REACT, "Play.") == f"Play.\n\n{REACT}"
    assert worded(AgentFormat.REACT, "") == REACT
    assert worded(AgentFormat.REACT, "Say Action: and it.") == "Say Action: and it."
    assert worded(AgentFormat.FUNCTION_CALL, "Play.") == f"Play.\n\n{CALLS}"
    told = f"Add.\n{TOOL_FORM}\nQuickly."
    assert worded(AgentFormat.REACT, told) == told
    assert worded(AgentFormat.FUNCTION_CALL, told) == f"Add.\n{CALLS}\nQuickly."


def test_a_replay_reads_the_actions_of_each_format() -> None:
    assert read_any(AgentFormat.PLAIN, "go") == "go"
    assert read_any(AgentFormat.REACT, "Thought: x\nAction: go") == "go"
    assert read_any(AgentFormat.REACT, "go") == ""
    for call in (QWEN, LLAMA):
        assert read_any(AgentFormat.FUNCTION_CALL, call.replace(VALUE, "go")) == "go"
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
def test_what_calls_cannot_go_with_is_refused_by_name(changes: dict, named: str) -> None:
    RunConfig(**changes)
    with pytest.raises(ConfigError, match=named):
        RunConfig(actor=ActorSection(format=AgentFormat.FUNCTION_CALL), **changes)


@pytest.mark.parametrize("own", [{"plan": True}, {"reflect_on_invalid": True}])
def test_plans_and_reflections_are_refused_beside_branches(own: dict) -> None:
    with pytest.raises(ConfigError, match=r"actor\.context='fold': .* beside actor\.plan"):
        RunConfig(actor=ActorSection(context=ContextKind.FOLD, **own))


@pytest.mark.parametrize(
    "own", [{"format": AgentFormat.REACT}, {"plan": True}, {"reflect_every": 2}]
)
def test_agents_with_a_loop_of_their_own_are_given_no_format(own: dict) -> None:
    with pytest.raises(ConfigError, match=rf"actor\.{next(iter(own))}.*actor\.endpoint=true"):
        RunConfig(actor=ActorSection(endpoint=True, agent=["x"], **own))


def test_an_evaluation_in_another_format_is_another_one() -> None:
    assert AgentOptions(context_turns=9).of_answers() == {}
    told = AgentOptions(format=AgentFormat.REACT, plan=True)
    assert told.of_answers() == {"format": "react", "plan": True}
