"""Parser of the command line: commands, flags, overrides."""

import argparse
import platform
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import yaml

from common.config.load import list_configs, word_with_home
from common.errors import ConfigError
from common.repository import ROOT, git_revision
from common.text import near_hint


@dataclass(frozen=True, slots=True)
class CommandHelp:
    """The help of one command."""

    text: str
    sections: str  # Its most relevant sections of the configuration.
    example: str


COMMANDS = {
    name: CommandHelp(**each)
    for name, each in yaml.safe_load(
        Path(__file__).with_name("commands.yaml").read_text(encoding="utf-8")
    ).items()
}
# Suites that train. They accept key=value, including study.*, and --dry-run.
STUDIES = ("algorithms", "staleness", "teacher", "horizon", "peer")
SUITES = (
    "learner, weights, delta, actor, scheduler, transport, engines, envhub, end2end, tail, chaos,"
    " chaos-delta, chaos-adapters, chaos-short, conformance, gpu, gpu-small, "
) + ", ".join(STUDIES)


JOINING = ("actor", "envhub", "learner")  # Roles that can join from another machine.


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCommand:
    """The parsed command line."""

    command: str
    config: str | None
    overrides: list[str]  # The command `help` has its topics here.
    is_dry: bool
    suite: str | None
    json: str | None  # File for results; None: runs/bench/SUITE.json or RUN/recompute.json.
    only: str | None = None  # Checks or families of a suite, with commas between them.
    minutes: float | None = None  # Budget of the suite `gpu`.
    join: str | None = None  # HOST:PORT of a scheduler.
    key: str | None = None  # Key file that authorizes this machine.
    probe: str | None = None  # Probe of `status`: live or ready.
    filters: dict[str, str] = field(default_factory=dict[str, str])  # Filters of `show`, by name.
    steps: str | None = None  # Steps of `recompute`: a:b.
    is_quick: bool = False  # `doctor --quick`: only the fast machine checks.


