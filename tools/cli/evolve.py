"""The command `evolve`: it plays, keeps successful episodes and trains on them."""

from tools.cli import requested
from tools.cli.command_line import Command, ParsedCommand
from tools.offline.config import EvolveConfig


def run(request: ParsedCommand) -> int:
    from tools.checks.environments import check_prompts, missing_for
    from tools.checks.role_starts import check_actor
    from tools.offline import checks

    cfg = requested.load_with_model(request)
    checks.check_evolve(cfg, missing=missing_for(cfg))
    check_actor(cfg)
    check_prompts(cfg)
    if request.is_dry:
        return requested.show_config(cfg, request.command)
    cfg, run_dir = requested.begin(cfg, request.command, keeps_date=True)
    from tools.offline.evolve import play_and_imitate

    return play_and_imitate(cfg, run_dir)


COMMAND = Command(
    run=run,
    text="play, keep successful episodes, train on them, repeat (AgentEvol)",
    sections="evolve sft model tasks learner actor",
    example="model.path=...",
    schema=EvolveConfig,
)
