"""Metrics of runs for Prometheus, read from the files of their run directories at each scrape."""

import hmac
import math
import re
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from common.cpu import cpu_seconds
from common.host.lock import is_held
from common.store.members import members_of
from common.store.run_dir import RunDir, as_map, json_object
from envhub.http.exposition import CONTENT_TYPE, MetricsPage, counter, gauge
from learner.journal.metrics import MetricsLine, copy_state, tail_metrics

TOTAL = "_total"  # Suffix of the name of a counter.
STEP_PREFIX = "longstride_step_"  # Prefix of the metrics that the learner logs once a step.
PATH = "/metrics"  # Path of the page.
MEMBER = ("role", "name", "node")
_NO_NAME = re.compile(r"[^a-zA-Z0-9_]")
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
            parts = {"outcome": outcome, "cause": cause}
            table.add("longstride_episode_causes_total", num, **labels, **parts)


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
    refusals: list[tuple[str, str, Any]] = [
        ("scheduler", reason, num)
        for peer in as_map(scheduler.get("peers")).values()
        for reason, num in as_map(peer).items()
    ]
    connections = as_map(as_map(scheduler.get("connections")).get("refused"))
    refusals += [("scheduler", reason, num) for reason, num in connections.items()]
    for key, role in (("learner", "learner"), ("hubs", "envhub")):
        # The keys are "address/reason", or "hub/address/reason".
        names = as_map(refused.get(key))
        refusals += [(role, name.rpartition("/")[2], num) for name, num in names.items()]
    for role, reason, num in refusals:
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


def add_metrics_page(app: FastAPI, runs: Callable[[], list[Path]]) -> None:
    """Add the page to an application. `runs` returns the folders of the runs at each scrape."""
    page = MetricsPage(RunMetrics(runs))

    def metrics() -> Response:
        return Response(page.text(), media_type=CONTENT_TYPE)

    app.add_api_route(PATH, metrics)


def make_metrics_app(runs: Callable[[], list[Path]], *, token: str) -> FastAPI:
    """Return an application with only this page. Each request needs the bearer token."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    async def check_token(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        """Answer 401 to a request without the token."""
        token_sent = request.headers.get("authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(token_sent.encode(), token.encode()):
            return await call_next(request)
        headers = {"WWW-Authenticate": "Bearer"}
        return PlainTextResponse("The bearer token is missing or wrong.\n", 401, headers)

    app.middleware("http")(check_token)
    add_metrics_page(app, runs)
    return app
