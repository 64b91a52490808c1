"""The command `status`: it prints the state of a run."""

from tools.cli import requested
from tools.cli.command_line import Command, Flag, ParsedCommand


def run(request: ParsedCommand) -> int:
    from tools.dashboard.terminal import load_of_any_version

    cfg = requested.on_loopback(load_of_any_version(request))
    if request.is_dry:
        return requested.show_config(cfg, request.command)
    from tools.dashboard import terminal

    run_dir = requested.directory_of(cfg)
    if request.probe is not None:
        return terminal.probe(cfg, run_dir, request.probe)
    return terminal.status(cfg, run_dir)


COMMAND = Command(
    run=run,
    text="print the state of a run, the latest or a named one",
    sections="run",
    example="run.name=a",
    arguments="[RUN] [--config NAME|FILE] [key=value ...]",
    notes=("--probe live|ready: exit code 1 and the reason if the run is not live or ready",),
    flags=(
        Flag(
            name="--probe",
            choices=("live", "ready"),
            text="for status: exit code 1 if the run is not alive (live) or does no work (ready)",
        ),
    ),
)
