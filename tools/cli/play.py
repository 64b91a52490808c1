"""The command `play`: it plays an environment in the terminal."""

import sys

from tools.cli.command_line import Command, ParsedCommand


def run(request: ParsedCommand) -> int:
    from tools.author.play import play

    return play(request, lines=sys.stdin)


COMMAND = Command(
    run=run,
    text="play an environment by hand in the terminal",
    sections="envs env",
    example="textcraft item=depth1-test-0",
    arguments="NAME|FILE.py:FUNCTION [item=ID] [style=NAME] [key=value ...]",
)
