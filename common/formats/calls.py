"""Tool calls in a policy's answer: detects the form of a chat template, and parses calls.

The form is detected by rendering calls of a tool with a made-up name and arguments. Besides JSON
and tags, calls have Python's syntax, or are objects with quote tokens:

    Python    [move(where='up', steps=2)], or one call in each line
    quoted    call:move{where:<|"|>up<|"|>,steps:2}
"""

import ast
import itertools
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    content: object = DECODER.decode(value or "{}") if isinstance(value, str) else value
    if not isinstance(content, dict):
        raise ValueError("must be a JSON object")
    arguments = cast(Arguments, content)
    check_depth(arguments)
    return arguments


def check_depth(value: object) -> None:
    """Check the nesting of a JSON value. Raises: ValueError: it is deeper than MAX_DEPTH."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[object] = []
        for entry in level:
            if isinstance(entry, dict):
                inner += cast(dict[str, object], entry).values()
            elif isinstance(entry, list):
                inner += cast(list[object], entry)
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
        gpt-oss      to=functions.move<|channel|>commentary json<|message|>{"where": "up"}
        Gemma 4      <|tool_call>call:move{where:<|"|>up<|"|>}<tool_call|>
        LFM 2        <|tool_call_start|>[move(where='up')]<|tool_call_end|>
        MiniMax-M1   <tool_calls> {"name": ...} {"name": ...} </tool_calls>
        Apertus      <|tools_prefix|>[{"move": {"where": "up"}}, {"turn": {}}]<|tools_suffix|>
    """

    begin: re.Pattern[str] = JSON_BEGINS
    # Start of a later call of the same section; None: it is the same as that of the first.
    again: re.Pattern[str] | None = None
    end: re.Pattern[str] = NOTHING  # Text after the JSON.
    name_key: str = "name"
    arguments_key: str = "arguments"
    head: re.Pattern[str] | None = None  # Start of a call whose name is outside of the JSON.
    tags: Tags | None = None
    quote: str = ""  # Token before and after each text of an object with bare keys.
    is_python: bool = False  # A list of calls in Python's syntax.

    @classmethod
    def of(cls, full: str, bare: str, closing: str = "", opening: str = "") -> "CallForm":
        """Return the form of a template from its rendered call of NAME with ARGUMENTS.

        Args:
            bare: the call without arguments.
            closing: the end of `full` that stands only behind the last of several calls.
            opening: the text between the end of a call and the name in the next one.

        Raises: ValueError: the form is not recognized.
        """
        form = cls._of_json(full, closing) or cls._of_python(full) or cls._of_quoted(full, closing)
        form = form or cls._of_tags(full, bare, closing)
        is_section = bool(closing.strip() and opening.strip()) and not form.is_python
        if not is_section or form.begin.search(opening) is not None:
            return form
        return replace(form, again=_again(opening, has_head=form.head is not None))

    @classmethod
    def _of_json(cls, full: str, closing: str) -> "CallForm | None":
        """Return the form of calls as JSON objects; None: the template uses another form."""
        for bracket in re.finditer(r"[{\[]", full):
            lead = full[: bracket.start()]
            try:
                value, end = DECODER.raw_decode(full, bracket.start())
            except ValueError:
                continue
            after = _closed(full[end:], closing)
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
                head = re.compile(rf"{NAMED}{_head_end(between)}\s*(?=\{{)")
                return cls(begin=_begin(before), head=head, end=re.compile(after))
        return None

    @classmethod
    def _of_python(cls, full: str) -> "CallForm | None":
        """Return the form of calls in Python's syntax; None: the template uses another form."""
        lead, is_named, _ = full.partition(f"{NAME}(")
        is_list = lead.rstrip().endswith("[")
        lead = lead.rstrip()[:-1] if is_list else lead
        end = len(full) if is_list else full.rfind(")") + 1
        if not is_named or not (is_list or (lead.strip() and full[end:].strip())):
            return None
        try:
            if is_list:
                calls, end = read_python(full, len(lead))
            else:
                calls = read_python_lines(full[len(lead) : end])
        except ValueError:
            return None
        after = re.compile(_loosely(full[end:]))
        begin = _begin(lead) if lead.strip() else re.compile(r"(?=\[\s*[A-Za-z_][\w.-]*\()")
        return cls(begin=begin, end=after, is_python=True) if calls == [(NAME, ARGUMENTS)] else None

    @classmethod
    def _of_quoted(cls, full: str, closing: str) -> "CallForm | None":
        """Return the form of objects with quote tokens; None: the template uses another form."""
        lead, _, rest = full.partition(f"{{{KEYS[0]}:")
        quote = rest.partition(VALUES[0])[0]
        before, is_named, between = lead.rpartition(NAME)
        if not (quote.strip() and is_named and before.strip()) or between.strip():
            return None
        try:
            arguments, end = read_quoted(full, len(lead), quote)
        except ValueError:
            return None
        if arguments != ARGUMENTS:
            return None
        head = re.compile(rf"{NAMED}(?=\{{)")
        after = re.compile(_closed(full[end:], closing))
        return cls(begin=_begin(before), head=head, end=after, quote=quote)

    @classmethod
    def _of_tags(cls, full: str, bare: str, closing: str) -> "CallForm":
        """Return the form of arguments in tags."""
        head, is_keyed, _ = full.partition(KEYS[0])
        named, _, last = head.rpartition(NAME)
        lead = named.rpartition(NAME)[2]  # Some templates also name the tool before the call.
        full = lead + NAME + last + full[len(head) :] if is_keyed else full
        bare = NAME + bare.rpartition(NAME)[2]
        pieces = _split(full, NAME, KEYS[0], VALUES[0], KEYS[1], VALUES[1])
        empty = bare.partition(NAME)[2]
        lead, first, equals, between, again = map(_with_attributes, pieces[:-1])
        end = _closed(pieces[-1], closing)
        is_quoted = equals[-1:] in ("'", '"')  # Not supported: the escaping rules are unknown.
        is_framed = all((lead, first, equals, between, end, empty.strip())) and not is_quoted
        if not is_framed or equals != again:
            raise ValueError(f"name and arguments are not found in {full!r:.300}")
        head = re.compile(rf"{NAMED}(?:(?P<none>{_closed(empty, closing)})|{first})")
        tags = Tags(equals=re.compile(equals), between=re.compile(between), end=re.compile(end))
        return cls(begin=_begin(pieces[0]), head=head, tags=tags)

    def read(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[Call]]:
        """Return the text of an answer without its calls, and the calls in order.

        If one call cannot be parsed, the result is the whole text and no calls.

        Args:
            tools: tools as chat templates accept them; they define the types of tag arguments.
        """
        try:
            return self._read(text, tools)
        except (ValueError, RecursionError):
            return text.strip(), []

    def fault(self, text: str) -> str:
        """Return why a call in an answer cannot be parsed, "" if all can or if there is none."""
        try:
            self._read(text, ())
        except RecursionError:
            return f"nested deeper than {MAX_DEPTH} levels"
        except ValueError as error:
            return str(error)
        return ""

    def shows(self, text: str, calls: Sequence[Call]) -> bool:
        """Return whether a text has exactly these calls. Tags have arguments of the same types."""
        _, read_calls = self.read(text)
        if self.tags is None or len(read_calls) != len(calls):
            return read_calls == [*calls]
        pairs = zip(read_calls, calls, strict=True)
        return all(
            (name, _like(read, wanted)) == (call, wanted) for (name, read), (call, wanted) in pairs
        )

    def _read(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[Call]]:
        """Return the text of an answer without its calls, and the calls in order."""
        texts: list[str] = []
        calls: list[Call] = []
        at = 0
        while (match := self._start(text, at, has_calls=bool(calls))) is not None:
            texts.append(text[at : match.start()])
            found_calls, at = self._calls_at(text, match.end())
            calls += found_calls
        if not calls:
            return text.strip(), []
        if self.tags is not None:
            calls = [(name, _typed(given, _schemas(name, tools))) for name, given in calls]
        texts.append(text[at:])
        between = [each.strip() for each in texts if each.strip(BETWEEN_CALLS)]
        return "\n".join(between), calls

    def _start(self, text: str, at: int, *, has_calls: bool) -> re.Match[str] | None:
        """Return the start of the next call behind a position."""
        match = self.again.match(text, at) if self.again is not None and has_calls else None
        return match or self.begin.search(text, at)

    def _begins(self, text: str, at: int) -> bool:
        """Return whether a call after another one begins at a position."""
        is_later = self.again is not None and self.again.match(text, at) is not None
        return is_later or self.begin.match(text, at) is not None

    def _calls_at(self, text: str, at: int) -> tuple[list[Call], int]:
        """Return the calls that begin at a position, and the position of their end.

        Raises: ValueError: they cannot be parsed.
        """
        if self.is_python and text[_skip_space(text, at) :][:1] != "[":
            stop = self.end.search(text, at)
            if stop is None or not stop[0]:
                raise ValueError("a call does not end")
            calls = read_python_lines(text[at : stop.start()])
            return [(name, read_arguments(arguments)) for name, arguments in calls], stop.end()
        if self.is_python:
            calls, at = read_python(text, _skip_space(text, at))
            return [(name, read_arguments(read)) for name, read in calls], self._ended(text, at)
        head = self.head.match(text, at) if self.head is not None else None
        if self.head is not None and head is None:
            raise ValueError("a call without a name")
        if head is None:
            value, at = DECODER.raw_decode(text, _skip_space(text, at))
            entries = cast(list[object], value if isinstance(value, list) else [value])
            return [self._call(one) for one in entries], self._ended(text, at)
        if self.quote:
            value, at = read_quoted(text, head.end(), self.quote)
            return [(head["name"], read_arguments(value))], self._ended(text, at)
        if self.tags is None:
            value, at = DECODER.raw_decode(text, head.end())
            return [(head["name"], read_arguments(value))], self._ended(text, at)
        if head["none"] is not None:
            return [(head["name"], {})], self._past(text, head)
        stop = self.tags.end.search(text, head.end())
        if stop is None:
            raise ValueError("a call does not end")
        arguments: Arguments = {}
        for part in self.tags.between.split(text[head.end() : stop.start()]):
            pair = self.tags.equals.split(part, maxsplit=1)
            if len(pair) != 2:
                raise ValueError(f"an argument without a value: {part[:80]!r}")
            key, value = pair
            value = value.removeprefix("\n").removesuffix("\n")
            arguments[key.strip()] = inner[1] if (inner := CDATA.fullmatch(value)) else value
        return [(head["name"], arguments)], self._past(text, stop)

    def _past(self, text: str, end: re.Match[str]) -> int:
        """Return the position behind the end of a call.

        Raises: ValueError: neither the end of all calls nor another call stands there.
        """
        at = _skip_space(text, end.end())
        is_closed = CLOSING not in end.re.groupindex or end[CLOSING] is not None
        if not is_closed and at < len(text) and not self._begins(text, at):
            raise ValueError("a call does not end")
        return end.end()

    def _call(self, value: object) -> Call:
        """Return name and arguments of a parsed call. Raises: ValueError: the object is no call."""
        fields = cast(dict[str, object], value) if isinstance(value, dict) else {}
        name = fields.get(self.name_key)
        if not isinstance(name, str) or self.arguments_key not in fields:
            raise ValueError("no call")
        return name, read_arguments(fields[self.arguments_key])

    def _ended(self, text: str, at: int) -> int:
        """Return the end of a call whose JSON ends at `at`."""
        # The end mark is optional at the end of the text and before the next call.
        at = _skip_space(text, at)
        closed = self.end.match(text, at)
        if closed is not None and (closed[0] or not self.end.pattern):
            return self._past(text, closed)
        if at < len(text) and not self._begins(text, at):
            raise ValueError("a call does not end")
        return at


