"""The command `merge`: it merges the adapters of a run into a plain policy."""

from common.log import configure_logging
from tools.cli import requested
from tools.cli.command_line import Command, ParsedCommand


def run(request: ParsedCommand) -> int:
    cfg = requested.load_joined(request)
    if request.is_dry:
        return requested.show_config(cfg, request.command)
    configure_logging(request.command, cfg.log.level)
    from tools.dequantise.models import plain_models
    from tools.offline.merge import merge

    return merge(plain_models(cfg), requested.directory_of(cfg))


COMMAND = Command(
    run=run,
    text="merge a run's newest adapters into a plain policy (learner.lora.rank)",
    sections="run learner",
    example="run.name=a",
)
