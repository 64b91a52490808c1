"""The command `check-env`: it reports whether an environment is fit for training."""

from tools.cli.command_line import Command, ParsedCommand


def run(request: ParsedCommand) -> int:
    from tools.author.check_env import check_env

    return check_env(request)


COMMAND = Command(
    run=run,
    text="play an environment and report whether it is fit for training; exit code 1 if not",
    sections="envs env",
    example="environments/mygame.py:make_spec",
    arguments="NAME|FILE.py:FUNCTION [items=N] [style=NAME] [key=value ...]",
)