# XML's notation for texts with special characters.
CDATA = re.compile(r"<!\[CDATA\[(.*)\]\]>", re.DOTALL)
CLOSING = "closing"  # Group of the text that stands only behind the last of several calls.
ATTRIBUTE = re.compile(r'="[^"]*"')  # The value of an attribute depends on the argument's type.
NAMED = r"\s*(?P<name>\S+?)\s*"
WORDS = re.compile(r"<[^<>\s]*>|\[[A-Z_]+\]|[^\s<\[]+|\S")  # Tags and words of a template.


def _only(value: object) -> dict[str, object]:
    """Return a JSON object, or the only object of a list; {} for any other value."""
    values = cast(list[object], value) if isinstance(value, list) else [value]
    is_one = len(values) == 1 and isinstance(values[0], dict)
    return cast(dict[str, object], values[0]) if is_one else {}


def _is_probed(value: object) -> bool:
    """Return whether a value equals ARGUMENTS, which some templates write as a JSON text."""
    try:
        return read_arguments(value) == ARGUMENTS
    except ValueError:
        return False


def _begin(lead: str) -> re.Pattern[str]:
    """Return the pattern of a call's start: its last tag or word, earlier ones optional."""
    matches = list(WORDS.finditer(lead))
    words = [word[0] for word in matches]
    if not words:
        return JSON_BEGINS
    # A tag with an attribute, such as `<invoke name="`, is required as a whole. So is a tag with a
    # word directly behind it.
    first = next((i for i in range(len(words) - 1, -1, -1) if words[i][0] in "<["), len(words) - 1)
    is_whole = words[first].endswith((">", "]"))
    if is_whole and any(a.end() < b.start() for a, b in itertools.pairwise(matches[first:])):
        first = len(words) - 1
    others = ""
    for word in words[:first]:
        others = rf"(?:{others}{re.escape(word)}\s*)?"
    return re.compile(others + r"\s*".join(map(re.escape, words[first:])))


