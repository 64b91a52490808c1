"""Laws of finding the action in a model's text, as AgentGym's clients do."""

import pytest

from envhub.agentgym.dialects import DIALECTS
from envhub.agentgym.remote import extract
from envhub.env import Style


@pytest.mark.parametrize(
    ("name", "text", "action"),
    [
        ("textcraft", "Thought:\nno\n\nAction:\n  get 2 oak_log!\nand more", "get 2 oaklog"),
        ("textcraft", "get 2 oak log", ""),
        ("textcraft", "Action:\n```\nget 1 x\n```", ""),
        ("babyai", "Action: go to   red-ball 1", "go to redball 1"),
        ("sciworld", "Action: a\nThought: b\nAction:\n look around \n</s>", "look around"),
        ("sciworld", "look around", ""),
        ("webshop", "so: search[red shoe]", "so: search[red shoe]"),
        ("alfworld", "Action: line one\nline two", "line one\nline two"),
        ("maze", "Action: move up\nAction: move down", "move up"),
        ("wordle", " s h i r e </s>", "s h i r e"),
        ("sqlgym", "Action: ```sql\nSELECT 1;\n``` done", "SELECT 1;"),
        ("sqlgym", "SELECT 1 ``` x", "SELECT 1"),
        ("searchqa", "<search>x</search>", "<search>x</search>"),
        ("weather", "Action: finish with Action Input: {}", "Action: finish with Action Input: {}"),
        ("webarena", "well ```click [1]``` so", "well ```click [1]``` so"),
    ],
)
def test_action_is_found_as_agentgym_finds_it(name, text, action):
    extracted = extract(DIALECTS[name], text, Style.AGENTGYM)
    assert (extracted.action, extracted.complaint) == (action, "")


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("babyai", "Action: a\nAction: b", "Error: Only one 'Action' is allowed per response."),
        ("webarena", "click [1]", "Cannot parse action from response."),
    ],
)
def test_text_without_one_action_is_complained_about(name, text, complaint):
    extracted = extract(DIALECTS[name], text, Style.AGENTGYM)
    assert extracted.complaint.startswith(complaint)
    assert extracted.action == ""


@pytest.mark.parametrize(
    ("name", "action"),
    [
        ("textcraft", "get 2 oak log"),
        ("sciworld", "get 2 oak log"),
        ("webarena", "```get 2 oak log```"),
        ("sqlgym", "get 2 oak log"),
    ],
)
def test_bare_text_is_an_action_in_compact_style(name, action):
    assert extract(DIALECTS[name], "get 2 oak log\n", Style.COMPACT).action == action
