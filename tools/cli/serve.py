"""The command `serve`: it answers other programs with a policy."""

from actor.policy import PolicyConfig
from tools.cli import requested
from tools.cli.command_line import Command, ParsedCommand


def run(request: ParsedCommand) -> int:
    from tools.evaluate.settings import check_own_engine

    cfg = requested.load_with_model(request)
    check_own_engine(cfg)
    if request.is_dry:
        return requested.show_config(cfg, request.command)
    cfg, run_dir = requested.begin(cfg, request.command, keeps_date=False)
    from tools.serve import serve

    return serve(cfg, run_dir)


COMMAND = Command(
    run=run,
    text="answer other programs by OpenAI's and Anthropic's APIs with a checkpoint, on this machine"
    " only",
    sections="model actor policy",
    example="model.path=... policy.port=8000 policy.api_key_env=MY_KEY",
    schema=PolicyConfig,
)
