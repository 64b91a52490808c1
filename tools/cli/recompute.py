"""The command `recompute`: it recomputes the training of a run."""

from common.log import configure_logging
from tools.cli.command_line import JSON, Command, Flag, ParsedCommand


def run(request: ParsedCommand) -> int:
    configure_logging("recompute", "WARNING")  # Libraries read the level when they are imported.
    from tools.recompute.command import recompute

    return recompute(request)


COMMAND = Command(
    run=run,
    text="recompute a run's training, bit for bit or with other settings",
    sections="algorithm learner",
    example="quickstart --steps 1:50 algorithm.correction=none",
    arguments="RUN [--steps a:b] [--json FILE] [--dry-run] [key=value ...]",
    flags=(
        Flag(name="--steps", metavar="A:B", text="for recompute: steps A to B, both included"),
        JSON,
    ),
)
