"""Tool calls as models of Hermes and Qwen write them, JSON in `<tool_call>...</tool_call>`."""

# What JSON holds is of no known type until it is checked here:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import json
from collections.abc import Callable
from typing import Any, NoReturn

BEGIN, END = "<tool_call>", "</tool_call>"
PROBE: dict[str, Any] = {"name": "probe_name", "arguments": {"probe_key": "probe_value"}}


def each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return what JSON holds with each of its texts changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [each_text(each, change) for each in value]
    if isinstance(value, dict):
        return {change(key): each_text(each, change) for key, each in value.items()}
    return value


def as_call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a call as chat templates take it."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def read_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call. Raises: ValueError: no JSON object."""
    found = json.loads(text or "{}", parse_constant=_refused)
    if not isinstance(found, dict):
        raise ValueError("no JSON object")
    return found


def read_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Return what a policy said beside its calls, and these in order, as chat templates take them.

    Where one cannot be read, there are none, and the text is whole: it is the agent's to judge.
    """
    said, *parts = text.split(BEGIN)
    calls: list[dict[str, Any]] = []
    rest = [said.strip()]
    try:
        for part in parts:
            body, end, after = part.rpartition(END)
            call = read_arguments((body if end else part).strip())
            name, arguments = call["name"], call["arguments"]
            if not isinstance(name, str) or not isinstance(arguments, dict):
                return text.strip(), []
            calls.append(as_call(name, arguments))
            rest.append(after.strip() if end else "")
    except (ValueError, KeyError, RecursionError):
        return text.strip(), []
    return "\n".join(filter(None, rest)), calls


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
