"""The command `envs`: it lists the environments and their tasks."""

from tools.cli.command_line import Command, ParsedCommand


def run(request: ParsedCommand) -> int:
    from tools.author.listing import list_environments

    return list_environments(request.overrides)


COMMAND = Command(
    run=run,
    text="list the environments and their tasks",
    sections="envs env",
    example="env=textcraft,babyai",
)
