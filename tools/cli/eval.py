"""The command `eval`: it plays held-out items with a policy."""

from tools.cli import requested
from tools.cli.command_line import Command, ParsedCommand
from tools.evaluate.config import EvalConfig


def run(request: ParsedCommand) -> int:
    from tools.checks import preflight
    from tools.checks.environments import check_prompts, missing_for
    from tools.evaluate import settings

    cfg = requested.on_loopback(settings.load_evaluation(request))
    settings.check_evaluation(cfg, missing=missing_for(cfg, is_to_train=False))
    preflight.warn_of_unread_keys(cfg)
    if not cfg.policy.url:
        check_prompts(cfg)
    if request.is_dry:
        return requested.show_config(cfg, request.command)
    cfg, run_dir = requested.begin(cfg, request.command, keeps_date=True)
    from tools.evaluate.evaluate import evaluate

    return evaluate(cfg, run_dir)


COMMAND = Command(
    run=run,
    text="evaluate a checkpoint or an endpoint on held-out items; print tables with intervals",
    sections="eval policy model tasks actor envhub",
    example="model.path=... eval.k=4",
    schema=EvalConfig,
)
