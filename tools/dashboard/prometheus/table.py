"""The exported metrics of a run: name, meaning, labels. A scrape fills them with samples."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import Metric

from envhub.http.exposition import counter, gauge

TOTAL = "_total"  # Suffix of the name of a counter.
STEP_PREFIX = "longstride_step_"  # Prefix of the metrics that the learner logs once a step.
MEMBER = ("role", "name", "node")
_NO_NAME = re.compile(r"[^a-zA-Z0-9_]")


@dataclass(frozen=True, slots=True)
class DeclaredMetric:
    """The meaning of a metric, and its labels after `run`."""

    text: str
    labels: tuple[str, ...] = ()


METRICS = {
    "longstride_run_up": DeclaredMetric("1 while the run works: it has a launcher or a status."),
    "longstride_run_finished": DeclaredMetric("1 after the last step of the run."),
    "longstride_run_phase": DeclaredMetric("1 for the current phase of the run.", ("phase",)),
    "longstride_run_step": DeclaredMetric("Last logged optimizer step."),
    "longstride_run_step_age_seconds": DeclaredMetric("Seconds since the last step was logged."),
    "longstride_run_status_age_seconds": DeclaredMetric(
        "Seconds since the scheduler wrote its status, which most other metrics come from."
    ),
    "longstride_run_version": DeclaredMetric("Newest version that the learner has reported."),
    "longstride_run_horizon": DeclaredMetric("Longest horizon of the curriculum.", ("unit",)),
    "longstride_run_disk_free_bytes": DeclaredMetric("Free bytes on the disk of the run."),
    "longstride_run_starting_roles": DeclaredMetric("Number of roles that wait for a node."),
    "longstride_gate_closed": DeclaredMetric("1 while the scheduler opens no new groups."),
    "longstride_groups": DeclaredMetric("Groups that are open, ready or filtered.", ("state",)),
    "longstride_groups_opened_total": DeclaredMetric("Opened groups."),
    "longstride_episodes_issued_total": DeclaredMetric(
        "Issued episodes. They are in flight, or have an outcome.", ("kind",)
    ),
    "longstride_episodes_reissued_total": DeclaredMetric(
        "Repeated issues of the same episode.", ("kind",)
    ),
    "longstride_episodes_total": DeclaredMetric(
        "Episodes with an outcome, by kind and outcome.", ("kind", "outcome")
    ),
    "longstride_episodes_in_flight": DeclaredMetric("Episodes without an outcome.", ("kind",)),
    "longstride_episodes_leased": DeclaredMetric("Episodes that actors hold."),
    "longstride_episode_causes_total": DeclaredMetric(
        "Episodes by kind, outcome and cause of the outcome.", ("kind", "outcome", "cause")
    ),
    "longstride_episodes_duplicate_total": DeclaredMetric("Discarded duplicate trajectories."),
    "longstride_success_frac": DeclaredMetric("Moving mean of success by subset.", ("subset",)),
    "longstride_refused_messages_total": DeclaredMetric(
        "Messages and connections that the listeners refused, by listener and reason.",
        ("role", "reason"),
    ),
    "longstride_member_up": DeclaredMetric(
        "1 for a live role, 0 for one that left, is dead or is silent.", MEMBER
    ),
    "longstride_member_last_seen_seconds": DeclaredMetric(
        "Seconds since the last message of the role to the scheduler.", MEMBER
    ),
    "longstride_member_unchanged_seconds": DeclaredMetric(
        "Seconds without progress, as the role reports.", MEMBER
    ),
    "longstride_member_waiting": DeclaredMetric("1 while the role waits for another one.", MEMBER),
    "longstride_member_version": DeclaredMetric("Version of the role's weights.", MEMBER),
    "longstride_member_running": DeclaredMetric(
        "Episodes that an actor plays, or groups that the learner waits for.", MEMBER
    ),
    "longstride_member_slots": DeclaredMetric("Most concurrent episodes of the actor.", MEMBER),
    "longstride_member_tokens_per_second": DeclaredMetric(
        "Tokens that an actor samples or the learner trains on, per second.", MEMBER
    ),
    "longstride_member_finished_episodes_total": DeclaredMetric(
        "Episodes that the actor has finished.", MEMBER
    ),
    "longstride_member_resident_bytes": DeclaredMetric("Resident memory of the role.", MEMBER),
    "longstride_member_cpu_seconds_total": DeclaredMetric(
        "Processor seconds of the role's current process and its child processes.", MEMBER
    ),
    "longstride_member_restarts_total": DeclaredMetric("Earlier processes of the name.", MEMBER),
    "longstride_hub_sessions": DeclaredMetric("Open sessions of the hub.", MEMBER),
    "longstride_hub_max_sessions": DeclaredMetric("Most sessions of the hub.", MEMBER),
    "longstride_hub_paused": DeclaredMetric(
        "1 for an environment of the hub that waits for a service.", (*MEMBER, "env")
    ),
    "longstride_role_cpu_seconds_total": DeclaredMetric(
        "Processor seconds by kind of process over all starts of the run.", ("role",)
    ),
    "longstride_copy_lag_bytes": DeclaredMetric(
        "Acknowledged bytes of the journal that the copy of the run lacks."
    ),
    "longstride_copy_age_seconds": DeclaredMetric("Age of the newest whole copy of the run."),
    "longstride_copy_failing_seconds": DeclaredMetric(
        "Seconds since the store of the copy began to fail, 0 while it works."
    ),
    "longstride_copy_checkpoint_version": DeclaredMetric(
        "Version of the newest checkpoint in the copy, -1 without one."
    ),
}


class SampleTable:
    """The samples of one scrape. A metric without samples is left out of the page.

    Example: table = SampleTable(); table.add("longstride_run_step", 7, run="a").
    """

    def __init__(self) -> None:
        self._samples: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in METRICS}
        self._steps: dict[str, dict[tuple[str, str], float]] = {}

    def add(self, name: str, value: object, /, **labels: str) -> None:
        """Add a sample of a declared metric; a value that is no finite number is left out."""
        if isinstance(value, int | float) and math.isfinite(value):
            values = tuple(labels[each] for each in ("run", *METRICS[name].labels))
            self._samples[name][values] = float(value)

    def add_step(self, key: str, value: object, *, run: str) -> None:
        """Add a metric of metrics.jsonl, such as `train/step_s`. The label `key` has its name."""
        if isinstance(value, int | float) and math.isfinite(value):
            name = step_name(key)
            self._steps.setdefault(name, {})[run, key] = float(value)

    def families(self) -> Iterator[Metric]:
        """Yield all metrics that have samples."""
        for name, samples in self._samples.items():
            declared = METRICS[name]
            make = counter if name.endswith(TOTAL) else gauge
            if samples:
                yield make(name, declared.text, ["run", *declared.labels], samples.items())
        for name, samples in sorted(self._steps.items()):
            text = "Value at the last step of the metric in the label `key`."
            yield gauge(name, text, ["run", "key"], samples.items())


def step_name(key: str) -> str:
    """Return the exported name of a metric of metrics.jsonl.

    Two keys may have the same exported name. Their samples differ in the label `key`.
    """
    return STEP_PREFIX + _NO_NAME.sub("_", key)
