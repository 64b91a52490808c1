"""The language of Dockerfiles: instructions, words, variables, and patterns of file names."""

import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

DIRECTIVE = re.compile(r"#[ \t]*(\w+)[ \t]*=[ \t]*(.*)")
HEREDOC = re.compile(r"(?:^|\s)<<-?\s*['\"]?\w")
NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
CLASS = re.compile(r"\[(\^?)((?:[^\]\\]|\\.)+)\]")


class DockerfileError(ValueError):
    """A line that this reader cannot perform. The text names the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction: its word in upper case, its text, and the file's escape character."""

    word: str
    text: str
    escape: str

    def __str__(self) -> str:
        """Return the instruction with the begin of its text, for messages."""
        return f"{self.word} {self.text[:80]!r}"

    def json_words(self) -> list[str] | None:
        """Return the words of the form of a JSON list; None if it has the other form."""
        if not self.text.startswith("["):
            return None
        try:
            words = json.loads(self.text)
        except ValueError:
            return None
        return words if all(isinstance(word, str) for word in words) else None

    def flags(self) -> tuple[dict[str, str], "Instruction"]:
        """Return the leading flags (`--name=value`), and the instruction without them."""
        flags: dict[str, str] = {}
        text = self.text
        while text.startswith("--"):
            flag, _, text = text.partition(" ")
            name, _, value = flag[2:].partition("=")
            flags[name] = value
            text = text.lstrip()
        return flags, Instruction(word=self.word, text=text, escape=self.escape)

    def words(self) -> list[str]:
        """Return the words, with their quotes and escapes; spaces in quotes separate none."""
        words: list[str] = []
        word = quote = ""
        characters = iter(self.text)
        for character in characters:
            if not quote and character.isspace():
                words += [word] if word else []
                word = ""
                continue
            if character == self.escape and quote != "'":
                character += next(characters, "")
            elif character == quote:
                quote = ""
            elif not quote and character in "'\"":
                quote = character
            word += character
        return [*words, word] if word else words


def read_instructions(text: str) -> Iterator[Instruction]:
    """Yield the instructions of a Dockerfile. Raises: DockerfileError: a here-document."""
    lines = text.removeprefix("\ufeff").splitlines()
    escape = _escape(lines)
    full = re.escape(escape)
    continued = re.compile(rf"(?:^|(?<!{full})){full}[ \t]*$")
    whole = ""
    for line in lines:
        if line.lstrip().startswith("#") or (whole and not line.strip()):
            continue  # Comments and empty lines may stand in an instruction.
        line = line if whole else line.lstrip()
        if continued.search(line):
            whole += continued.sub("", line)
            continue
        if whole := (whole + line).strip():
            yield _instruction(whole, escape)
        whole = ""
    if whole.strip():
        yield _instruction(whole.strip(), escape)


def _escape(lines: list[str]) -> str:
    """Return the escape character, which a directive in the first lines may set."""
    for line in lines:
        directive = DIRECTIVE.fullmatch(line.strip())
        if directive is None:
            break
        if directive[1].lower() == "escape":
            return directive[2].strip()
    return "\\"


def _instruction(line: str, escape: str) -> Instruction:
    word, *rest = line.split(None, 1)
    instruction = Instruction(word=word.upper(), text=rest[0] if rest else "", escape=escape)
    if instruction.word in ("ADD", "COPY", "RUN") and HEREDOC.search(instruction.text):
        raise DockerfileError(f"{instruction} has a here-document")
    return instruction


def expand(text: str, values: Mapping[str, str], escape: str = "\\") -> str:
    """Return a word without its quotes, with the values of its variables.

    Raises: DockerfileError: a quote or a brace has no end, or a variable has an unknown modifier.
    """
    return _Expansion(text, values, escape).until("")


