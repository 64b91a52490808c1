"""Parser of the command line: commands, flags, overrides.

A command is a file of this folder with a `COMMAND`: its help, its flags and its function.
"""

import argparse
import functools
import importlib
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from common.config.load import list_configs, word_with_base
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.repository import NAME, ROOT, git_revision, product_version, with_program_name
from common.text import near_hint

# Every command in the order of the help. Its file is its name with "_" for "-".
NAMES = [
    "train",
    "sft",
    "dpo",
    "evolve",
    "merge",
    "gather",
    "eval",
    "serve",
    "envhub",
    "scheduler",
    "learner",
    "actor",
    "envs",
    "new-env",
    "check-env",
    "play",
    "set",
    "revoke",
    "status",
    "dashboard",
    "show",
    "replay",
    "report",
    "journal",
    "recompute",
    "simulate",
    "doctor",
    "bench",
    "help",
]
# Suites that train. They accept key=value, including study.*, and --dry-run.
STUDIES = (
    "algorithms",
    "staleness",
    "teacher",
    "horizon",
    "horizon-long",
    "peer",
    "peer-pretrained",
)
SUITES = (
    "learner, pretrained, prefix-trees, partial-episodes, virtual-horizon, weights, delta, actor,"
    " actor-pretrained, scheduler, transport, engines, envhub, saved-states, long-episodes,"
    " end2end, tail, chaos, chaos-delta, chaos-adapters, chaos-short, hostile, conformance,"
    " conformance-layouts, gpu, gpu-small, "
) + ", ".join(STUDIES)
USUAL = "[--config NAME|FILE] [--dry-run] [key=value ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCommand:
    """The parsed command line."""

    command: str
    config: str | None
    overrides: list[str]  # The command `help` has its topics here.
    is_dry: bool
    suite: str | None
    # File for results; None: runs/bench/SUITE.json, RUN/recompute.json or, for eval, no file.
    json: str | None
    only: str | None = None  # Checks or families of a suite, with commas between them.
    minutes: float | None = None  # Budget of the suite `gpu`.
    join: str | None = None  # HOST:PORT of a scheduler.
    key: str | None = None  # Key file that authorizes this machine.
    probe: str | None = None  # Probe of `status`: live or ready.
    filters: dict[str, str] = field(default_factory=dict[str, str])  # Filters of `show`, by name.
    steps: str | None = None  # Steps of `recompute`: a:b.
    is_quick: bool = False  # `doctor --quick`: only the fast machine checks.


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A flag of one or more commands."""

    name: str
    text: str
    metavar: str = ""  # "" for a flag without a value, or with choices.
    choices: tuple[str, ...] = ()
    kind: type[str] | type[float] = str
    refusal: str = ""  # The error for another command; "": the usual one.

    @property
    def field(self) -> str:
        """Return the name of the flag's value."""
        return self.name.removeprefix("--")


JSON = Flag(name="--json", metavar="FILE", text="for bench, recompute and eval: file of results")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command: its help, its flags and its function."""

    run: Callable[[ParsedCommand], int]  # It returns the exit code.
    text: str
    example: str
    sections: str = ""  # Its most relevant sections of the configuration.
    arguments: str = USUAL
    notes: tuple[str, ...] = ()  # Further lines of its help.
    flags: tuple[Flag, ...] = ()
    can_join: bool = False  # A role that can join from another machine.
    schema: type[RunConfig] = RunConfig  # Its configuration, with the keys of its own.


@functools.cache
def all_commands() -> Mapping[str, Command]:
    """Return every command by its name. Their files import heavy libraries when they run."""
    return {
        name: importlib.import_module(f"tools.cli.{name.replace('-', '_')}").COMMAND
        for name in NAMES
    }


def run_command(request: ParsedCommand) -> int:
    """Run the command of a request; return the exit code."""
    return all_commands()[request.command].run(request)


class _Parser(argparse.ArgumentParser):
    """A parser that raises a ConfigError instead of exiting."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"{message} (see run.py --help)")


def parse(argv: Sequence[str]) -> ParsedCommand:
    """Return the parsed command line; `--help` and `--version` print and exit.

    Raises: ConfigError: an unknown flag or command.
    """
    parser = _make_parser()
    asked = parser.parse_intermixed_args(list(map(word_with_base, argv)))
    if asked.version:
        _print_and_exit(version_text())
    words: list[str] = asked.words
    is_named = bool(words) and "=" not in words[0]
    name = words.pop(0) if is_named else "train"
    if name not in all_commands():
        near = near_hint(name, NAMES, form=str)
        hint = near.replace("nearest", "nearest command") or "; `python run.py --help` lists them"
        raise ConfigError(f"{name}: not a command or key=value{hint}")
    if asked.help:
        _print_and_exit(command_help(name) if is_named else parser.format_help())
    _check_flags(asked, name)
    if name == "status" and words and "=" not in words[0]:
        words[:1] = _run_words(words[0])
    if asked.format is not None:
        words.append(f"format={asked.format}")
    return ParsedCommand(
        command=name,
        config=_absolute(asked.config) if os.path.isfile(asked.config or "") else asked.config,
        overrides=words,
        is_dry=asked.dry_run,
        suite=asked.suite,
        json=asked.json,
        only=asked.only,
        minutes=asked.minutes,
        join=asked.join,
        key=_absolute(asked.key) if asked.key is not None else None,
        probe=asked.probe,
        filters=_filters(asked),
        steps=asked.steps,
        is_quick=asked.quick,
    )


