"""The command `bench`: it runs benchmarks or training studies."""

from common.errors import ConfigError
from common.repository import ROOT
from tools.cli.command_line import JSON, SUITES, Command, Flag, ParsedCommand

SUITE = f"--suite: only the command bench takes it and needs it: {SUITES}"


def run(request: ParsedCommand) -> int:
    if request.suite is None:
        raise ConfigError(SUITE)
    if request.minutes is not None and not 0 < request.minutes < 1e6:
        raise ConfigError(f"--minutes={request.minutes:g}: must be in (0, 1000000)")
    if not (ROOT / "benchmarks").is_dir():
        raise ConfigError(
            f"bench: {ROOT / 'benchmarks'} is missing. The benchmarks are not part of an"
            " installation. Run this command from a checkout of the repository."
        )
    from benchmarks.command import bench

    return bench(request)


COMMAND = Command(
    run=run,
    text="run benchmarks or training studies",
    sections="study",
    example="--suite envhub",
    arguments="--suite NAME [--json FILE] [--only CHECK] [--minutes N] [--dry-run] [key=value ...]",
    notes=(f"suites: {SUITES}",),
    flags=(
        Flag(name="--suite", metavar="NAME", text=f"for bench: {SUITES}", refusal=SUITE),
        Flag(
            name="--only",
            metavar="NAME",
            text="for bench --suite gpu or conformance: these checks, as NAME,NAME",
        ),
        Flag(
            name="--minutes",
            metavar="N",
            kind=float,
            text="for bench --suite gpu: at most N minutes",
        ),
        JSON,
    ),
)
