"""How an agent's answer says its action: as it is, as ReAct's `Action:`, or as a call of a tool.

What cannot be read is no action: whoever plays sends "" instead, which the environment refuses in
its own words, and the turn counts as invalid.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.config.evaluation import AgentFormat
from common.errors import ConfigError
from common.formats.calls import KEYS, NAME, VALUES, Call, CallForm
from common.text import valid_text

MARK = "Action:"
REACT = "Answer in this form:\nThought:\nyour thoughts.\n\nAction:\nyour next action"
CALLS = "Act by calling a tool, one call in each answer."
TOOL_FORM = """\
Each turn calls one tool, as JSON after "Action:":
Action: {"tool": "<its name>", "arguments": {...}}"""  # as environments of tools are told otherwise
NO_TOOLS = "actor.format=function_call: the chat template of model.path has no tools"
ARGUMENT = "action"  # of the one tool that an environment of texts is
TEXT_ANSWERS = "\nWhat is no call is your answer, and ends the episode."
LISTED = re.compile(  # as `tools_text` lists them
    rf"Tools:\n(?:- .*\n)*{re.escape(TOOL_FORM)}(?:{re.escape(TEXT_ANSWERS)})?"
)
ANY_FORM = (  # of calls, where the chat template is not known
    CallForm(),
    CallForm(arguments_key="parameters"),
    CallForm.of(  # Qwen3-Coder's
        f"<function={NAME}> <parameter={KEYS[0]}> {VALUES[0]} </parameter>"
        f"<parameter={KEYS[1]}> {VALUES[1]} </parameter> </function>",
        f"<function={NAME}> </function>",
    ),
)


def worded(kind: AgentFormat, instruction: str) -> str:
    """Return an environment's instruction with how to answer, where it does not say so itself.

    Where tools are listed that the chat template lists itself, they are left to it.
    """
    if kind is AgentFormat.PLAIN or (kind is AgentFormat.REACT and MARK in instruction):
        return instruction
    how = REACT if kind is AgentFormat.REACT else CALLS
    if how is CALLS and LISTED.search(instruction) is not None:
        return LISTED.sub(CALLS, instruction)
    return f"{instruction}\n\n{how}" if instruction else how


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return what an agent is told of its tools: name, description, input_schema of each."""
    lines = ["Tools:"]
    for tool in tools:
        schema: dict[str, Any] = tool.get("input_schema") or tool.get("inputSchema") or {}
        described = " ".join(str(tool.get("description") or "").split())
        fields = json.dumps(schema.get("properties", {}), ensure_ascii=False)
        lines.append(f"- {tool['name']}: {described} arguments: {fields}")
    return "\n".join(lines)


def read_react(text: str, *, is_whole: bool = False) -> str | None:
    """Return what follows `Action:` in an answer that says it once; None: there is no one action.

    Args:
        is_whole: return the answer as it is: the environment reads `Action:` itself.
    """
    _, *actions = text.split(MARK)
    if len(actions) != 1 or not actions[0].strip():
        return None
    return text if is_whole else actions[0].strip()


def in_react(action: str) -> str:
    """Return an answer that says an action and no thought."""
    return f"{MARK}\n{action}"


def check_tools(kind: AgentFormat, folder: Path) -> None:
    """Return if the chat template in a model's folder may know tools, or need not.

    Raises: ConfigError: it does not so much as name them.
    """
    files = [folder / "chat_template.jinja", folder / "tokenizer_config.json"]
    texts = [each.read_text(encoding="utf-8") for each in files if each.is_file()]
    if kind is AgentFormat.FUNCTION_CALL and not any("tools" in text for text in texts):
        raise ConfigError(f"{NO_TOOLS}: {folder}")


def sent(calls: Sequence[Call], names: Sequence[str], *, has_one: bool) -> str | None:
    """Return what an environment is sent for calls; None: they are not one of an action.

    Args:
        names: of the tools that there are.
        has_one: the one tool is the environment itself, and is sent its argument `action`; tools
            of its own it is sent as {"tool": name, "arguments": {...}}.
    """
    if len(calls) != 1 or calls[0][0] not in names:
        return None
    name, arguments = calls[0]
    if not has_one:
        return valid_text(json.dumps({"tool": name, "arguments": arguments}, ensure_ascii=False))
    action = arguments.get(ARGUMENT)
    return (valid_text(action.strip()) or None) if isinstance(action, str) else None


def read_any(kind: AgentFormat, answer: str) -> str:
    """Return what an answer of a run has sent, whatever its chat template; "" for no action.

    Environments that read `Action:` themselves were sent the same in other words.
    """
    if kind is AgentFormat.PLAIN:
        return answer
    if kind is AgentFormat.REACT:
        return read_react(answer) or ""
    found = [form.read(answer)[1] for form in ANY_FORM]
    calls = max(found, key=len)  # of forms that cannot read it, none
    names = [name for name, _ in calls]
    has_one = any(given.keys() == {ARGUMENT} for _, given in calls)  # else it has its own tools
    return sent(calls, names, has_one=has_one) or ""
