"""The output of `run.py help`: text, type, default and constraint of each declared key.

`run.py help reference > docs/CONFIGURATION.md` writes that page; a test checks that it is current.
"""

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import Field, dataclass, fields, is_dataclass
from enum import Enum
from inspect import getdoc
from typing import Any, get_args, get_origin

from omegaconf import MISSING

from actor.policy import PolicySection
from common.config.keys import (
    choices_of,
    commands_of,
    declared,
    default_of,
    describe_kind,
    field_kinds,
)
from common.config.knobs import TEXT, Constraint
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.repository import with_program_name
from tools.cli.bench import StudySection
from tools.cli.command_line import Command, ParsedCommand, all_commands, command_help
from tools.evaluate.config import EvalOptions
from tools.offline.config import DpoSection, EvolveSection, SftSection
from tools.simulator.config import SimulatorSection

REFERENCE = "reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllKeys(RunConfig):
    """The keys of a run and those of all commands."""

    eval: EvalOptions = dataclasses.field(default_factory=EvalOptions)
    policy: PolicySection = dataclasses.field(default_factory=PolicySection)
    sft: SftSection = dataclasses.field(default_factory=SftSection)
    dpo: DpoSection = dataclasses.field(default_factory=DpoSection)
    evolve: EvolveSection = dataclasses.field(default_factory=EvolveSection)
    simulator: SimulatorSection = dataclasses.field(default_factory=SimulatorSection)
    study: StudySection = dataclasses.field(default_factory=StudySection)


LIVE = "Live: `set` changes it during a run."
HEAD = """# Configuration reference

This page lists every key with its default, its allowed values and its meaning. A YAML file in
`configs/` contains only the keys that differ from the defaults. `key=value` on the command line
overrides both. `python run.py set run.name=NAME KEY=VALUE` changes a live key while the run works.
`python run.py help KEY` prints one key, and
`python run.py help reference > docs/CONFIGURATION.md` writes this page.
"""


def help_text(topics: list[str]) -> str:
    """Return the help of a key, a section or a command; without a topic, of all sections.

    Raises: ConfigError: more than one topic, or an unknown one; the message names the nearest key.
    """
    if len(topics) > 1:
        raise ConfigError(f"help {' '.join(topics)}: give one key, section or command only")
    if not topics:
        head = (
            "Sections of the configuration. `run.py help SECTION` and `run.py help KEY` print more."
        )
        return f"{head}\n\n{_section(AllKeys, '')}"
    (topic,) = topics
    if topic == REFERENCE:
        return reference_text()
    parts = [command_help(topic)] if topic in all_commands() else []
    if not parts or topic in field_kinds(AllKeys):
        kind, field = declared(topic, shown=f"help {topic}", schema=AllKeys)
        parts.append(
            _section(kind, f"{topic}.") if is_dataclass(kind) else _key(topic, kind, field)
        )
    return "\n".join(parts)


def _section(section: Any, prefix: str) -> str:
    """Return the help of a section: its purpose, then a line for each key."""
    note = _only(prefix.rstrip("."))
    lines = [f"{getdoc(section) or ''}{note}", ""] if prefix else []
    for field in fields(section):
        kind = field_kinds(section)[field.name]
        if is_dataclass(kind):
            head = f"{prefix}{field.name}.*"
            text = (getdoc(kind) or "").split("\n")[0] + ("" if note else _only(head[:-2]))
        else:
            head = f"{prefix}{field.name}={_default(field)}"
            text = field.metadata["text"] + ("" if note else _only(f"{prefix}{field.name}"))
            ruled = _rule(kind, field).removeprefix("must be ")
            text += f" ({ruled})" if ruled else ""
        start = f"  {head:<38}  "
        further = " " * 42
        lines.append(textwrap.fill(text, 100, initial_indent=start, subsequent_indent=further))
    return "\n".join(lines) + "\n"


