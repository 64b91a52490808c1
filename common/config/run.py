"""The section `run`: location, seed, restarts and stalls of a run."""

from dataclasses import dataclass
from enum import StrEnum

from common.config.knobs import FILE_NAME, PATH, knob, seconds


class Resume(StrEnum):
    """Reaction to a used run directory.

    auto: continue if the run directory holds a checkpoint. never: refuse a used directory.
    """

    AUTO = "auto"
    NEVER = "never"


class OnStall(StrEnum):
    """Action after a report about a stalled role or run.

    warn: logs the report. restart: restarts the stalled roles; at the fourth report without
    progress in between, the run is stopped. stop: stops the run.
    """

    WARN = "warn"
    RESTART = "restart"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """The run's location and its seed, and its behaviour at a restart, a stop and a stall."""

    name: str = knob("quickstart", "Names the run's directory below run.dir.", form=FILE_NAME)
    dir: str = knob("runs", "Names the directory of all runs.", form=PATH)
    seed: int = knob(0, "Sets the seed of all random draws.", ge=0, lt=2**32)
    resume: Resume = knob(Resume.AUTO, "Selects what happens if the run's directory is in use.")
    stop_timeout_s: float = seconds(
        0.0, "Limits the seconds to save at a stop. 0 derives them from earlier steps.", ge=0
    )
    stall_s: float = seconds(
        120.0,
        "Sets the seconds without progress after which a role has stalled. They are at least 3 "
        "times its longest earlier pause.",
        ge=5,
    )
    on_stall: OnStall = knob(
        OnStall.RESTART,
        "Selects the reaction to a stalled role or run, in addition to the report with stacks.",
    )
