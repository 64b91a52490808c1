"""The command `sft`: it trains a policy on demonstrations."""

from tools.cli import requested
from tools.cli.command_line import Command, ParsedCommand
from tools.offline.config import SftConfig


def run(request: ParsedCommand) -> int:
    from tools.checks.environments import missing_for
    from tools.offline import checks

    cfg = requested.load_with_model(request)
    checks.check_model_is_used(request, cfg)
    checks.check_sft(cfg, missing=missing_for(cfg))
    if request.is_dry:
        return requested.show_config(cfg, request.command)
    cfg, run_dir = requested.begin(cfg, request.command, keeps_date=True)
    from tools.offline.sft import collect_and_imitate

    return collect_and_imitate(cfg, run_dir)


COMMAND = Command(
    run=run,
    text="create or warm-start a policy from demonstrations, on this machine",
    sections="sft model tasks learner",
    example="--config tiny run.name=mine",
    schema=SftConfig,
)
