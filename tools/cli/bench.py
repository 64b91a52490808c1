"""The command `bench`: it runs benchmarks or training studies."""

from dataclasses import dataclass, field

from common.config.knobs import PATH, knob
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.repository import CODE
from tools.cli.command_line import JSON, SUITES, Command, Flag, ParsedCommand

SUITE = f"--suite: only the command bench takes it and needs it: {SUITES}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySection:
    """A study of `bench --suite NAME`: several arms of runs over seeds."""

    workers: int = knob(2, "Limits the concurrent runs of a study.", ge=1, le=10**4)
    size: float = knob(1.0, "Multiplies the steps of every run of a study.", gt=0, le=1000)
    num_seeds: int = knob(
        0, "Runs this many seeds of each arm. 0 uses the suite's own number.", ge=0, le=1000
    )
    only: list[str] = knob(
        [], "Selects runs (ARM-seedN) or arms. [] selects all that are not finished."
    )
    folder: str = knob(
        "", "Names the study's folder below run.dir. Empty means study-SUITE.", form=PATH, also=""
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyConfig(RunConfig):
    """The configuration of `bench --suite NAME` for a study."""

    study: StudySection = field(default_factory=StudySection)


def run(request: ParsedCommand) -> int:
    if request.suite is None:
        raise ConfigError(SUITE)
    if request.minutes is not None and not 0 < request.minutes < 1e6:
        raise ConfigError(f"--minutes={request.minutes:g}: must be in (0, 1000000)")
    if not (CODE / "benchmarks").is_dir():
        raise ConfigError(
            f"bench: {CODE / 'benchmarks'} is missing. The benchmarks are not part of an"
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
    schema=StudyConfig,
)
