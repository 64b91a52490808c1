"""The initial files of a task: a Dockerfile's instructions that need no build."""

import json
import os
import platform
import posixpath
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from common.errors import ConfigError
from envhub.sandbox.interface import HOME, PATH, USERS

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


DOCKERFILES = ("environment/Dockerfile", "Dockerfile")
# Folders of the sandbox that cannot be the work folder.
SYSTEM = (
    *("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "proc", "dev", "sys", "run"),
    *("tests", "logs", "solution", "tmp"),
)
FOLDER = "/app"  # Work folder if the Dockerfile names none.
MAX_BYTES = 256 << 20  # Size of the files of one task.
BUILD = "which only a container's build performs; set docker_image and envs.sandbox.backend=docker"
# Instructions without an effect on the commands of a task: they describe the image, its own start
# (a harness replaces CMD), the shell of RUN, or later builds.
SILENT = ("CMD", "EXPOSE", "LABEL", "MAINTAINER", "ONBUILD", "SHELL", "STOPSIGNAL")
COPY_FLAGS = ("chmod", "chown", "link")  # All files belong to the sandbox's only user.
SHELLS = ("sh", "bash", "/bin/sh", "/bin/bash", "/usr/bin/sh", "/usr/bin/bash")
MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
# Variables of the builder, which an ARG without a value makes visible.
BUILDER = {
    f"{side}{name}": value
    for side in ("TARGET", "BUILD")
    for name, value in (("OS", "linux"), ("ARCH", MACHINE), ("PLATFORM", f"linux/{MACHINE}"))
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFile:
    """A file that is written into the sandbox.

    Attributes:
        source: the file; None means that `text` is the content.
    """

    source: Path | None
    target: str
    mode: int
    text: str = ""

    @property
    def content(self) -> bytes:
        """The bytes of the file."""
        return self.text.encode() if self.source is None else self.source.read_bytes()

    @property
    def name(self) -> str:
        """The name of the file without its folders."""
        return posixpath.basename(self.target if self.source is None else str(self.source))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskImage:
    """The result of the supported instructions of a Dockerfile.

    Attributes:
        folder: the folder that the commands may write; "" means the work folder of the container's
            image.
        work: the directory in which commands start, in `folder`; "" means `folder`.
    """

    folder: str
    work: str
    files: tuple[TaskFile, ...]
    variables: Mapping[str, str]


def read_image(folder: Path, where: str, *, is_built: bool) -> TaskImage:
    """Return the work folder, files and variables of the Dockerfile, without running it.

    Args:
        is_built: a container has the result of the Dockerfile.

    Raises: ConfigError: an instruction that only a build can perform, such as RUN.
    """
    path = next((folder / name for name in DOCKERFILES if (folder / name).is_file()), None)
    if path is None:
        context = folder / "environment"
        target = "." if is_built else FOLDER
        files = files_below(context, target, folder, where) if context.is_dir() else ()
        return TaskImage(
            folder="" if is_built else FOLDER,
            work="",
            files=tuple(file for file in files if file.name != "docker-compose.yaml"),
            variables={},
        )
    if is_built:
        return TaskImage(folder="", work="", files=(), variables={})
    name = path.relative_to(folder)
    try:
        text = path.read_text(encoding="utf-8")
        stage = _Build(path, folder, where).last_stage(read_instructions(text))
        return _image_of(stage, where)
    except DockerfileError as error:
        raise ConfigError(f"{where}: {name}: {error}") from error


@dataclass(slots=True)
class _Stage:
    """The state of a stage of the build."""

    work: str = ""  # "" means that no instruction names one.
    folders: list[str] = field(default_factory=list[str])  # Work folders and volumes, in order.
    files: list[TaskFile] = field(default_factory=list[TaskFile])
    variables: dict[str, str] = field(default_factory=dict[str, str])
    arguments: dict[str, str] = field(default_factory=dict[str, str])

    def values(self) -> dict[str, str]:
        """Return the values that instructions see: ENV hides ARG."""
        return {"PATH": PATH, **self.arguments, **self.variables}


class _Build:
    """Performs instructions in the order of a Dockerfile."""

    def __init__(self, path: Path, folder: Path, where: str) -> None:
        self._path = path
        self._folder = folder
        self._where = where
        self._globals: dict[str, str] = {}  # ARG before the first FROM.
        self._stages: dict[str, _Stage] = {}
        self._context: dict[str, Path] | None = None

    def last_stage(self, instructions: Iterator[Instruction]) -> _Stage:
        """Return the result of the last stage. Raises: DockerfileError, ConfigError."""
        stage: _Stage | None = None
        for instruction in instructions:
            if instruction.word == "FROM":
                stage = self._from(instruction)
            elif stage is None:
                if instruction.word != "ARG":
                    raise DockerfileError(f"{instruction} stands before FROM")
                self._globals |= _arguments(instruction, self._globals, {})
            else:
                self._perform(instruction, stage)
        if stage is None:
            raise DockerfileError("it has no FROM")
        return stage

    def _from(self, instruction: Instruction) -> _Stage:
        """Return a new stage, which may continue an earlier one."""
        _, plain = instruction.flags()
        words = [expand(word, self._globals, plain.escape) for word in plain.words()]
        if len(words) not in (1, 3) or (len(words) == 3 and words[1].lower() != "as"):
            raise DockerfileError(f"{instruction} is not an image with a name")
        base = self._stages.get(words[0].lower(), _Stage())
        stage = replace(
            base,
            folders=[*base.folders],
            files=[*base.files],
            variables=dict(base.variables),
            arguments={},
        )
        if len(words) == 3:
            self._stages[words[2].lower()] = stage
        return stage

    def _perform(self, instruction: Instruction, stage: _Stage) -> None:
        """Change the stage as an instruction demands. Raises: DockerfileError, ConfigError."""
        word = instruction.word
        values = stage.values()
        if word == "ENV":
            stage.variables |= _variables(instruction, values)
        elif word == "ARG":
            stage.arguments |= _arguments(instruction, values, {**BUILDER, **self._globals})
        elif word == "WORKDIR":
            path = expand(instruction.text, values, instruction.escape)
            stage.work = _joined(stage.work, path)
            stage.folders.append(stage.work)
        elif word in ("COPY", "ADD"):
            stage.files += self._copied(instruction, stage)
        elif word == "USER":
            user = expand(instruction.text, values, instruction.escape).partition(":")[0]
            if user not in USERS:
                raise DockerfileError(
                    f"{instruction}: commands run as the user {' or '.join(USERS)} of the sandbox"
                )
        elif word == "VOLUME":
            words = instruction.json_words() or instruction.text.split()
            folders = [expand(each, values, instruction.escape) for each in words]
            stage.folders += [_joined("/", each) for each in folders]
        elif word == "ENTRYPOINT":
            if not is_shell(instruction.json_words()):
                raise DockerfileError(f"{instruction}: no program starts before the commands")
        elif word == "HEALTHCHECK" and instruction.text.upper() == "NONE":
            pass
        elif word == "RUN":
            raise DockerfileError(f"it has {instruction}, {BUILD}")
        elif word not in SILENT:
            raise DockerfileError(f"{instruction} is not supported")

    def _copied(self, instruction: Instruction, stage: _Stage) -> Iterator[TaskFile]:
        """Yield the files of COPY or ADD. Raises: DockerfileError, ConfigError."""
        flags, plain = instruction.flags()
        for flag in flags.keys() - COPY_FLAGS:
            raise DockerfileError(f"{instruction}: --{flag} is not supported")
        mode = flags.get("chmod", "")
        if mode and not re.fullmatch(r"0?[0-7]{3}", mode):
            raise DockerfileError(f"{instruction}: --chmod must be three octal digits")
        written = plain.json_words() or plain.text.split()
        words = [expand(word, stage.values(), plain.escape) for word in written]
        if len(words) < 2:
            raise DockerfileError(f"{instruction} has no target")
        *sources, target = words
        matches = [match for source in sources for match in self._matches(source, instruction)]
        goal = _joined(stage.work, target)
        is_folder = len(matches) > 1 or target.endswith(("/", "/.", "/..")) or target in (".", "..")
        taken = [stage.work or "/", *stage.folders, *(file.target for file in stage.files)]
        is_folder = is_folder or any(f"{each}/".startswith(f"{goal}/") for each in taken)
        for name, files in matches:
            for below, path in files.items():
                into = f"{goal}/{below}" if below else goal
                if not below and is_folder:
                    into = f"{goal}/{posixpath.basename(name)}"
                if plain.word == "ADD" and not below and tarfile.is_tarfile(path):
                    raise DockerfileError(f"{instruction} unpacks the archive {name}")
                [file] = files_below(path, posixpath.normpath(into), self._folder, self._where)
                yield replace(file, mode=int(mode, 8) if mode else file.mode)

    def _matches(
        self, source: str, instruction: Instruction
    ) -> Iterator[tuple[str, dict[str, Path]]]:
        """Yield each file or folder of a source with its files by their paths below it."""
        if re.match(r"[a-z+]+://|git@", source):
            raise DockerfileError(f"{instruction} downloads {source}")
        if self._context is None:
            self._context = _context_of(self._path)
        path = posixpath.normpath("/" + source.lstrip("/"))[
            1:
        ]  # The context is the root of all sources.
        pattern = pattern_of(path)
        matches: dict[str, dict[str, Path]] = {}
        for name, file in self._context.items():
            parts = name.split("/")
            for end in range(len(parts) + 1):
                begin = "/".join(parts[:end])
                if pattern.fullmatch(begin):
                    matches.setdefault(begin, {})["/".join(parts[end:])] = file
                    break
        if not matches and not (self._path.parent / path).is_dir():
            raise DockerfileError(f"{instruction.word} {source}: no such file")
        yield from sorted(matches.items())


def _context_of(path: Path) -> dict[str, Path]:
    """Return the files of a Dockerfile's folder by their paths, without the ignored ones."""
    root = path.parent
    names = (f"{path.name}.dockerignore", ".dockerignore")
    ignore = next((root / name for name in names if (root / name).is_file()), None)
    rules = IgnoreRules("" if ignore is None else ignore.read_text(encoding="utf-8"))
    files = sorted(each for each in root.rglob("*") if each.is_file())
    context = {each.relative_to(root).as_posix(): each for each in files}
    return {name: file for name, file in context.items() if not rules.ignores(name)}


def _joined(work: str, path: str) -> str:
    """Return an absolute path; a relative one is below the work folder."""
    return "/" + posixpath.normpath(posixpath.join(work or "/", path)).lstrip("/")


def _variables(instruction: Instruction, values: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ENV. All of its values see the variables before it."""
    words = instruction.words()
    if words and "=" not in words[0]:
        name, *rest = instruction.text.split(None, 1)
        if not rest:
            raise DockerfileError(f"{instruction} has no value")
        words = [f"{name}={rest[0]}"]
    variables: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = expand(name, values, instruction.escape)
        if not equals or not name:
            raise DockerfileError(f"{instruction}: {word!r} is not NAME=VALUE")
        variables[name] = expand(value, values, instruction.escape)
    return variables


def _arguments(
    instruction: Instruction, values: Mapping[str, str], defaults: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of ARG; one without a value takes a default of the whole build."""
    arguments: dict[str, str] = {}
    for word in instruction.words():
        name, equals, value = word.partition("=")
        name = expand(name, values, instruction.escape)
        if equals:
            arguments[name] = expand(value, {**values, **arguments}, instruction.escape)
        elif name in defaults:
            arguments[name] = defaults[name]
    return arguments


def is_shell(command: Sequence[str] | None) -> bool:
    """Return whether a start command does nothing but run another command."""
    return command is not None and (not command or (command[0] in SHELLS and len(command) < 3))


def _image_of(stage: _Stage, where: str) -> TaskImage:
    """Return the image of a stage. Raises: ConfigError: the sandbox cannot have its folders."""
    work = stage.work or FOLDER
    outside = ("/tmp/", f"{HOME}/")
    targets = [posixpath.dirname(file.target) for file in stage.files]
    folders = [f for f in [*stage.folders, *targets] if not f"{f}/".startswith(outside)]
    root = posixpath.commonpath([work, *folders])
    if not is_work_folder(work):
        raise ConfigError(f"{where}: WORKDIR {work} is a folder of the system")
    if not is_work_folder(root):
        other = next(f for f in folders if not is_work_folder(posixpath.commonpath([work, f])))
        file = next((f.target for f in stage.files if posixpath.dirname(f.target) == other), other)
        raise ConfigError(
            f"{where}: the Dockerfile writes {file}, which is outside of the work folder {work}"
        )
    return TaskImage(
        folder=root, work=work, files=tuple(stage.files), variables=dict(stage.variables)
    )


def is_work_folder(path: str) -> bool:
    """Return whether a path can be the folder that the commands may write."""
    return bool(re.fullmatch(r"/[\w./ -]+", path)) and path.split("/")[1] not in SYSTEM


def files_below(path: Path, target: str, folder: Path, where: str) -> Iterator[TaskFile]:
    """Yield a file, or all files of a folder. Raises: ConfigError: a link leaves the task."""
    files = [path] if path.is_file() else sorted(e for e in path.rglob("*") if e.is_file())
    total = 0
    for file in files:
        if not file.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"{where}: {file.relative_to(folder)} is a link out of the task")
        total += file.stat().st_size
        if total > MAX_BYTES:
            raise ConfigError(f"{where}: {path.name} has more than {MAX_BYTES >> 20} MiB")
        below = "" if file == path else f"/{file.relative_to(path).as_posix()}"
        mode = 0o755 if os.access(file, os.X_OK) else 0o644
        yield TaskFile(source=file, target=f"{target}{below}", mode=mode)
