"""The command `envhub`: it serves environments, of a run or alone, in this process."""

from typing import TYPE_CHECKING

from common.config.run_config import RunConfig
from common.memory import use_system_allocator
from common.store.run_dir import RunDir
from tools.cli import requested
from tools.cli.command_line import Command, ParsedCommand
from tools.launch import start

if TYPE_CHECKING:
    from common.join.enrol import Joined


def run(request: ParsedCommand) -> int:
    if not request.is_dry:
        use_system_allocator()
    if request.join is None and requested.belongs_to_no_run(request):
        from tools.checks.environments import run_hub

        return run_hub(request.overrides, is_dry=request.is_dry)
    if request.join is not None:
        return start.join_run(request, _run_joined)
    return start.run_role(request, _run)


# A role imports its libraries after its checks, inside the guard that classifies a failed start.


def _run(cfg: RunConfig, run_dir: RunDir) -> None:
    from envhub.main import run as run_hub

    run_hub(cfg, run_dir)


def _run_joined(cfg: RunConfig, joined: "Joined") -> None:
    from envhub.main import run_joined

    run_joined(cfg, joined)


COMMAND = Command(
    run=run,
    text="serve environments of a run, or others",
    sections="envhub envs env",
    example="env=textcraft,babyai port=8080",
    can_join=True,
)
