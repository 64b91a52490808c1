"""The command `journal`: it works on the trajectories of a run."""

from tools.cli.command_line import Command, Flag, ParsedCommand


def run(request: ParsedCommand) -> int:
    from tools.exchange.journal import journal

    return journal(request)


COMMAND = Command(
    run=run,
    text="list, verify, export or prune the trajectories of a run; copy a run to a store, fetch it",
    sections="journal",
    example="quickstart verify",
    arguments="RUN list|verify|export|prune [to=FILE] [--format NAME] [keep_gb=N] ...",
    flags=(
        Flag(
            name="--format",
            metavar="NAME",
            text="for journal export: json, agenttraj, sft, parquet, atif",
        ),
    ),
)
