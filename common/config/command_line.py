"""The command line as text: commands, flags, overrides."""

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.config.load import list_configs
from common.errors import ConfigError

COMMANDS = {
    "train": "start all roles of a run, keep them alive, write the report (the default)",
    "sft": "make or warm-start a policy from demonstrations, on this machine",
    "dpo": "train on pairs of better and worse episodes of the same item (dpo.data=...)",
    "evolve": "play, keep what succeeded, train on it, and again (AgentEvol)",
    "eval": "play held-out items with a checkpoint or an endpoint: tables with intervals",
    "envhub": "serve environments: env=textcraft,babyai port=8080, or those of a run",
    "scheduler": "be the scheduler of a run",
    "learner": "be the learner of a run",
    "actor": "be one more actor of a run; may join and leave at any time",
    "envs": "list the tasks and environments (env=a,b: only theirs)",
    "status": "say how a run is doing (the latest, or run.name=...)",
    "simulate": "play a run on a virtual clock: throughput, lag, drops, and advice (simulator.*)",
    "doctor": "check what this machine has and lacks",
    "bench": "measure this machine or study training: --suite NAME",
}
SUITES = (
    "envhub, soak, solve, learner, scheduler, tail, gpu,"
    " algorithms, staleness, staleness-fast, curriculum"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the command line asked for."""

    command: str
    config: str | None
    overrides: list[str]
    is_dry: bool
    suite: str | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"{message} (see run.py --help)")


def parse(argv: Sequence[str], *, root: Path) -> Request:
    """Return what the command line asks for.

    Args:
        argv: without the program's name.
        root: the repository, whose configs the help lists.

    Raises:
        ConfigError: an unknown flag or command.
    """
    commands = "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
    parser = _Parser(
        prog="run.py",
        usage="run.py [COMMAND] [--config NAME|FILE] [--dry-run] [key=value ...]",
        description=f"Train language-model agents on long tasks.\n\ncommands:\n{commands}",
        epilog=(
            f"configs: {', '.join(list_configs(root))}\n"
            "overrides: any key of common/config/run_config.py, by its dotted name. Examples:\n"
            "  run.py                                  train with --config quickstart\n"
            "  run.py --config quickstart run.name=a train.num_steps=20 learner.lr=3e-4\n"
            "  run.py horizon.stages=[5,10] tasks[0].weight=0.5 train.mode=sync\n"
            "  run.py envhub env=textcraft,babyai port=8080    only the environments\n"
            "  run.py actor run.name=a actor.name=extra    one more actor for the run `a`\n"
            "Relative paths start at the project's directory. Exit codes: 0 finished,\n"
            "1 a role failed, 2 wrong configuration, 130/143 interrupted."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="NAME|FILE", help="a config by name, or a YAML file")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config, stop")
    parser.add_argument("--suite", metavar="NAME", help=f"of bench: {SUITES}")
    asked = parser.parse_intermixed_args(argv)
    words: list[str] = asked.words
    command = words.pop(0) if words and "=" not in words[0] else "train"
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1, cutoff=0.0)[0]
        raise ConfigError(f"{command}: neither a command nor key=value; the nearest is {near}")
    if (asked.suite is None) == (command == "bench"):
        raise ConfigError(f"--suite: bench needs it and nothing else has it, one of {SUITES}")
    return Request(
        command=command,
        config=asked.config,
        overrides=words,
        is_dry=asked.dry_run,
        suite=asked.suite,
    )
