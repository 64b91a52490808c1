"""The command `dashboard`: it serves a page about runs."""

from tools.cli.command_line import Command, ParsedCommand


def run(request: ParsedCommand) -> int:
    from tools.dashboard.web.server import dashboard

    return dashboard(request)


COMMAND = Command(
    run=run,
    text="serve a page about runs: charts, ledger, bottlenecks, replay of every episode",
    example="quickstart",
    arguments="[RUN|FILE ...] [port=N] [host=H] [token=T]",
)