class _Parser(argparse.ArgumentParser):
    """A parser that raises a ConfigError instead of exiting."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"{message} (see run.py --help)")


def parse(argv: Sequence[str]) -> ParsedCommand:
    """Return the parsed command line; `--help` and `--version` print and exit.

    Raises: ConfigError: an unknown flag or command.
    """
    parser = _make_parser()
    asked = parser.parse_intermixed_args(list(map(word_with_home, argv)))
    if asked.version:
        _print_and_exit(version_text())
    words: list[str] = asked.words
    is_named = bool(words) and "=" not in words[0]
    command = words.pop(0) if is_named else "train"
    if command not in COMMANDS:
        near = near_hint(command, COMMANDS, form=str)
        hint = near.replace("nearest", "nearest command") or "; `python run.py --help` lists them"
        raise ConfigError(f"{command}: not a command or key=value{hint}")
    if asked.help:
        _print_and_exit(command_help(command) if is_named else parser.format_help())
    _check_flags(asked, command)
    if command == "status" and words and "=" not in words[0]:
        words[:1] = _run_words(words[0])
    if asked.format is not None:
        if command != "journal":
            raise ConfigError("--format: only the command journal accepts it")
        words.append(f"format={asked.format}")
    filters = _filters(asked)
    if filters and command != "show":
        raise ConfigError("--item, --group, --failed, --best: only the command show accepts them")
    if (asked.join is None) != (asked.key is None):
        raise ConfigError("--join HOST:PORT and --key FILE: each needs the other")
    if asked.join is not None and (command not in JOINING or asked.config or asked.dry_run):
        raise ConfigError(
            f"--join: only the commands {', '.join(JOINING)} can join. The run sends their"
            " configuration, so --config and --dry-run are not allowed"
        )
    return ParsedCommand(
        command=command,
        config=asked.config,
        overrides=words,
        is_dry=asked.dry_run,
        suite=asked.suite,
        json=asked.json,
        only=asked.only,
        minutes=asked.minutes,
        join=asked.join,
        key=asked.key,
        probe=asked.probe,
        filters=filters,
        steps=asked.steps,
        is_quick=asked.quick,
    )


def _check_flags(asked: argparse.Namespace, command: str) -> None:
    """Raise ConfigError if the command does not accept one of the flags."""
    if (asked.suite is None) == (command == "bench"):
        raise ConfigError(f"--suite: only the command bench takes it and needs it: {SUITES}")
    if asked.json is not None and command not in ("bench", "recompute"):
        raise ConfigError("--json: only the commands bench and recompute accept it")
    if asked.only is not None and command != "bench":
        raise ConfigError("--only: only the command bench accepts it")
    if asked.minutes is not None and command != "bench":
        raise ConfigError("--minutes: only the command bench accepts it")
    if asked.minutes is not None and not 0 < asked.minutes < 1e6:
        raise ConfigError(f"--minutes={asked.minutes:g}: must be in (0, 1000000)")
    if asked.steps is not None and command != "recompute":
        raise ConfigError("--steps: only the command recompute accepts it")
    if asked.quick and command != "doctor":
        raise ConfigError("--quick: only the command doctor accepts it")
    if asked.probe is not None and command != "status":
        raise ConfigError("--probe: only the command status accepts it")


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
    command = COMMANDS[name]
    arguments = {
        "help": "[KEY|SECTION|COMMAND|reference]",
        "bench": "--suite NAME [--json FILE] [--only CHECK] [--minutes N] [--dry-run] [key=value"
        " ...]",
        "dashboard": "[RUN|FILE ...] [port=N] [host=H] [token=T]",
        "show": "RUN [--item ID] [--group ID] [--failed] [--best] [num=N] [FILTER=VALUE ...]",
        "replay": "RUN EPISODE",
        "doctor": "[--quick] [--config NAME|FILE] [key=value ...]",
        "report": "RUN [RUN ...] [to=FILE]",
        "status": "[RUN] [--config NAME|FILE] [key=value ...]",
        "gather": "run.name=NAME [step=N] [FOLDER|URL ...]",
        "new-env": "NAME [to=FOLDER]",
        "check-env": "NAME|FILE.py:FUNCTION [items=N] [style=NAME] [key=value ...]",
        "play": "NAME|FILE.py:FUNCTION [item=ID] [style=NAME] [key=value ...]",
        "recompute": "RUN [--steps a:b] [--json FILE] [--dry-run] [key=value ...]",
        "journal": "RUN list|verify|export|prune [to=FILE] [--format NAME] [keep_gb=N] ...",
    }.get(name, "[--config NAME|FILE] [--dry-run] [key=value ...]")
    lines = [f"usage: run.py {name} {arguments}", "", f"  {command.text}"]
    lines += [f"  suites: {SUITES}"] if name == "bench" else []
    if name == "status":
        lines += [
            "  --probe live|ready: exit code 1 and the reason if the run is not live or ready"
        ]
    if name in JOINING:
        lines += [f"  from another machine: run.py {name} --join HOST:PORT --key FILE [key=value]"]
    lines += [f"  example: run.py {name} {command.example}"]
    if command.sections:
        lines += [f"  sections (run.py help SECTION): {', '.join(command.sections.split())}"]
    return "\n".join(lines) + "\n"


def version_text() -> str:
    """Return the version of the project and the commit of its code."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    revision = git_revision()
    code = f"git {revision}, " if revision else ""
    return f"{project['name']} {project['version']} ({code}Python {platform.python_version()})"


def _print_and_exit(text: str) -> NoReturn:
    sys.stdout.write(f"{text.rstrip()}\n")
    sys.exit(0)


def _make_parser() -> _Parser:
    """Return the parser of all commands with their flags."""
    commands = "\n".join(f"  {name:<10} {command.text}" for name, command in COMMANDS.items())
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
            "Relative paths start at the project's directory. Exit codes: 0 finished,\n"
            "1 a role failed, 2 wrong configuration, 130/143 interrupted."
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
    parser.add_argument(
        "--probe",
        choices=("live", "ready"),
        help="for status: exit code 1 if the run is not alive (live) or does no work (ready)",
    )
    parser.add_argument("--quick", action="store_true", help="for doctor: check the machine only")
    parser.add_argument("--item", metavar="ID", help="for show: episodes of this item")
    parser.add_argument("--group", metavar="ID", help="for show: episodes of this group")
    parser.add_argument("--failed", action="store_true", help="for show: unsolved episodes")
    parser.add_argument("--best", action="store_true", help="for show: highest rewards first")
    parser.add_argument(
        "--format", metavar="NAME", help="for journal export: json, agenttraj, sft, parquet, atif"
    )
    parser.add_argument("--suite", metavar="NAME", help=f"for bench: {SUITES}")
    parser.add_argument(
        "--only",
        metavar="NAME",
        help="for bench --suite gpu or conformance: these checks, as NAME,NAME",
    )
    parser.add_argument(
        "--minutes", metavar="N", type=float, help="for bench --suite gpu: at most N minutes"
    )
    parser.add_argument("--steps", metavar="A:B", help="for recompute: steps A to B, both included")
    parser.add_argument("--json", metavar="FILE", help="for bench and recompute: file of results")
    return parser