def _again(opening: str, *, has_head: bool) -> re.Pattern[str]:
    """Return the pattern of a later call's start, from the text before its name."""
    if has_head:
        return re.compile(rf"\s*{_loosely(opening)}")
    return re.compile(rf"\s*{_loosely(opening.partition('{')[0])}\s*(?=\{{)")


def _head_end(between: str) -> str:
    """Return the pattern of the text between a call's name and its arguments.

    Only the last tag or word of the template's text is required. Models write other text before it,
    such as the number of the call or a type.
    """
    words = WORDS.findall(between)
    if not words:
        return ""
    return rf"(?:{_loosely(between)}|[^\w.{{}}-][^{{}}]*?{re.escape(words[-1])})"


def _closed(piece: str, closing: str) -> str:
    """Return the pattern of the text after a call, whose last part may be missing."""
    if not closing.strip() or not piece.endswith(closing):
        return _with_attributes(piece)
    item = _with_attributes(piece.removesuffix(closing))
    return rf"{item}(?:\s*(?P<{CLOSING}>{_loosely(closing)}))?"


def _with_attributes(piece: str) -> str:
    """Return the pattern of a text of a template with any values of complete attributes."""
    return ATTRIBUTE.pattern.join(map(_loosely, ATTRIBUTE.split(piece)))


