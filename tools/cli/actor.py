"""The command `actor`: it runs one actor in this process."""

from typing import TYPE_CHECKING

from common.config.run_config import RunConfig
from common.store.run_dir import RunDir
from tools.cli.command_line import Command, ParsedCommand
from tools.launch import start

if TYPE_CHECKING:
    from common.join.enrol import Joined


def run(request: ParsedCommand) -> int:
    if request.join is not None:
        return start.join_run(request, _run_joined)
    return start.run_role(request, _run)


# A role imports its libraries after its checks, inside the guard that classifies a failed start.


def _run(cfg: RunConfig, run_dir: RunDir) -> None:
    from actor.main import run as run_actor

    run_actor(cfg, run_dir)


def _run_joined(cfg: RunConfig, joined: "Joined") -> None:
    from actor.main import run_joined

    run_joined(cfg, joined)


COMMAND = Command(
    run=run,
    text="start one more actor of a run; it may join and leave at any time",
    sections="run actor",
    example="run.name=a actor.name=extra",
    can_join=True,
)
