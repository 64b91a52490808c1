"""The command `replay`: it prints one episode of a run."""

from tools.cli.command_line import Command, ParsedCommand


def run(request: ParsedCommand) -> int:
    from tools.dashboard.show import replay

    return replay(request)


COMMAND = Command(
    run=run,
    text="replay one episode turn by turn, in colour",
    example="quickstart g0000012/3",
    arguments="RUN EPISODE",
)