def _loosely(piece: str) -> str:
    """Return a pattern of a text that matches any whitespace between its words and tags."""
    return r"\s*".join(map(re.escape, WORDS.findall(piece)))


def _skip_space(text: str, at: int) -> int:
    """Return the position of the next character that is no whitespace."""
    space = SPACE.match(text, at)
    return at if space is None else space.end()


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
    properties = functions[0].get("parameters", {}).get("properties") if functions else None
    return cast(Mapping[str, Any], properties) if isinstance(properties, dict) else {}


def _typed(texts: Arguments, schemas: Mapping[str, Any]) -> Arguments:
    """Return arguments with the types of their schemas. A value of another type stays a text."""
    return {key: _of_type(text, _kinds(schemas.get(key))) for key, text in texts.items()}


def _like(read: Arguments, wanted: Arguments) -> Arguments:
    """Return arguments in tags with the types of the given arguments."""
    kinds = {key: {_kind_of(value)} for key, value in wanted.items()}
    return {key: _of_type(text, kinds.get(key, set())) for key, text in read.items()}


def _kind_of(value: object) -> str:
    if isinstance(value, str):
        return "string"
    if isinstance(value, dict):
        return "object"
    return "array" if isinstance(value, list) else "number"


def _of_type(text: str, kinds: set[str]) -> object:
    """Return the text of an argument as a value of one of these JSON types."""
    if not kinds or "string" in kinds:
        return text
    try:
        return DECODER.decode(PYTHON.get(text.strip(), text))
    except (ValueError, RecursionError):
        return read_literal(text) if kinds & {"object", "array"} else text


def _kinds(schema: object) -> set[str]:
    """Return the types in a JSON schema."""
    if not isinstance(schema, dict):
        return set()
    fields = cast(dict[str, Any], schema)
    kind = fields.get("type")
    others = fields.get("anyOf")
    names = {str(each) for each in cast(list[object], kind if isinstance(kind, list) else [kind])}
    if isinstance(others, list):
        names = names.union(*map(_kinds, cast(list[object], others)))
    return names - {"None"}
