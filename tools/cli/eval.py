"""The command `eval`: it plays held-out items with a policy."""

from pathlib import Path

from common.errors import ConfigError
from tools.cli import requested
from tools.cli.command_line import JSON, Command, ParsedCommand
from tools.evaluate.config import EvalConfig


def run(request: ParsedCommand) -> int:
    from tools.checks import preflight
    from tools.checks.environments import check_prompts, missing_for
    from tools.evaluate import settings

    path = Path(request.json).absolute() if request.json else None
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"--json={path}: the folder of this file does not exist; create it")
    cfg = requested.on_loopback(settings.load_evaluation(request))
    missing = missing_for(cfg, is_to_train=False)
    settings.check_evaluation(cfg, missing=missing, is_dry=request.is_dry)
    preflight.warn_of_unread_keys(cfg)
    if not cfg.policy.url:
        check_prompts(cfg)
    if request.is_dry:
        return requested.show_config(cfg, request.command)
    cfg, run_dir = requested.begin(cfg, request.command, keeps_date=True)
    from tools.evaluate.evaluate import evaluate

    return evaluate(cfg, run_dir, scores_path=path)


COMMAND = Command(
    run=run,
    text="evaluate a checkpoint or an endpoint on held-out items; print tables with intervals",
    sections="eval policy model tasks actor envhub",
    example="model.path=... eval.k=4",
    arguments="[--config NAME|FILE] [--json FILE] [--dry-run] [key=value ...]",
    flags=(JSON,),
    schema=EvalConfig,
)
