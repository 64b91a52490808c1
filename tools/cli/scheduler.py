"""The command `scheduler`: it runs the scheduler of a run in this process."""

from common.config.run_config import RunConfig
from common.store.run_dir import RunDir
from tools.cli.command_line import Command, ParsedCommand
from tools.launch import start


def run(request: ParsedCommand) -> int:
    return start.run_role(request, _run)


def _run(cfg: RunConfig, run_dir: RunDir) -> None:
    from scheduler.main import run as run_scheduler

    run_scheduler(cfg, run_dir)


COMMAND = Command(
    run=run, text="start the scheduler of a run", sections="run scheduler", example="run.name=a"
)
