"""The section `journal`: trajectories on disk, and the run's copy in a store."""

from dataclasses import dataclass

from common.config.knobs import knob, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSection:
    """Retention of trajectories on disk, and the run's copy in a store.

    Files for a restart are never changed.
    """

    segment_mb: int = knob(
        256,
        "Sets the size of a journal file, in MiB. Compression and removal handle whole files.",
        ge=1,
        le=4096,
    )
    compress: bool = knob(
        True, "Compresses files that no restart reads, while the learner is idle."
    )
    keep_gb: float = knob(
        100.0,
        "Limits the size of the journal, in GB. The oldest files are removed first. 0 keeps all.",
        ge=0,
        le=1e6,
    )
    keep_days: float = knob(
        0.0, "Removes files whose last episode is older than these days. 0 keeps all.", ge=0, le=1e5
    )
    copy_to: str = knob(
        "",
        "Copies the journal, the checkpoints and the state of the run to this folder or URL during "
        "`train`, such as /mnt/copies or s3://bucket/runs. Empty makes no copy.",
    )
    copy_every_s: float = seconds(
        30.0, "Sets the seconds between two copies of the run.", ge=0.1, le=86_400
    )
    copy_stop_timeout_s: float = seconds(
        60.0, "Limits the seconds after the end of the run in which the rest is copied.", ge=0
    )
