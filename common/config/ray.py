"""The section `ray`: placement of roles by Ray."""

from dataclasses import dataclass

from common.config.knobs import LABEL, RAY, knob, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySection:
    """Placement of roles by Ray. Scheduler and rank 0 always run on the run directory's node."""

    address: str = knob(
        "",
        "Names the address of a cluster. Empty uses RAY_ADDRESS, or starts a cluster on this "
        "machine.",
        form=RAY,
        also="",
    )
    actor_labels: list[str] = knob(
        [], "Lists the labels that the node of an engine must have.", form=LABEL
    )
    envhub_labels: list[str] = knob(
        [], "Lists the labels that the node of the hub must have.", form=LABEL
    )
    learner_labels: list[str] = knob(
        [], "Lists the labels that each further node of the learner must have.", form=LABEL
    )
    learner_cpus: float = knob(
        1.0, "Reserves this many CPUs of each of its nodes for the learner.", gt=0, le=10_000
    )
    actor_cpus: float = knob(
        1.0, "Reserves this many CPUs of its node for each actor.", gt=0, le=10_000
    )
    envhub_cpus: float = knob(
        1.0, "Reserves this many CPUs of its node for the hub.", gt=0, le=10_000
    )
    place_timeout_s: float = seconds(
        300.0,
        "Limits the seconds to find room for all nodes of the learner, or for the hub. Actors wait"
        " without a limit.",
        gt=0,
    )
