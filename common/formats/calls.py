"""Tool calls in a policy's answer: detects the form of a chat template, and parses calls.

The form is detected by rendering calls of a tool with a made-up name and arguments.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

NAME = "probe_of_a_name"
KEYS = ("first_probed_key", "second_probed_key")
VALUES = ("first probed value", "second one")
ARGUMENTS: dict[str, Any] = dict(zip(KEYS, VALUES, strict=True))
JSON_BEGINS = re.compile(r"(?=\{)")
NOTHING = re.compile("")
SPACE = re.compile(r"\s*")
# Maximum nesting, below the limits of common JSON parsers (pydantic: about 200 levels).
MAX_DEPTH = 64
BETWEEN_CALLS = " \t\r\n[];,"  # Separators in a list of calls.
PYTHON = {"True": "true", "False": "false", "None": "null"}  # Templates write Python in tags.

Arguments = dict[str, Any]
Call = tuple[str, Arguments]  # Name of the tool, and the arguments.


def each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with `change` applied to each text, including keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [each_text(each, change) for each in cast(list[Any], value)]
    if isinstance(value, dict):
        items = cast(dict[str, Any], value).items()
        return {change(key): each_text(each, change) for key, each in items}
    return value


def as_call(name: str, arguments: Arguments) -> dict[str, Any]:
    """Return a call in the form that chat templates accept."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def read_arguments(value: object) -> Arguments:
    """Return the arguments of a call from a JSON object or its text.

    Raises: ValueError: the value is not a JSON object, or is nested too deeply.
    """
    found: object = DECODER.decode(value or "{}") if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise ValueError("must be a JSON object")
    arguments = cast(Arguments, found)
    check_depth(arguments)
    return arguments


def check_depth(value: object) -> None:
    """Check the nesting of a JSON value. Raises: ValueError: it is deeper than MAX_DEPTH."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[object] = []
        for each in level:
            if isinstance(each, dict):
                inner += cast(dict[str, object], each).values()
            elif isinstance(each, list):
                inner += cast(list[object], each)
        if not inner:
            return
        level = inner
    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """Form of arguments in tags instead of JSON: key, `equals`, value, `between`, key, ..."""

    equals: re.Pattern[str]
    between: re.Pattern[str]
    end: re.Pattern[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """Form of a tool call in a chat template.

    Example:
        Qwen         <tool_call> {"name": "move", "arguments": {"where": "up"}} </tool_call>
        Llama        {"name": "move", "parameters": {"where": "up"}}
        Mistral      [TOOL_CALLS] [{"name": "move", "arguments": {"where": "up"}}]
        newer ones   [TOOL_CALLS]move[ARGS]{"where": "up"}
        Qwen3-Coder  <tool_call> <function=move> <parameter=where> up </parameter> ...
    """

    begin: re.Pattern[str] = JSON_BEGINS
    end: re.Pattern[str] = NOTHING  # Text after the JSON.
    name_key: str = "name"
    arguments_key: str = "arguments"
    head: re.Pattern[str] | None = None  # Start of a call whose name is outside of the JSON.
    tags: Tags | None = None

    @classmethod
    def of(cls, full: str, bare: str) -> "CallForm":
        """Return the form of a template from its rendered call of NAME with ARGUMENTS.

        `bare` is the call without arguments. Raises: ValueError: the form is not recognized.
        """
        for found in re.finditer(r"[{\[]", full):
            lead = full[: found.start()]
            try:
                value, end = DECODER.raw_decode(full, found.start())
            except ValueError:
                continue
            after = _loosely(full[end:])
            call = _only(value)
            names = [key for key, each in call.items() if each == NAME]
            arguments = [key for key, each in call.items() if _is_probed(each)]
            if names and arguments:
                return cls(
                    begin=_begin(lead),
                    end=re.compile(after),
                    name_key=names[0],
                    arguments_key=arguments[0],
                )
            before, is_named, between = lead.rpartition(NAME)
            if call == ARGUMENTS and is_named and before.strip():
                head = re.compile(rf"{NAMED}{_loosely(between)}\s*(?=\{{)")
                return cls(begin=_begin(before), head=head, end=re.compile(after))
        pieces = _split(full, NAME, KEYS[0], VALUES[0], KEYS[1], VALUES[1])
        empty = bare.partition(NAME)[2]
        lead, first, equals, between, again, end = map(_loosely, pieces)
        is_quoted = equals[-1:] in ("'", '"')  # Not supported: the escaping rules are unknown.
        is_framed = all((lead, first, equals, between, end, empty.strip())) and not is_quoted
        if not is_framed or equals != again:
            raise ValueError(f"name and arguments are not found in {full!r:.300}")
        head = re.compile(rf"{NAMED}(?:(?P<none>{_loosely(empty)})|{first})")
        tags = Tags(equals=re.compile(equals), between=re.compile(between), end=re.compile(end))
        return cls(begin=_begin(pieces[0]), head=head, tags=tags)

    def read(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[Call]]:
        """Return the text of an answer without its calls, and the calls in order.

        If one call cannot be parsed, the result is the whole text and no calls.

        Args:
            tools: tools as chat templates accept them; they define the types of tag arguments.
        """
        said: list[str] = []
        calls: list[Call] = []
        at = 0
        try:
            while (found := self.begin.search(text, at)) is not None:
                said.append(text[at : found.start()])
                told, at = self._calls_at(text, found.end())
                calls += told
        except (ValueError, RecursionError):
            return text.strip(), []
        if not calls:
            return text.strip(), []
        if self.tags is not None:
            calls = [(name, _typed(given, _schemas(name, tools))) for name, given in calls]
        said.append(text[at:])
        kept = [each.strip() for each in said if each.strip(BETWEEN_CALLS)]
        return "\n".join(kept), calls

    def _calls_at(self, text: str, at: int) -> tuple[list[Call], int]:
        """Return the calls that begin at a position, and the position of their end.

        Raises: ValueError: they cannot be parsed.
        """
        head = self.head.match(text, at) if self.head is not None else None
        if self.head is not None and head is None:
            raise ValueError("a call without a name")
        if head is None:
            value, at = DECODER.raw_decode(text, _skip_space(text, at))
            each = cast(list[object], value if isinstance(value, list) else [value])
            return [self._call(one) for one in each], self._ended(text, at)
        if self.tags is None:
            value, at = DECODER.raw_decode(text, head.end())
            return [(head["name"], read_arguments(value))], self._ended(text, at)
        if head["none"] is not None:
            return [(head["name"], {})], head.end()
        stop = self.tags.end.search(text, head.end())
        if stop is None:
            raise ValueError("a call does not end")
        given: Arguments = {}
        for part in self.tags.between.split(text[head.end() : stop.start()]):
            key, value = self.tags.equals.split(part, maxsplit=1)
            given[key.strip()] = value.removeprefix("\n").removesuffix("\n")
        return [(head["name"], given)], stop.end()

    def _call(self, value: object) -> Call:
        found = cast(dict[str, object], value) if isinstance(value, dict) else {}
        name = found.get(self.name_key)
        if not isinstance(name, str) or self.arguments_key not in found:
            raise ValueError("no call")
        return name, read_arguments(found[self.arguments_key])

    def _ended(self, text: str, at: int) -> int:
        """Return the end of a call whose JSON ends at `at`."""
        # The end mark is optional at the end of the text and before the next call.
        at = _skip_space(text, at)
        if (closed := self.end.match(text, at)) is not None:
            return closed.end()
        if at < len(text) and self.begin.match(text, at) is None:
            raise ValueError("a call does not end")
        return at


NAMED = r"\s*(?P<name>\S+?)\s*"


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is larger than any float")
    return number


DECODER = json.JSONDecoder(parse_constant=_refused, parse_float=_finite)


def _only(value: object) -> dict[str, object]:
    """Return a JSON object, or the only object of a list; {} for any other value."""
    found = cast(list[object], value) if isinstance(value, list) else [value]
    is_one = len(found) == 1 and isinstance(found[0], dict)
    return cast(dict[str, object], found[0]) if is_one else {}


def _is_probed(value: object) -> bool:
    """Return whether a value equals ARGUMENTS, which some templates write as a JSON text."""
    try:
        return read_arguments(value) == ARGUMENTS
    except ValueError:
        return False


def _begin(lead: str) -> re.Pattern[str]:
    """Return the pattern of a call's start: the last word before it, earlier ones optional."""
    words = [re.escape(each) for each in lead.split()]
    if not words:
        return JSON_BEGINS
    others = ""
    for each in words[:-1]:
        others = rf"(?:{others}{each}\s*)?"
    return re.compile(others + words[-1])


