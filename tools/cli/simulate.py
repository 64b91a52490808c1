"""The command `simulate`: it simulates a run on a virtual clock."""

import sys

from tools.cli import requested
from tools.cli.command_line import Command, ParsedCommand
from tools.simulator.config import SimulatorConfig


def run(request: ParsedCommand) -> int:
    cfg = requested.on_loopback(requested.load_named(request))
    if request.is_dry:
        return requested.show_config(cfg, request.command)
    from tools.simulator.main import run as simulate

    return simulate(cfg, sys.stdout)


COMMAND = Command(
    run=run,
    text="simulate a run on a virtual clock: throughput, lag, losses, recommendations",
    sections="simulator tasks horizon groups scheduler",
    example="simulator.from_run=runs/quickstart",
    schema=SimulatorConfig,
)