class _Expansion:
    """Reads a word from left to right."""

    def __init__(self, text: str, values: Mapping[str, str], escape: str) -> None:
        self._text = text
        self._values = values
        self._escape = escape
        self._at = 0

    def _next(self) -> str:
        """Return the next character; "" at the end."""
        character = self._text[self._at : self._at + 1]
        self._at += 1
        return character

    def until(self, stop: str) -> str:
        """Return the expanded text before a character outside of quotes; "" is the end."""
        parts: list[str] = []
        while (character := self._next()) and character != stop:
            if character == "'":
                parts.append(self._single())
            elif character == '"':
                parts.append(self._double())
            elif character == "$":
                parts.append(self._variable())
            else:
                parts.append(self._next() if character == self._escape else character)
        if stop and not character:
            raise DockerfileError(f"{self._text!r} has no {stop!r} at its end")
        return "".join(parts)

    def _single(self) -> str:
        end = self._text.find("'", self._at)
        if end < 0:
            raise DockerfileError(f"{self._text!r} has a quote without an end")
        start, self._at = self._at, end + 1
        return self._text[start:end]

    def _double(self) -> str:
        parts: list[str] = []
        while (character := self._next()) != '"':
            if not character:
                raise DockerfileError(f"{self._text!r} has a quote without an end")
            if character == "$":
                parts.append(self._variable())
                continue
            following = self._text[self._at : self._at + 1]
            if character == self._escape and following and following in f'"${self._escape}':
                character = self._next()
            parts.append(character)
        return "".join(parts)

    def _variable(self) -> str:
        """Return the value of the variable after a `$`."""
        is_braced = self._text.startswith("{", self._at)
        name = NAME.match(self._text, self._at + is_braced)
        if name is None:
            if is_braced:
                raise DockerfileError(f"{self._text!r} has no name of a variable")
            return "$"
        self._at = name.end()
        value = self._values.get(name[0])
        if not is_braced:
            return value or ""
        ignores_empty = self._text.startswith(":", self._at)
        self._at += ignores_empty
        modifier = self._next()
        if modifier == "}" and not ignores_empty:
            return value or ""
        if not modifier or modifier not in "-+?":
            raise DockerfileError(
                f"{self._text!r} changes ${name[0]} in a way that is not supported"
            )
        word = self.until("}")
        is_set = bool(value) if ignores_empty else value is not None
        if modifier == "+":
            return word if is_set else ""
        if modifier == "?" and not is_set:
            raise DockerfileError(f"{self._text!r} needs ${name[0]}: {word}")
        return (value or "") if is_set else word


def pattern_of(text: str) -> re.Pattern[str]:
    """Return a pattern of paths as an expression: `*`, `?`, `[...]`, escapes, and `**`."""
    parts: list[str] = []
    at = 0
    while at < len(text):
        if text.startswith("**/", at):
            parts.append("(?:.*/)?")
            at += 3
        elif text.startswith("**", at):
            parts.append(".*")
            at += 2
        elif ranges := CLASS.match(text, at):
            parts.append(f"(?!/)[{ranges[1]}{ranges[2].replace('[', chr(92) + '[')}]")
            at = ranges.end()
        elif text[at] == "\\" and at + 1 < len(text):
            parts.append(re.escape(text[at + 1]))
            at += 2
        else:
            parts.append({"*": "[^/]*", "?": "[^/]"}.get(text[at], re.escape(text[at])))
            at += 1
    try:
        return re.compile("".join(parts), re.DOTALL)
    except re.error as error:
        raise DockerfileError(f"the pattern {text!r} is malformed: {error}") from error


class IgnoreRules:
    """The rules of a .dockerignore: the last rule that matches a path or its folder decides."""

    def __init__(self, text: str) -> None:
        self._rules: list[tuple[re.Pattern[str], bool]] = []
        for line in text.removeprefix("\ufeff").splitlines():
            rule = line.strip()
            if not rule or line.startswith("#"):
                continue
            is_ignored = not rule.startswith("!")
            path = posixpath.normpath(rule.removeprefix("!").strip()).lstrip("/")
            self._rules.append((pattern_of(path), is_ignored))

    def ignores(self, path: str) -> bool:
        """Return whether a path below the context is ignored."""
        parts = path.split("/")
        paths = ["/".join(parts[: end + 1]) for end in range(len(parts))]
        decided = False
        for pattern, is_ignored in self._rules:
            if any(pattern.fullmatch(each) for each in paths):
                decided = is_ignored
        return decided
