"""The section `scheduler`: addresses, heartbeats, leases and the gate."""

from dataclasses import dataclass

from common.config.knobs import HOST, knob, seconds

SILENT_BEATS = 5  # Consecutive missed heartbeats.


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSection:
    """The scheduler: addresses, heartbeats, leases and the gate."""

    host: str = knob("127.0.0.1", "Sets the address at which the scheduler listens.", form=HOST)
    port: int = knob(
        0,
        "Sets the port of the scheduler. 0 chooses a free one and writes it to the run directory.",
        ge=0,
        le=65535,
    )
    advertise: str = knob(
        "",
        "Sets the host name by which other nodes reach the scheduler. Empty detects it.",
        form=HOST,
        also="",
    )
    max_ahead_steps: int = knob(
        1, "Limits the batches that may be open beyond the current one.", ge=0, le=1000
    )
    heartbeat_s: float = seconds(1.0, "Sets the seconds between two heartbeats.", ge=0.01, le=3600)
    dead_after_s: float = seconds(
        20.0,
        "Issues an actor's leases again if it sends nothing for this many seconds.",
        gt=0,
        must="be > heartbeat_s",
    )
    max_attempts: int = knob(
        3, "Counts an episode as failed after it was issued this many times.", ge=1, le=1000
    )
    max_failed_frac: float = knob(
        0.2,
        "Ends the run if a larger share of the last 200 episodes failed. 50 episodes are needed, or"
        " 16 if all failed. Episodes that one outage ends count as one, unless it lasts longer "
        "than 120 s.",
        ge=0,
        le=1,
    )
    gate_margin: float = knob(
        1.5,
        "Limits the batches open ahead to this factor times the duration of a group divided by that"
        " of a step. 0 applies max_ahead_steps alone.",
        also=0,
        ge=1,
        le=1000,
    )
    max_stretch: float = knob(
        2.0,
        "Raises learner.max_lag_steps by up to this factor for environments with long episodes.",
        ge=1,
        le=1000,
    )
    size_leases: bool = knob(
        True,
        "Grants a new or a slower actor only as many leases as it finishes before they are stale. "
        "Sync mode ignores it.",
    )

    @property
    def silent_after_s(self) -> float:
        """Seconds without a heartbeat after which broadcasts skip an actor's engine."""
        return SILENT_BEATS * self.heartbeat_s
