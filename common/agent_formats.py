"""How an agent's answer says its action: as it is, as ReAct's `Action:`, or as a call of a tool.

What cannot be read is no action: whoever plays sends "" instead, which the environment refuses in
its own words, and the turn counts as invalid.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from common.config.evaluation import AgentFormat
from common.errors import ConfigError
from common.text import valid_text

MARK = "Action:"
REACT = "Answer in this form:\nThought:\nyour thoughts.\n\nAction:\nyour next action"
CALLS = "Act by calling a tool, one call in each answer."
TOOL_FORM = """\
Each turn calls one tool, as JSON after "Action:":
Action: {"tool": "<its name>", "arguments": {...}}"""  # as environments of tools are told otherwise
NO_TOOLS = "actor.format=function_call: the chat template of model.path has no tools"
ARGUMENT = "action"  # of the one tool that an environment of texts is
NAME, VALUE = "probe_of_a_name", "probe of an action"  # that a template's call is found out with

Arguments = dict[str, Any]


def worded(kind: AgentFormat, instruction: str) -> str:
    """Return an environment's instruction with how to answer, where it does not say so itself."""
    if kind is AgentFormat.PLAIN or (kind is AgentFormat.REACT and MARK in instruction):
        return instruction
    how = REACT if kind is AgentFormat.REACT else CALLS
    if how is CALLS and TOOL_FORM in instruction:
        return instruction.replace(TOOL_FORM, CALLS)
    return f"{instruction}\n\n{how}" if instruction else how


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How a chat template writes a call: as JSON behind a mark, or between pieces of text.

    Example (Qwen): <tool_call>{"name": "maze", "arguments": {"action": "move up"}}</tool_call>
    """

    mark: str = ""  # before the JSON; "": nothing
    name_key: str = "name"
    arguments_key: str = "arguments"
    pattern: re.Pattern[str] | None = None  # of a call of one argument that is no JSON

    @classmethod
    def of(cls, call: str) -> "CallForm":
        """Return the form of a template's call of NAME with the argument VALUE.

        Raises: ConfigError: name and argument are not found in it.
        """
        start = call.find("{")
        if (told := _json_object(call, start)) is not None:
            found, _ = told
            names = [key for key, value in found.items() if value == NAME]
            arguments = [k for k, v in found.items() if _as_object(v) == {ARGUMENT: VALUE}]
            if names and arguments:
                mark = call[:start].strip()
                return cls(mark=mark, name_key=names[0], arguments_key=arguments[0])
        before, is_named, rest = call.partition(NAME)
        between, has_value, after = rest.partition(VALUE)
        is_framed = before.strip() and between.strip() and after.strip()
        if not (is_named and has_value and is_framed):
            raise ConfigError(
                "actor.format=function_call: in how the chat template of model.path writes a call"
                f" its name and argument are not found: {call!r:.300}"
            )
        mark, *pieces = before.split()[-1], _loosely(between), _loosely(after)
        pattern = r"\s*(?P<name>\S+?)\s*{}(?P<value>.*?){}".format(*pieces)
        return cls(mark=mark, pattern=re.compile(pattern, re.DOTALL))

    def read(self, text: str) -> tuple[str, Arguments] | None:
        """Return the tool that an answer calls, and with what; None: it is not one call."""
        _, found, rest = text.partition(self.mark) if self.mark else ("", "", text)
        if self.mark and (not found or self.mark in rest):
            return None
        if self.pattern is not None:
            one = self.pattern.match(rest)
            return (one["name"], {ARGUMENT: one["value"].strip()}) if one else None
        told = _json_object(rest, rest.find("{"))
        if told is None or (not self.mark and "{" in rest[told[1] :]):
            return None
        call = told[0]
        name, arguments = call.get(self.name_key), _as_object(call.get(self.arguments_key))
        return (name, arguments) if isinstance(name, str) and arguments is not None else None


def check_tools(kind: AgentFormat, folder: Path) -> None:
    """Return if the chat template in a model's folder may know tools, or need not.

    Raises: ConfigError: it does not so much as name them.
    """
    files = [folder / "chat_template.jinja", folder / "tokenizer_config.json"]
    texts = [each.read_text(encoding="utf-8") for each in files if each.is_file()]
    if kind is AgentFormat.FUNCTION_CALL and not any("tools" in text for text in texts):
        raise ConfigError(f"{NO_TOOLS}: {folder}")


def sent(call: tuple[str, Arguments] | None, names: list[str], *, has_one: bool) -> str | None:
    """Return what an environment is sent for a call; None: it names no tool, or says no action.

    Args:
        names: of the tools that there are.
        has_one: the one tool is the environment itself, and is sent its argument `action`; tools
            of its own it is sent as {"tool": name, "arguments": {...}}.
    """
    if call is None or call[0] not in names:
        return None
    if not has_one:
        return valid_text(json.dumps({"tool": call[0], "arguments": call[1]}))
    action = call[1].get(ARGUMENT)
    return (valid_text(action.strip()) or None) if isinstance(action, str) else None


def read_any(kind: AgentFormat, answer: str) -> str:
    """Return what an answer of a run has sent, whatever its chat template; "" for no action.

    Environments that read `Action:` themselves were sent the same in other words.
    """
    if kind is AgentFormat.PLAIN:
        return answer
    if kind is AgentFormat.REACT:
        return read_react(answer) or ""
    called = CallForm().read(answer) or CallForm(arguments_key="parameters").read(answer)
    if called is None:
        return ""
    has_one = called[1].keys() == {ARGUMENT}  # else the environment has tools of its own
    return sent(called, [called[0]], has_one=has_one) or ""


def _json_object(text: str, start: int) -> tuple[dict[str, Any], int] | None:
    """Return the JSON object that begins at `start`, and where it ends."""
    if start < 0:
        return None
    try:
        found, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return (cast(dict[str, Any], found), end) if isinstance(found, dict) else None


def _as_object(value: object) -> Arguments | None:
    """Return arguments, which some templates write as a text of JSON; None: they are neither."""
    if isinstance(value, str):
        told = _json_object(value, 0)
        return told[0] if told is not None else None
    return cast(Arguments, value) if isinstance(value, dict) else None


def _loosely(piece: str) -> str:
    """Return a pattern of a piece of text, whatever space is in it."""
    return r"\s*".join(map(re.escape, piece.split()))