def _loosely(piece: str) -> str:
    """Return a pattern of a text that matches any whitespace between its words."""
    return r"\s*".join(map(re.escape, piece.split()))


def _skip_space(text: str, at: int) -> int:
    found = SPACE.match(text, at)
    return at if found is None else found.end()


def _split(text: str, *marks: str) -> list[str]:
    """Return the pieces of a text between marks, in the order of the marks."""
    pieces: list[str] = []
    for mark in marks:
        piece, _, text = text.partition(mark)
        pieces.append(piece)
    return [*pieces, text]


def _schemas(name: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the JSON schema of each argument of a tool."""
    functions = [each["function"] for each in tools if each["function"]["name"] == name]
    told = functions[0].get("parameters", {}).get("properties") if functions else None
    return cast(Mapping[str, Any], told) if isinstance(told, dict) else {}


def _typed(given: Arguments, schemas: Mapping[str, Any]) -> Arguments:
    """Return arguments with the types of their schemas. A value of another type stays a text."""
    return {key: _of_type(text, _kinds(schemas.get(key))) for key, text in given.items()}


def _of_type(text: str, kinds: set[str]) -> object:
    if not kinds or "string" in kinds:
        return text
    try:
        return DECODER.decode(PYTHON.get(text.strip(), text))
    except (ValueError, RecursionError):
        return text


def _kinds(schema: object) -> set[str]:
    """Return the types in a JSON schema."""
    if not isinstance(schema, dict):
        return set()
    told = cast(dict[str, Any], schema)
    kind = told.get("type")
    others = told.get("anyOf")
    found = {str(each) for each in cast(list[object], kind if isinstance(kind, list) else [kind])}
    if isinstance(others, list):
        found = found.union(*map(_kinds, cast(list[object], others)))
    return found - {"None"}
