"""Texts of the terminal: commands of actions, descriptions of results, and rewards."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from envhub.sandbox.interface import LOGS, SOLUTION, TESTS, CommandEnd, CommandResult

VERIFIER = f"{LOGS}/verifier"
NO_COMMAND = (
    "Invalid action: it must be one shell command, in one ```bash block or as plain text. A block"
    " around lines of ``` needs a longer fence."
)
SHELLS = ("", "bash", "sh", "shell", "console", "zsh", "shellscript", "shell-session", "terminal")
MAX_BLOCKS = 20  # An action with more is invalid. The time of the search grows with their square.
OPENING = re.compile(
    r"(?P<before>[ \t]*|.*:[ \t]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[\w.+{}= -]*)\r?"
)
CLOSING = re.compile(r"[ \t]*(?P<fence>`{3,}|~{3,})[ \t\r]*")
LABEL = re.compile(r"[ \t]*(?:Thought:.*[ \t])?Action:[ \t]*(?P<rest>.*)")
# An escape, a comment, a here-string, a here-document or a quote, outside of strings. The word of a
# plain here-document begins with a letter: 1<<3 is a shift.
TOKEN = re.compile(
    r"""\\.?|(?<![^\s;(])\#.*|<<<|(?P<quote>\$?'|")|<<(?P<dash>-?)[ \t]*"""
    r"""(?:(?P<mark>['"])(?P<quoted>.+?)(?P=mark)|\\?(?P<plain>[A-Za-z_]\w*))"""
)
STRING_ENDS = {
    "'": re.compile(r"[^']*'"),
    "$'": re.compile(r"(?:[^'\\]|\\.)*'"),
    '"': re.compile(r'(?:[^"\\]|\\.)*"'),
}
MAX_WORD = 100  # Characters before a quote that decide whether it opens a string.
# Text before a quote that opens a string; an apostrophe of a sentence follows a letter.
BEFORE_STRING = re.compile(r"(?:^|[\s=(\[{,:;|&`])$|(?:^|\s)-\S*$")
ENDS = {
    CommandEnd.TIMEOUT: "The command took longer than {limit:g} s.",
    CommandEnd.MEMORY: "The command exceeded the memory limit.",
    CommandEnd.FILES: "The command created too many files.",
    CommandEnd.DISK: "The command wrote more than the limit of the disk.",
}
# The shell keeps its directory and exported variables between commands.
SHELL = """
trap '{ printf "cd %q\\n" "$PWD"; export -p; } >/tmp/.shell_state 2>/dev/null' EXIT
cd "$2" 2>/dev/null
[ -f /tmp/.shell_state ] && . /tmp/.shell_state 2>/dev/null
eval "set --; $1"
"""
CLEAR = f"""
chmod -R u+rwX {TESTS} {LOGS} 2>/dev/null
find {TESTS} {LOGS} -mindepth 1 -delete && mkdir {VERIFIER}
"""
# The folders of a container, which root makes. Its own users write logs and the solution.
OPEN_CONTAINER = f"""
mkdir -p {VERIFIER} {LOGS}/agent {LOGS}/artifacts {SOLUTION} &&
chmod 777 {LOGS} {LOGS}/* {SOLUTION}
"""
CLEAR_CONTAINER = f"""
rm -rf {TESTS} {VERIFIER} && mkdir -p {TESTS} {VERIFIER} &&
chmod 755 {TESTS} && chmod 777 {VERIFIER}
"""
# The folder of the reward, where the image has the tests.
CLEAR_REWARD = f"rm -rf {VERIFIER} && mkdir -p {VERIFIER} && chmod 777 {VERIFIER}"


def command_of(action: str) -> str:
    """Return the command of an action; "" if it has none, or if its limits are ambiguous.

    The command is the last fenced block of a shell, the text after a line's `Action:`, or the whole
    text. Fences and `Action:` in here-documents and strings are parts of the command.
    """
    text = action.encode("utf-8", errors="replace").decode()
    lines = text.rstrip().split("\n")
    try:
        return _parse(lines, is_prose=True).command().strip()
    except _Ambiguous:
        return ""


