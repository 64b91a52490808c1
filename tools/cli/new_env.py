"""The command `new-env`: it writes a template of an environment."""

from tools.cli.command_line import Command, ParsedCommand


def run(request: ParsedCommand) -> int:
    from tools.author.scaffold import new_env

    return new_env(request)


COMMAND = Command(
    run=run,
    text="write a template of an environment (about 40 lines) and a configuration to train on it",
    example="mygame",
    arguments="NAME [to=FOLDER]",
)
