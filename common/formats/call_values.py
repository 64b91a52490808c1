"""Reads tool calls that are neither JSON nor tags: Python's syntax, and objects with quote tokens.

Example:
    Python    [move(where='up', steps=2)], or one call in each line
    quoted    call:move{where:<|"|>up<|"|>,steps:2}
"""

import ast
import json
import math
import re
import warnings
from typing import Any, NoReturn, cast

MAX_TRIES = 64  # Closing brackets that are tried as the end of a list of Python calls.
CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
_PYTHON_NAME = re.compile(r"\b(?:True|False|None)\b")  # Templates write nested values so.
_BARE_KEY = re.compile(r"([{,]\s*)([\w.-]+)\s*:")
_PLACE = "\udc04"  # Half of a surrogate pair. Valid text never contains it.
_PLACES = re.compile(f"{_PLACE}(\\d+){_PLACE}")


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _finite(text: str) -> float:
    """Return a number. Raises: ValueError: it is larger than any float."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is larger than any float")
    return number


DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


def read_python(text: str, at: int) -> tuple[list[tuple[str, dict[str, Any]]], int]:
    """Return the calls in a list in Python's syntax that begins at a position, and its end.

    Raises: ValueError: no such list begins there.
    """
    stop = at
    for _ in range(MAX_TRIES):
        stop = text.find("]", stop) + 1
        if stop == 0:
            break
        tree = _parsed(text[at:stop].strip())
        if tree is not None:
            return _calls_of(tree), stop
    raise ValueError("no list of calls in Python's syntax ends here")


def _parsed(text: str) -> ast.expr | None:
    """Return a Python expression, None if the text is none.

    Models write line breaks inside of quotes, where Python does not allow them.
    """
    for form in (text, text.replace("\n", "\\n")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # An unknown escape, such as \\d.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                return ast.parse(form, mode="eval").body
            except (SyntaxError, ValueError, MemoryError, RecursionError):
                continue
    return None


def read_python_lines(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls in a text of Python statements. Raises: ValueError: it has others."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            tree = ast.parse(text.strip())
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"no calls in Python's syntax: {error}") from error
    values = [each.value for each in tree.body if isinstance(each, ast.Expr)]
    if not values or len(values) != len(tree.body):
        raise ValueError("no calls in Python's syntax")
    return [_call_of(each) for each in values]


def _calls_of(node: ast.expr) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls in a list of Python's syntax. Raises: ValueError."""
    if not isinstance(node, ast.List) or not node.elts:
        raise ValueError("calls in Python's syntax are a list")
    return [_call_of(each) for each in node.elts]


def _call_of(node: ast.expr) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a call in Python's syntax. Raises: ValueError."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("a call in Python's syntax has named arguments only")
    arguments = {str(each.arg): _value_of(each.value) for each in node.keywords if each.arg}
    if len(arguments) != len(node.keywords):
        raise ValueError("a call has an argument twice, or one without a name")
    return ast.unparse(node.func), arguments


def _value_of(node: ast.expr) -> object:
    """Return a literal; JSON's constants count as literals, too."""
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, ast.Dict):
        keys = [_literal(each) if each else None for each in node.keys]
        if not all(isinstance(each, str) for each in keys):
            raise ValueError("a key of an argument is no text")
        return dict(zip(keys, map(_value_of, node.values), strict=True))
    if isinstance(node, ast.List | ast.Tuple):
        return [_value_of(each) for each in node.elts]
    value = _literal(node)
    is_number = isinstance(value, float)
    if not isinstance(value, str | int | float | bool | None) or (
        is_number and not math.isfinite(value)
    ):
        raise ValueError(f"an argument is {type(value).__name__} {value!r:.40}")
    return value


def _literal(node: ast.expr) -> object:
    """Return the value of a literal. Raises: ValueError: it is none."""
    try:
        return ast.literal_eval(node)
    except (TypeError, SyntaxError, MemoryError) as error:  # A set of lists, for example.
        raise ValueError(f"an argument is no literal: {error}") from error


def read_literal(text: str) -> object:
    """Return a list or an object in Python's syntax; the text itself if it is neither."""
    node = _parsed(text.strip())
    try:
        return _value_of(node) if isinstance(node, ast.List | ast.Dict) else text
    except (ValueError, RecursionError):
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
    whole = _PLACES.sub(lambda each: json.dumps(texts[int(each[1])]), keyed)
    content: object = DECODER.decode(whole)
    if not isinstance(content, dict):
        raise ValueError("must be an object")
    return cast(dict[str, Any], content), place
