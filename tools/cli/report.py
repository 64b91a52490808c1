"""The command `report`: it writes the page of runs as one file."""

from tools.cli.command_line import Command, ParsedCommand


def run(request: ParsedCommand) -> int:
    from tools.report.command import report

    return report(request)


COMMAND = Command(
    run=run,
    text="write the report of a run again, or one report that compares several runs",
    example="quickstart other",
    arguments="RUN [RUN ...] [to=FILE]",
)
