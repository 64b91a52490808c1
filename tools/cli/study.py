"""The section `study`, and the configuration of the studies of `bench`."""

from dataclasses import dataclass, field

from common.config.knobs import PATH, knob
from common.config.run_config import RunConfig


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
