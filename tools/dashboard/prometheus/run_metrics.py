"""Metrics of runs for Prometheus, read from the files of their run directories at each scrape."""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from common.cpu import cpu_seconds
from common.host.lock import is_held
from common.store.run_dir import RunDir
from common.store.status.json_files import as_map, json_object
from common.store.status.members import members_of
from learner.journal.metrics import MetricsLine, copy_state, tail_metrics
from tools.dashboard.prometheus.table import SampleTable

LATE_S = 30.0  # Age of a stale status. The scheduler writes it once a second, or every few seconds.
OUTCOMES = ("trained", "filtered", "stale", "failed", "evaluated")
MEMBER_METRICS = {  # Field of a member in status.json -> metric.
    "version": "longstride_member_version",
    "running": "longstride_member_running",
    "num_slots": "longstride_member_slots",
    "tokens_per_s": "longstride_member_tokens_per_second",
    "num_finished": "longstride_member_finished_episodes_total",
    "unchanged_s": "longstride_member_unchanged_seconds",
    "rss_bytes": "longstride_member_resident_bytes",
    "cpu_s": "longstride_member_cpu_seconds_total",
    "num_restarts": "longstride_member_restarts_total",
    "num_sessions": "longstride_hub_sessions",
    "max_sessions": "longstride_hub_max_sessions",
}


class RunMetrics(Collector):
    """The metrics of some runs. A stopped run has only those of its whole state."""

    def __init__(
        self, runs: Callable[[], Sequence[Path]], *, now: Callable[[], float] = time.time
    ) -> None:
        """Read nothing yet; `runs` returns the folders of the runs, `now` the Unix time."""
        self._runs = runs
        self._now = now

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics of all runs."""
        table = SampleTable()
        for root in self._runs():
            add_run(table, RunDir(root=root), now=self._now())
        yield from table.families()


def add_run(table: SampleTable, run_dir: RunDir, *, now: float) -> None:
    """Add the samples of one run."""
    run = run_dir.root.name
    age_s = _age_s(run_dir.status, now)
    is_finished = run_dir.finished.exists()
    is_written = age_s is not None and age_s <= LATE_S
    is_up = not is_finished and (is_written or is_held(run_dir.root))
    table.add("longstride_run_up", is_up, run=run)
    table.add("longstride_run_finished", is_finished, run=run)
    lines: list[MetricsLine] = tail_metrics(run_dir.metrics, num_steps=1) or [{}]
    last = lines[-1]
    table.add("longstride_run_step", last.get("step"), run=run)
    if not is_up:
        return
    table.add("longstride_run_status_age_seconds", age_s, run=run)
    table.add("longstride_run_step_age_seconds", _age_s(run_dir.metrics, now), run=run)
    table.add("longstride_run_disk_free_bytes", shutil.disk_usage(run_dir.root).free, run=run)
    waiting = as_map(json_object(run_dir.launch).get("waiting"))
    table.add("longstride_run_starting_roles", len(waiting), run=run)
    for key, value in last.items():
        if key not in ("step", "time_s"):
            table.add_step(key, value, run=run)
    for role, used_s in cpu_seconds(run_dir).items():
        table.add("longstride_role_cpu_seconds_total", used_s, run=run, role=role)
    status = json_object(run_dir.status)
    _add_status(table, run, status)
    _add_episodes(table, run, json_object(run_dir.ledger))
    for member in members_of(status):
        _add_member(table, run, member, age_s or 0.0)
    for role, reason, num in _refused(as_map(status.get("refused"))):
        table.add("longstride_refused_messages_total", num, run=run, role=role, reason=reason)
    _add_copy(table, run_dir, now)


def _add_status(table: SampleTable, run: str, status: Mapping[str, Any]) -> None:
    """Add the scheduler's own state."""
    if not status:
        return
    table.add("longstride_run_phase", 1, run=run, phase=str(status.get("phase")))
    table.add("longstride_run_version", status.get("version"), run=run)
    unit = str(status.get("unit"))
    table.add("longstride_run_horizon", status.get("horizon"), run=run, unit=unit)
    table.add("longstride_gate_closed", bool(status.get("gate")), run=run)
    table.add("longstride_episodes_leased", status.get("num_leased"), run=run)
    groups = as_map(status.get("groups"))
    for state in ("open", "ready", "filtered"):
        table.add("longstride_groups", groups.get(state), run=run, state=state)
    table.add("longstride_groups_opened_total", groups.get("opened"), run=run)
    for subset, success in as_map(status.get("success")).items():
        table.add("longstride_success_frac", success, run=run, subset=subset)


