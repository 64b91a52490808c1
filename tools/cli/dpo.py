"""The command `dpo`: it trains a policy on pairs of episodes."""

from tools.cli import requested
from tools.cli.command_line import Command, ParsedCommand
from tools.offline.config import DpoConfig


def run(request: ParsedCommand) -> int:
    from tools.offline import checks

    cfg = requested.load_with_model(request)
    checks.check_dpo(cfg)
    if request.is_dry:
        return requested.show_config(cfg, request.command)
    cfg, run_dir = requested.begin(cfg, request.command, keeps_date=False)
    from tools.offline.dpo import prefer

    return prefer(cfg, run_dir)


COMMAND = Command(
    run=run,
    text="train on pairs of better and worse episodes of the same item",
    sections="dpo model learner",
    example="model.path=... dpo.data=runs/mine",
    schema=DpoConfig,
)
