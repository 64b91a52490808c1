"""Reads the fields of messages and tools in agents' requests."""

# JSON values have no known type until they are checked here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from typing import Any

from actor.api.requests import CHOICES, invalid, read_items, unsupported
from common.formats.calls import as_call, each_text, read_arguments
from common.formats.thoughts import FIELDS
from common.text import valid_text


def read_text(content: object, place: str, *, kinds: tuple[str, ...] = ("text",)) -> str:
    """Return the text of a message; its parts are joined. Raises: ApiError."""
    param = place.partition("[")[0].partition(".")[0]
    if content is None:
        return ""
    if isinstance(content, str):
        return valid_text(content)
    if not isinstance(content, list):
        raise invalid(f"{place}: must be text", param)
    for number, each in enumerate(content):
        kind = each.get("type", kinds[0]) if isinstance(each, dict) else None
        if kind not in kinds or not isinstance(each.get("text"), str):
            raise invalid(f"{place}[{number}]: must be text, of type {' or '.join(kinds)}", param)
    return valid_text("".join(each["text"] for each in content))


def read_thoughts(message: dict[str, Any], place: str) -> str:
    """Return the thoughts of a message, "" for none. Raises: ApiError: they are no text."""
    for name in FIELDS:
        thoughts = message.get(name)
        if thoughts is None:
            continue
        if not isinstance(thoughts, str):
            raise invalid(f"{place}.{name}: must be text", place.partition("[")[0])
        return valid_text(thoughts)
    return ""


def read_tools(body: dict[str, Any], *, schema: str, inner: str = "") -> list[dict[str, Any]]:
    """Return the tools of a request in the format of chat templates; [] if `tool_choice` is none.

    Args:
        schema: the API's name for a tool's parameters.
        inner: the field of a tool that holds its name and parameters; "": the tool itself.

    Raises: ApiError.
    """
    choice = body.get("tool_choice")
    if choice not in CHOICES:
        raise unsupported("tool_choice", choice)
    found: list[dict[str, Any]] = []
    for number, each in enumerate(read_items(body, "tools")):
        if each.get("type", "custom") not in ("function", "custom"):
            raise unsupported("tools", each.get("type"), "the type must be function or custom")
        function = each.get(inner) if inner else each
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise invalid(f"tools[{number}]: must have a name", "tools")
        parameters = function.get(schema) or {"type": "object", "properties": {}}
        if not isinstance(parameters, dict):
            raise invalid(f"tools[{number}].{schema}: must be an object", "tools")
        description = str(function.get("description") or "")
        shown = {"name": name, "description": description, "parameters": parameters}
        found.append({"type": "function", "function": each_text(shown, valid_text)})
    return [] if choice in ("none", {"type": "none"}) else found


def read_call(
    name: object, arguments: object, place: str, *, number: object = None
) -> dict[str, Any]:
    """Return a call from the agent's history in the format of chat templates.

    Args:
        number: id of the call, which the field `id` of the result keeps; None: it has none.

    Raises: ApiError.
    """
    param = place.partition("[")[0]
    if not isinstance(name, str) or not name:
        raise invalid(f"{place}: must have a name", param)
    try:
        values = read_arguments(arguments)
    except ValueError as error:
        raise invalid(f"{place}: arguments: {error}", param) from error
    call = as_call(name, values)
    if isinstance(number, str) and number:
        call = {**call, "id": number}
    return each_text(call, valid_text)