def _absolute(path: str) -> str:
    """Return a path that stays valid after the change to the project's folder."""
    return str(Path(path).absolute())


def _check_flags(asked: argparse.Namespace, name: str) -> None:
    """Raise ConfigError if the command does not accept one of the flags."""
    for flag in _all_flags():
        is_given = getattr(asked, flag.field) not in (None, False)
        if is_given and flag not in all_commands()[name].flags:
            owners = sorted(n for n, command in all_commands().items() if flag in command.flags)
            usual = (
                f"commands {', '.join(owners[:-1])} and {owners[-1]} accept"
                if len(owners) > 1
                else f"command {owners[0]} accepts"
            )
            raise ConfigError(flag.refusal or f"{flag.name}: only the {usual} it")
    if (asked.join is None) != (asked.key is None):
        raise ConfigError("--join HOST:PORT and --key FILE: each needs the other")
    can_join = all_commands()[name].can_join
    if asked.join is not None and (not can_join or asked.config or asked.dry_run):
        joining = sorted(n for n, command in all_commands().items() if command.can_join)
        raise ConfigError(
            f"--join: only the commands {', '.join(joining)} can join. The run sends their"
            " configuration, so --config and --dry-run are not allowed"
        )


def _all_flags() -> list[Flag]:
    """Return the flags of all commands, each once."""
    return list(dict.fromkeys(flag for each in all_commands().values() for flag in each.flags))


def _run_words(word: str) -> list[str]:
    """Return the overrides for a run, which is given by its name or by its relative path."""
    path = Path(word)
    if not (len(path.parts) > 1 and path.is_dir()):
        return [f"run.name={word}"]
    path = path.resolve()
    return [f"run.dir={path.parent}", f"run.name={path.name}"]


def _filters(asked: argparse.Namespace) -> dict[str, str]:
    """Return the filters of `show`, named as in the dashboard."""
    filters = {name: value for name in ("item", "group") if (value := getattr(asked, name))}
    filters |= {"success": "0"} if asked.failed else {}
    return filters | ({"sort": "best"} if asked.best else {})


def command_help(name: str) -> str:
    """Return the output of `run.py NAME --help`."""
    command = all_commands()[name]
    lines = [f"usage: run.py {name} {command.arguments}", "", f"  {command.text}"]
    lines += [f"  {note}" for note in command.notes]
    if command.can_join:
        lines += [f"  from another machine: run.py {name} --join HOST:PORT --key FILE [key=value]"]
    lines += [f"  example: run.py {name} {command.example}"]
    if command.sections:
        lines += [f"  sections (run.py help SECTION): {', '.join(command.sections.split())}"]
    return "\n".join(lines) + "\n"


def version_text() -> str:
    """Return the version of the project and the commit of its code."""
    revision = git_revision()
    code = f"git {revision}, " if revision else ""
    return f"{NAME} {product_version()} ({code}Python {platform.python_version()})"


def _print_and_exit(text: str) -> NoReturn:
    sys.stdout.write(with_program_name(f"{text.rstrip()}\n"))
    sys.exit(0)


def _make_parser() -> _Parser:
    """Return the parser of all commands with their flags."""
    commands = "\n".join(f"  {name:<10} {command.text}" for name, command in all_commands().items())
    parser = _Parser(
        prog="run.py",
        usage="run.py [COMMAND] [--config NAME|FILE] [--dry-run] [key=value ...]",
        description=f"Train language-model agents on long tasks.\n\ncommands:\n{commands}",
        epilog=(
            f"configs: {', '.join(list_configs())}\n"
            "overrides: a key and its value; `run.py help` lists the sections. Examples:\n"
            "  run.py                                  train with --config quickstart\n"
            "  run.py --config quickstart run.name=a train.num_steps=20 learner.lr=3e-4\n"
            "  run.py horizon.stages=[5,10] tasks[0].weight=0.5 train.mode=sync\n"
            f"Relative paths start at {ROOT}.\n"
            "Exit codes: 0 finished, 1 a role failed, 2 wrong configuration, 130/143 interrupted."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("-h", "--help", action="store_true", help="print this help or a command's")
    parser.add_argument("--version", action="store_true", help="print the version and the commit")
    parser.add_argument("--config", metavar="NAME|FILE", help="a config's name, or a YAML file")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and exit")
    parser.add_argument("--join", metavar="HOST:PORT", help="join the run of this scheduler")
    parser.add_argument("--key", metavar="FILE", help="key to join with: the run's keys/join.key")
    for flag in _all_flags():
        if flag.choices:
            parser.add_argument(flag.name, choices=flag.choices, help=flag.text)
        elif flag.metavar:
            parser.add_argument(flag.name, metavar=flag.metavar, type=flag.kind, help=flag.text)
        else:
            parser.add_argument(flag.name, action="store_true", help=flag.text)
    return parser
