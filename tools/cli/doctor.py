"""The command `doctor`: it prints which requirements this machine meets."""

from tools.cli.command_line import Command, Flag, ParsedCommand


def run(request: ParsedCommand) -> int:
    from tools.checks.doctor import doctor

    return doctor(request)


COMMAND = Command(
    run=run,
    text="check whether this machine meets the requirements",
    sections="model tasks",
    example="--config smoke",
    arguments="[--quick] [--config NAME|FILE] [key=value ...]",
    flags=(Flag(name="--quick", text="for doctor: check the machine only"),),
)
