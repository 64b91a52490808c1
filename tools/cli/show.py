"""The command `show`: it lists the episodes of a run."""

from tools.cli.command_line import Command, Flag, ParsedCommand

REFUSAL = "--item, --group, --failed, --best: only the command show accepts them"


def run(request: ParsedCommand) -> int:
    from tools.dashboard.show import show

    return show(request)


COMMAND = Command(
    run=run,
    text="print episodes of a run or of an AgentTraj file as conversations with rewards",
    example="quickstart --failed",
    arguments="RUN [--item ID] [--group ID] [--failed] [--best] [num=N] [FILTER=VALUE ...]",
    flags=(
        Flag(name="--item", metavar="ID", text="for show: episodes of this item", refusal=REFUSAL),
        Flag(
            name="--group", metavar="ID", text="for show: episodes of this group", refusal=REFUSAL
        ),
        Flag(name="--failed", text="for show: unsolved episodes", refusal=REFUSAL),
        Flag(name="--best", text="for show: highest rewards first", refusal=REFUSAL),
    ),
)
