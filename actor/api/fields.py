"""Reads the fields of messages and tools in agents' requests."""

# JSON values have no known type until they are checked here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from typing import Any

from actor.api.requests import (
    CHOICES,
    LABEL,
    PolicyRequest,
    arguments_text,
    check_part,
    invalid,
    log_ignored,
    read_items,
    unsupported,
)
from actor.formats.thoughts import FIELDS
from common.formats.calls import as_call, each_text, read_arguments
from common.text import valid_text

# Labels of a part of a message.
PART_LABELS: dict[str, str] = dict.fromkeys(("annotations", "citations", "logprobs"), LABEL)
TOOL_LABELS = {
    "strict": "the policy's calls are not limited to the schema",
    "format": "the policy's input of a tool is not limited to a grammar",
    "defer_loading": "all tools are shown at once",
    "eager_input_streaming": "a stream sends a call when the answer is complete",
}
TOOL_REFUSED: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "async": (False,),
    "input_examples": (),
    "output_schema": (),
}
# Tools that the provider executes and that the model may leave out.
SEARCHES = ("web_search", "web_fetch", "image_generation")
THINKING_BLOCKS = "thinking_blocks"  # LiteLLM's field for the thoughts in Anthropic's form.
FREEFORM = {  # The parameters of a tool whose input is plain text.
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The input, as plain text."}},
    "required": ["input"],
}


def read_text(content: object, place: str, *, kinds: tuple[str, ...] = ("text",)) -> str:
    """Return the text of a message; its parts are joined. Raises: ApiError."""
    param = place.partition("[")[0].partition(".")[0]
    if content is None:
        return ""
    if isinstance(content, str):
        return valid_text(content)
    if not isinstance(content, list):
        raise invalid(f"{place}: must be text", param)
    for number, part in enumerate(content):
        kind = part.get("type", kinds[0]) if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(part.get("text"), str):
            text = f"{place}[{number}]: must be text, of type {' or '.join(kinds)}"
            raise invalid(f"{text}, and not {kind!r:.40}", param)
        check_part(part, f"{place}[{number}]", {"text"}, ignored=PART_LABELS)
    return valid_text("".join(part["text"] for part in content))


def read_thoughts(message: dict[str, Any], place: str) -> str:
    """Return the thoughts of a message, "" for none. Raises: ApiError: they are no text.

    Redacted blocks have no text.
    """
    for name in FIELDS:
        thoughts = message.get(name)
        if thoughts is None:
            continue
        if not isinstance(thoughts, str):
            raise invalid(f"{place}.{name}: must be text", place.partition("[")[0])
        return valid_text(thoughts)
    blocks = read_items(message, THINKING_BLOCKS)
    texts = [block.get("thinking") for block in blocks if block.get("type") == "thinking"]
    if not all(isinstance(text, str) for text in texts):
        text = f"{place}.{THINKING_BLOCKS}: the field thinking must be text"
        raise invalid(text, place.partition("[")[0])
    return valid_text("".join(map(str, texts)))


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
    tools: list[dict[str, Any]] = []
    for place, tool in _each_tool(body, is_chat=bool(inner)):
        is_freeform = tool.get("type") == "custom" and schema != "input_schema"
        named = tool.get("custom" if is_freeform else inner) if inner else tool
        name = named.get("name") if isinstance(named, dict) else None
        if not isinstance(named, dict) or not isinstance(name, str) or not name:
            raise invalid(f"{place}: must have a name", "tools")
        shown_fields = {"name", "description", schema, *([inner, "custom"] if inner else [])}
        for part in (tool, named) if inner else (tool,):
            check_part(part, place, shown_fields, ignored=TOOL_LABELS, refused=TOOL_REFUSED)
        parameters = FREEFORM if is_freeform else named.get(schema)
        parameters = parameters or {"type": "object", "properties": {}}
        if not isinstance(parameters, dict):
            raise invalid(f"{place}.{schema}: must be an object", "tools")
        description = str(named.get("description") or "")
        shown = {"name": name, "description": description, "parameters": parameters}
        tools.append({"type": "function", "function": each_text(shown, valid_text)})
    names = [part["function"]["name"] for part in tools]
    if (double := next((n for n in namespace_of(body) if names.count(n) > 1), None)) is not None:
        raise invalid(f"tools: two tools have the name {double:.80}", "tools")
    return [] if choice in ("none", {"type": "none"}) else tools


def _each_tool(body: dict[str, Any], *, is_chat: bool = False) -> list[tuple[str, dict[str, Any]]]:
    """Return the tools that the client executes, with their places. Raises: ApiError.

    The API of chat completions has no tools that the provider executes, and no namespaces.
    """
    tools: list[tuple[str, dict[str, Any]]] = []
    for number, tool in enumerate(read_items(body, "tools")):
        place = f"tools[{number}]"
        kind = tool.get("type")
        if kind in (None, "function", "custom"):
            tools.append((place, tool))
        elif kind == "namespace" and not is_chat:
            check_part(tool, place, {"name", "tools"}, ignored=TOOL_LABELS)
            inside = _each_tool({"tools": tool.get("tools")})
            tools += [(f"{place}.{inner_place}", each) for inner_place, each in inside]
        elif isinstance(kind, str) and not is_chat and (reason := _reason_to_omit(kind, tool)):
            log_ignored(f"tools[].type={kind:.40}", reason)
        else:
            raise unsupported(
                "tools", kind, "a tool of type function or custom, with a schema, is supported"
            )
    return tools


def _reason_to_omit(kind: str, tool: dict[str, Any]) -> str:
    """Return why the policy is not offered a tool that the provider executes; "": refuse it."""
    if kind.startswith(SEARCHES):
        return "the actor runs no such tool, so the policy is not offered it"
    if kind.startswith("tool_search") and tool.get("execution") != "client":
        return "all tools are shown at once"
    return ""


def freeform_names(asked: PolicyRequest) -> set[str]:
    """Return the names of the tools whose input is plain text, in OpenAI's APIs."""
    tools = [tool for _, tool in _each_tool(asked.body)] if asked.tools else []
    return {(each.get("custom") or each)["name"] for each in tools if each.get("type") == "custom"}


def namespace_of(body: dict[str, Any]) -> dict[str, str]:
    """Return the namespace of each tool that is in one, for a body that was checked."""
    return {
        inside["name"]: str(tool.get("name"))
        for tool in body.get("tools") or []
        if tool.get("type") == "namespace"
        for inside in tool["tools"]
    }


def freeform_input(arguments: dict[str, Any]) -> str:
    """Return the plain input of a call, or its arguments as JSON if the policy named others."""
    text = arguments.get("input")
    return text if isinstance(text, str) and len(arguments) == 1 else arguments_text(arguments)


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
