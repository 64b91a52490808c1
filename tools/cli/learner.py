"""The command `learner`: it runs the learner, or a node of its ranks, in this process."""

from typing import TYPE_CHECKING

from common.config.run_config import RunConfig
from common.memory import take_pinned_memory_exactly
from common.store.run_dir import RunDir
from tools.cli.command_line import Command, ParsedCommand
from tools.launch import start

if TYPE_CHECKING:
    from common.join.enrol import Joined


def run(request: ParsedCommand) -> int:
    take_pinned_memory_exactly()  # Before torch is imported.
    if request.join is not None:
        return start.join_run(request, _run_joined)
    return start.run_role(request, _run)


# A role imports its libraries after its checks, inside the guard that classifies a failed start.


def _run(cfg: RunConfig, run_dir: RunDir) -> None:
    from learner.main import run as run_learner

    run_learner(cfg, run_dir)


def _run_joined(cfg: RunConfig, joined: "Joined") -> None:
    from learner.node import run_joined

    run_joined(cfg, joined)


COMMAND = Command(
    run=run,
    text="start the learner of a run",
    sections="run learner",
    example="run.name=a",
    can_join=True,
)