def action_of(command: str) -> str:
    """Return an action with this command: the command itself, or a block around it."""
    if command_of(command) == command:
        return command
    longest = max((len(run) for run in re.findall("`+", command)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}bash\n{command}\n{fence}"


class _Ambiguous(ValueError):
    """An action whose command could begin or end at several places."""


@dataclass(slots=True)
class _Action:
    """The parts of an action: text, commands of blocks, and the command after `Action:`."""

    outside: list[str] = field(default_factory=list[str])
    blocks: list[str] = field(default_factory=list[str])
    has_foreign_block: bool = False  # A block of another language is no command.
    labelled: str | None = None

    def command(self) -> str:
        """Return the command; "" if there is none. Raises: _Ambiguous: there are two."""
        if self.labelled is not None:
            if any(block.strip() for block in self.blocks):
                raise _Ambiguous
            return self.labelled
        if self.blocks or self.has_foreign_block:
            return "".join(self.blocks[-1:])
        return "\n".join(self.outside)


def _parse(lines: Sequence[str], *, is_prose: bool) -> _Action:
    """Return the parts of an action. Raises: _Ambiguous.

    Args:
        is_prose: text outside of blocks may be sentences with apostrophes, and may have a label.
    """
    action = _Action()
    for _ in range(MAX_BLOCKS):
        for index, inside in enumerate(_insides(lines, is_prose=is_prose)):
            line = lines[index]
            if not inside and (opening := OPENING.fullmatch(line)):
                if LABEL.fullmatch(opening["before"]):
                    _add_labelled(action, ["", opening[0][opening.start("fence") :]], lines, index)
                    return action
                content, length = _block(opening, lines[index + 1 :])
                if (opening["info"].lower().split() or [""])[0] in SHELLS:
                    action.blocks.append(content)
                else:
                    action.has_foreign_block = True
                lines = lines[index + 1 + length :]
                break
            if not inside and (label := LABEL.fullmatch(line)):
                if not is_prose:
                    raise _Ambiguous  # A second label.
                _add_labelled(action, [label["rest"]], lines, index)
                return action
            action.outside.append(line)
        else:
            return action
    raise _Ambiguous


def _add_labelled(action: _Action, first: list[str], lines: Sequence[str], index: int) -> None:
    """Add the command after a label. Raises: _Ambiguous."""
    action.labelled = _parse([*first, *lines[index + 1 :]], is_prose=False).command()


def _block(opening: re.Match[str], following: Sequence[str]) -> tuple[str, int]:
    """Return the content of a block, and the number of its lines. Raises: _Ambiguous."""
    fence = opening["fence"]
    indent = 0 if opening["before"].strip() else len(opening["before"])
    lines = [line[min(indent, len(line) - len(line.lstrip(" "))) :] for line in following]
    insides = _insides(lines, is_prose=False)
    has_end_in_string = False
    for index, (line, inside) in enumerate(zip(lines, insides, strict=True)):
        closing = CLOSING.fullmatch(line)
        is_end = closing is not None and closing["fence"].startswith(fence)
        if inside:
            has_end_in_string = has_end_in_string or (is_end and inside != "<<")
        elif is_end:
            return "\n".join(lines[:index]), index + 1
        elif line.lstrip().startswith(fence):
            raise _Ambiguous  # Either a block in this one, or the end of this one is missing.
    if has_end_in_string:
        raise _Ambiguous
    content = "\n".join(lines).rstrip()
    if lines and not insides[-1]:
        content = content.removesuffix(fence)  # The last line has a command and the end.
    outside = [
        line for line, inside in zip(content.split("\n"), insides, strict=False) if not inside
    ]
    if any(fence in line for line in outside):
        raise _Ambiguous
    return content, len(lines)


def _insides(lines: Sequence[str], *, is_prose: bool) -> list[str]:
    """Return where each line begins in the shell: "<<" in a here-document, a quote, or "".

    A here-document without an end is none, and so is a string.
    """
    literals: set[tuple[int, int]] = set()  # Places of quotes that open no string.
    while True:
        insides, is_open_at = _scan(lines, literals, is_prose=is_prose)
        if is_open_at is None:
            return insides
        literals.add(is_open_at)


def _scan(
    lines: Sequence[str], literals: set[tuple[int, int]], *, is_prose: bool
) -> tuple[list[str], tuple[int, int] | None]:
    """Return where each line begins, and the place of a string without an end."""
    last = {line: number for number, line in enumerate(lines)}
    last |= {f"-{line.lstrip(chr(9))}": number for number, line in enumerate(lines)}
    insides: list[str] = []
    documents: list[str] = []  # Last lines of the open here-documents, as keys of `last`.
    quote = ""
    place = (-1, -1)
    for number, line in enumerate(lines):
        if documents and not quote:
            insides.append("<<")
            is_last = documents[0] in (line, f"-{line.lstrip(chr(9))}")
            documents = documents[1:] if is_last else documents
            continue
        insides.append(quote)
        column = 0
        while column < len(line):
            if quote:
                end = STRING_ENDS[quote].match(line, column)
                if end is None:
                    break
                column = end.end()
                quote = ""
            elif (token := TOKEN.search(line, column)) is None:
                break
            else:
                column = token.end()
                word = token["quoted"] or token["plain"]
                if token["quote"]:
                    opens = not is_prose or BEFORE_STRING.search(
                        line[max(0, token.start() - MAX_WORD) : token.start()]
                    )
                    if opens and (number, token.start()) not in literals:
                        quote = token["quote"]
                        place = (number, token.start())
                elif word and last.get(token["dash"] + word, -1) > number:
                    documents.append(token["dash"] + word)
    return insides, place if quote else None


def describe(result: CommandResult, limit_s: float, max_chars: int) -> str:
    """Return a command's output with notes; a long output loses its middle."""
    text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in result.text)
    if len(text) > max_chars:
        half = max_chars // 2
        note = f"\n[{len(text) - 2 * half} characters were left out here]\n"
        text = text[:half] + note + text[-half:]
    lines = [text.rstrip("\n")] if text.strip() else []
    if result.ended_by is not CommandEnd.EXIT:
        lines.append(ENDS[result.ended_by].format(limit=limit_s))
        lines.append("All processes were ended.")
    elif result.exit_code != 0:
        lines.append(f"[exit code {result.exit_code}]")
    return "\n".join(lines) or "[no output]"


def reward_of(text: str) -> float:
    """Return the reward of reward.txt (a number) or reward.json (`reward`, or its only entry).

    Raises: ValueError: it is no number in [0, 1], or it has several rewards.
    """
    try:
        parsed = float(text)  # Texts such as ".5", which JSON lacks, are numbers in reward.txt.
    except ValueError:
        try:
            parsed = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"the reward is {text.strip()[:80]!r}, no number: {error}") from error
    if isinstance(parsed, dict):
        if not parsed or not all(isinstance(each, (int, float)) for each in parsed.values()):
            raise ValueError(f"the rewards are {text.strip()[:80]!r}, not numbers")
        if "reward" not in parsed and len(parsed) > 1:
            names = ", ".join(map(str, parsed))
            raise ValueError(f"it has several rewards ({names[:80]}), and none is named reward")
        parsed = parsed["reward"] if "reward" in parsed else next(iter(parsed.values()))
    if isinstance(parsed, bool) or not isinstance(parsed, (int, float)) or not 0 <= parsed <= 1:
        raise ValueError(f"the reward is {text.strip()[:80]!r}, not a number in [0, 1]")
    return float(parsed)
