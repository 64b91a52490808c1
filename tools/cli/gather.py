"""The command `gather`: it completes a checkpoint with files of other nodes."""

from tools.cli.command_line import Command, ParsedCommand


def run(request: ParsedCommand) -> int:
    from tools.offline.gather import gather

    return gather(request)


COMMAND = Command(
    run=run,
    text="copy the files of a checkpoint from other nodes into it (learner.checkpoint_shards)",
    example="run.name=a /mnt/node-1/shards",
    arguments="run.name=NAME [step=N] [FOLDER|URL ...]",
)