def _add_episodes(table: SampleTable, run: str, ledger: Mapping[str, Any]) -> None:
    """Add the ledger's accounts of training episodes and of evaluation episodes."""
    duplicates = ledger.get("duplicates_discarded")
    table.add("longstride_episodes_duplicate_total", duplicates, run=run)
    for kind, account in (("train", ledger), ("eval", as_map(ledger.get("eval")))):
        labels = {"run": run, "kind": kind}
        table.add("longstride_episodes_in_flight", account.get("in_flight"), **labels)
        table.add("longstride_episodes_issued_total", account.get("issued"), **labels)
        table.add("longstride_episodes_reissued_total", account.get("reissued"), **labels)
        for outcome in OUTCOMES:
            table.add("longstride_episodes_total", account.get(outcome), **labels, outcome=outcome)
        for text, num in as_map(account.get("causes")).items():
            outcome, _, cause = text.partition(":")
            own = {"outcome": outcome, "cause": cause}
            table.add("longstride_episode_causes_total", num, **labels, **own)


def _add_member(
    table: SampleTable, run: str, member: Mapping[str, Any], status_age_s: float
) -> None:
    """Add a role. The learner's name has its process id, so the label has the role instead."""
    role = str(member["role"])
    name = role if role == "learner" else str(member["name"])
    labels = {"run": run, "role": role, "name": name, "node": str(member.get("node") or "")}
    is_gone = bool(member.get("gone") or member.get("is_dead") or member.get("is_silent"))
    is_known = role != "scheduler" or status_age_s <= LATE_S
    table.add("longstride_member_up", not is_gone and is_known, **labels)
    seen_s = member.get("last_seen_s")
    if isinstance(seen_s, int | float):
        table.add("longstride_member_last_seen_seconds", seen_s + status_age_s, **labels)
    if "waiting_for" in member:
        table.add("longstride_member_waiting", bool(member["waiting_for"]), **labels)
    for key, metric in MEMBER_METRICS.items():
        table.add(metric, member.get(key), **labels)
    paused = as_map(member.get("paused"))
    envs = cast("list[Any]", member.get("envs") if isinstance(member.get("envs"), list) else [])
    for env in map(str, envs):
        table.add("longstride_hub_paused", env in paused, **labels, env=env)


def _refused(refused: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Yield (listener, reason, count) of the refused messages and connections, over all senders."""
    scheduler = as_map(refused.get("scheduler"))
    counts: dict[tuple[str, str], float] = {}
    found: list[tuple[str, str, Any]] = [
        ("scheduler", reason, num)
        for peer in as_map(scheduler.get("peers")).values()
        for reason, num in as_map(peer).items()
    ]
    connections = as_map(as_map(scheduler.get("connections")).get("refused"))
    found += [("scheduler", reason, num) for reason, num in connections.items()]
    for key, role in (("learner", "learner"), ("hubs", "envhub")):
        # The keys are "address/reason", or "hub/address/reason".
        names = as_map(refused.get(key))
        found += [(role, name.rpartition("/")[2], num) for name, num in names.items()]
    for role, reason, num in found:
        if isinstance(num, int | float):
            counts[role, reason] = counts.get((role, reason), 0.0) + num
    for (role, reason), num in counts.items():
        yield role, reason, num


def _add_copy(table: SampleTable, run_dir: RunDir, now: float) -> None:
    """Add the state of the run's copy, if the run makes one."""
    state = copy_state(run_dir, now=now)
    if state is None:
        return
    run = run_dir.root.name
    table.add("longstride_copy_lag_bytes", state.lag_bytes, run=run)
    table.add("longstride_copy_age_seconds", state.age_s, run=run)
    table.add("longstride_copy_failing_seconds", state.failing_s, run=run)
    table.add("longstride_copy_checkpoint_version", state.checkpoint, run=run)


def _age_s(path: Path, now: float) -> float | None:
    """Return the seconds since a file was written; None if it does not exist."""
    try:
        return max(0.0, now - path.stat().st_mtime)
    except OSError:
        return None