def _key(key: str, kind: Any, field: Field[Any]) -> str:
    """Return the help of one key, and of the section that a list or map has as elements."""
    from common.config.live import is_live

    ruled = _rule(kind, field)
    lines = [describe_kind(kind) + (f"; {ruled}" if ruled else ""), field.metadata["text"]]
    lines += [LIVE] if is_live(key) else []
    lines += [_only(key).strip()] if _only(key) else []
    if options := _options(kind):
        lines += ["", *options.split("\n")]
    text = "\n".join([f"{key}={_default(field)}", *(f"  {line}".rstrip() for line in lines)]) + "\n"
    element = get_args(kind)[-1] if get_args(kind) else None
    if not is_dataclass(element):
        return text
    return (
        f"{text}\n{_section(element, f'{key}[0].' if get_origin(kind) is list else f'{key}.NAME.')}"
    )


def _only(key: str) -> str:
    """Return a sentence about the commands that alone have a key; "" for a key of a run."""
    commands = commands_of(key, RunConfig)
    return f" Only {commands} {'read' if ' and ' in commands else 'reads'} it." if commands else ""


def _options(kind: Any) -> str:
    """Return the description of an enum's options: its docstring without the first paragraph.

    The first paragraph describes the enum itself, which the text of the key does as well.
    """
    return (getdoc(choices_of(kind)) or "").partition("\n\n")[2] if choices_of(kind) else ""


def _rule(kind: Any, field: Field[Any]) -> str:
    """Return a key's constraint as text; "" if its type is the only constraint."""
    law: Constraint = field.metadata["law"]
    leaf = get_args(kind)[-1] if get_args(kind) and not choices_of(kind) else kind
    return law.phrase if leaf in (int, float, str) and law.form is not TEXT else ""


def _default(field: Field[Any]) -> str:
    """Return a key's default in the notation of the command line."""
    value = default_of(field)
    if value == MISSING:
        return "(needed)"
    if isinstance(value, list):
        value = [each.value if isinstance(each, Enum) else each for each in value]
    plain = value.value if isinstance(value, Enum) else value
    return str(plain).lower() if isinstance(plain, bool) else str(plain) or '""'


def reference_text() -> str:
    """Return the configuration reference as Markdown."""
    tops: list[tuple[str, Any, Field[Any]]] = []
    lines: list[str] = []
    for field in fields(AllKeys):
        kind = field_kinds(AllKeys)[field.name]
        element = get_args(kind)[-1] if get_args(kind) else None
        if not is_dataclass(kind):
            tops.append((field.name, kind, field))
        if not is_dataclass(kind) and not is_dataclass(element):
            continue
        section, prefix = (kind, field.name) if element is None else (element, f"{field.name}[0]")
        text = f"{' '.join((getdoc(section) or '').split())}{_only(field.name)}"
        lines += ["", f"## {field.name}", "", text, "", *_table(walk_keys(section, prefix))]
    head = [HEAD, "## Keys without a section", "", *_table(tops)]
    return "\n".join([*head, *lines]).rstrip() + "\n"


def walk_keys(section: Any, prefix: str) -> Iterator[tuple[str, Any, Field[Any]]]:
    """Yield every key below a section with its type and its field."""
    for field in fields(section):
        kind = field_kinds(section)[field.name]
        key = f"{prefix}.{field.name}"
        if is_dataclass(kind):
            yield from walk_keys(kind, key)
            continue
        yield key, kind, field
        element = get_args(kind)[-1] if get_args(kind) else None
        if is_dataclass(element):
            yield from walk_keys(element, f"{key}.NAME")


def _table(rows: Iterable[tuple[str, Any, Field[Any]]]) -> list[str]:
    """Return the rows of the reference's table for some keys."""
    from common.config.live import is_live

    lines = ["| key | default | allowed values | meaning |", "|---|---|---|---|"]
    for key, kind, field in rows:
        may_be = describe_kind(kind)
        rule = _rule(kind, field).removeprefix("must be ")
        may_be += f", {rule}" if rule else ""
        text = f"{field.metadata['text']} {' '.join(_options(kind).split())}".rstrip()
        text += f" {LIVE}" if is_live(key) else ""
        text += "" if _only(key.partition(".")[0]) else _only(key)
        cells = (f"`{key}`", f"`{_default(field)}`", may_be, text)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def run(request: ParsedCommand) -> int:
    print(with_program_name(help_text(request.overrides)), end="")
    return 0


COMMAND = Command(
    run=run,
    text="explain a key, a section or a command",
    example="learner.lr",
    arguments="[KEY|SECTION|COMMAND|reference]",
)
