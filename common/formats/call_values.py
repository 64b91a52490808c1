"""Reads tool calls that are neither JSON nor tags: Python's syntax, and objects with quote tokens.

Example:
    Python    [move(where='up', steps=2)], or one call in each line
    quoted    call:move{where:<|"|>up<|"|>,steps:2}
"""

import ast
import json
import re
from typing import Any, cast

MAX_TRIES = 64  # Closing brackets that are tried as the end of a list of Python calls.
CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
_PYTHON_NAME = re.compile(r"\b(?:True|False|None)\b")  # Templates write nested values so.
_BARE_KEY = re.compile(r"([{,]\s*)([\w.-]+)\s*:")
_PLACE = "\udc04"  # Half of a surrogate pair. Valid text never contains it.
_PLACES = re.compile(f"{_PLACE}(\\d+){_PLACE}")


def read_python(text: str, at: int) -> tuple[list[tuple[str, dict[str, Any]]], int]:
    """Return the calls in a list in Python's syntax that begins at a position, and its end.

    Raises: ValueError: no such list begins there.
    """
    stop = at
    for _ in range(MAX_TRIES):
        stop = text.find("]", stop) + 1
        if stop == 0:
            break
        try:
            tree = ast.parse(text[at:stop].strip(), mode="eval")
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            continue
        return _calls_of(tree.body), stop
    raise ValueError("no list of calls in Python's syntax ends here")


def read_python_lines(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls in a text of Python statements. Raises: ValueError: it has others."""
    try:
        tree = ast.parse(text.strip())
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"no calls in Python's syntax: {error}") from error
    values = [each.value for each in tree.body if isinstance(each, ast.Expr)]
    if not values or len(values) != len(tree.body):
        raise ValueError("no calls in Python's syntax")
    return [_call_of(each) for each in values]


def _calls_of(node: ast.expr) -> list[tuple[str, dict[str, Any]]]:
    if not isinstance(node, ast.List) or not node.elts:
        raise ValueError("calls in Python's syntax are a list")
    return [_call_of(each) for each in node.elts]


def _call_of(node: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("a call in Python's syntax has named arguments only")
    given = {str(each.arg): _value_of(each.value) for each in node.keywords if each.arg}
    if len(given) != len(node.keywords):
        raise ValueError("a call has an argument twice, or one without a name")
    return ast.unparse(node.func), given


def _value_of(node: ast.expr) -> object:
    """Return a literal; JSON's constants count as literals, too."""
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(each) if each else None for each in node.keys]
        if not all(isinstance(each, str) for each in keys):
            raise ValueError("a key of an argument is no text")
        return dict(zip(keys, map(_value_of, node.values), strict=True))
    if isinstance(node, ast.List | ast.Tuple):
        return [_value_of(each) for each in node.elts]
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError(f"an argument is {type(value).__name__}")
    return value


def read_literal(text: str) -> object:
    """Return a list or an object in Python's syntax; the text itself if it is neither."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
        return _value_of(node) if isinstance(node, ast.List | ast.Dict) else text
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return text


def read_quoted(text: str, at: int, quote: str) -> tuple[dict[str, Any], int]:
    """Return an object with bare keys and quoted texts that begins at a position, and its end.

    Args:
        quote: token before and after each text.

    Raises: ValueError: the object cannot be read.
    """
    texts: list[str] = []
    parts: list[str] = []
    depth = 0
    place = at
    while place < len(text):
        if text.startswith(quote, place):
            stop = text.find(quote, place + len(quote))
            if stop < 0:
                raise ValueError("a text has no end")
            parts.append(f"{_PLACE}{len(texts)}{_PLACE}")
            texts.append(text[place + len(quote) : stop])
            place = stop + len(quote)
            continue
        depth += (text[place] in "{[") - (text[place] in "}]")
        parts.append(text[place])
        place += 1
        if depth == 0:
            break
    if depth:
        raise ValueError("an object has no end")
    keyed = _BARE_KEY.sub(r'\1"\2":', "".join(parts))
    keyed = _PYTHON_NAME.sub(lambda each: json.dumps(CONSTANTS[each[0].lower()]), keyed)
    found: object = json.loads(_PLACES.sub(lambda each: json.dumps(texts[int(each[1])]), keyed))
    if not isinstance(found, dict):
        raise ValueError("must be an object")
    return cast(dict[str, Any], found), place
