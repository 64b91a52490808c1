"""Extracts the action from an agent's answer: plain text, ReAct's `Action:`, or a tool call.

An answer that cannot be parsed has no action. The actor then sends "" to the environment, which
refuses it with its own message, and the turn counts as invalid. With tools of the environment, an
answer without a call is a text, which the environment accepts or refuses.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.config.actor import AgentFormat
from common.errors import ConfigError
from common.formats.calls import KEYS, NAME, VALUES, Call, CallForm
from common.text import valid_text

MARK = "Action:"
REACT = "Answer in this form:\nThought:\nyour thoughts.\n\nAction:\nyour next action"
BARE = "Answer with one action and nothing else."  # Last line of the style `instructed`.
CALLS = "Act by calling a tool, one call in each answer."
TOOL_FORM = """\
Each turn calls one tool, as JSON after "Action:":
Action: {"tool": "<its name>", "arguments": {...}}"""  # Used if the template has no tools.
NO_TOOLS = "actor.format=function_call: the chat template of model.path has no tools"
ARGUMENT = "action"  # Argument of the single tool of an environment with text actions.
TEXT_ANSWERS = "\nWhat is no call is your answer, and ends the episode."
LISTED = re.compile(  # Matches the list of `tools_text`.
    rf"Tools:\n(?:- .*\n)*{re.escape(TOOL_FORM)}(?:{re.escape(TEXT_ANSWERS)})?"
)
# Matches the beginning of a call in the form of `TOOL_FORM`.
CALL_BEGIN = re.compile(r"""\{\s*["'](?:tool|tool_name|name|arguments)["']\s*:""")
ANY_FORM = (  # Forms of calls to try if the chat template is unknown.
    CallForm(),
    CallForm(arguments_key="parameters"),
    CallForm.of(  # The form of Qwen3-Coder.
        f"<function={NAME}> <parameter={KEYS[0]}> {VALUES[0]} </parameter>"
        f"<parameter={KEYS[1]}> {VALUES[1]} </parameter> </function>",
        f"<function={NAME}> </function>",
    ),
)


def worded(kind: AgentFormat, instruction: str) -> str:
    """Return an environment's instruction with the answer format added, unless it has one.

    For tool calls, the format replaces a list of tools in the instruction, because the chat
    template lists the tools.
    """
    if kind is not AgentFormat.PLAIN:
        instruction = instruction.removesuffix(BARE).rstrip()
    if kind is AgentFormat.PLAIN or (kind is AgentFormat.REACT and MARK in instruction):
        return instruction
    rules = REACT if kind is AgentFormat.REACT else CALLS
    if rules is CALLS and LISTED.search(instruction) is not None:
        return LISTED.sub(CALLS, instruction)
    return f"{instruction}\n\n{rules}" if instruction else rules


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the list of tools for a prompt: name, description and input_schema of each."""
    lines = ["Tools:"]
    for tool in tools:
        schema: dict[str, Any] = tool.get("input_schema") or tool.get("inputSchema") or {}
        described = " ".join(str(tool.get("description") or "").split())
        fields = json.dumps(schema.get("properties", {}), ensure_ascii=False)
        lines.append(f"- {tool['name']}: {described} arguments: {fields}")
    return "\n".join(lines)


def tools_instruction(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the instruction of an environment with tools: their list, and the form of a call."""
    listed = tools_text([{"input_schema": each.get("parameters"), **each} for each in tools])
    return f"{listed}\n{TOOL_FORM}{TEXT_ANSWERS}"


def read_react(text: str, *, is_whole: bool = False) -> str | None:
    """Return the text after the only `Action:` of an answer; None: not exactly one action.

    Args:
        is_whole: return the whole answer, since the environment parses `Action:` itself.
    """
    _, *actions = text.split(MARK)
    if len(actions) != 1 or not actions[0].strip():
        return None
    return text if is_whole else actions[0].strip()


def in_react(action: str) -> str:
    """Return a ReAct answer with an action and no thought."""
    return f"{MARK}\n{action}"


def check_tools(kind: AgentFormat, folder: Path, *, template: Path | None = None) -> None:
    """Check that the chat template of a model supports tools, if `kind` needs them.

    Args:
        template: the file of `model.chat_template`; None: the template in the model's folder.

    Raises: ConfigError: the template does not contain the word "tools".
    """
    usual = [folder / "chat_template.jinja", folder / "tokenizer_config.json"]
    files = [template] if template else usual
    texts = [each.read_text(encoding="utf-8") for each in files if each.is_file()]
    if kind is AgentFormat.FUNCTION_CALL and not any("tools" in text for text in texts):
        raise ConfigError(f"{NO_TOOLS}: {folder}")


def sent(calls: Sequence[Call], names: Sequence[str], *, has_one: bool) -> str | None:
    """Return the action to send for the calls of an answer; None: not exactly one valid call.

    Args:
        names: names of the existing tools.
        has_one: the environment is a single tool, and the action is its argument `action`. If
            False, the environment has its own tools, and the action is
            {"tool": name, "arguments": {...}}.
    """
    if len(calls) != 1 or calls[0][0] not in names:
        return None
    name, arguments = calls[0]
    if not has_one:
        return valid_text(json.dumps({"tool": name, "arguments": arguments}, ensure_ascii=False))
    action = arguments.get(ARGUMENT)
    return (valid_text(action.strip()) or None) if isinstance(action, str) else None


def read_any(kind: AgentFormat, answer: str, *, has_own_tools: bool = False) -> str:
    """Return the action of an answer for any chat template, "" for none.

    An environment that parses `Action:` itself received the whole answer instead.

    Args:
        has_own_tools: no call is that of a single tool that stands for the environment.
    """
    if kind is AgentFormat.PLAIN:
        return answer
    if kind is AgentFormat.REACT:
        return read_react(answer) or ""
    readings = [form.read(answer)[1] for form in ANY_FORM]
    calls = max(readings, key=len)  # A form that cannot parse the answer finds no calls.
    names = [name for name, _ in calls]
    has_one = not has_own_tools and any(given.keys() == {ARGUMENT} for _, given in calls)
    return sent(calls, names, has_one=has_one) or ""
