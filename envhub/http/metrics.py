"""Prometheus metrics of the hub: counts and step durations."""

from collections.abc import Iterator
from itertools import accumulate

import psutil
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from common.http.serving import Refusals
from envhub.hosting.session import STEP_BUCKETS_S
from envhub.hosting.sessions import Sessions
from envhub.http.exposition import MetricsPage, counter, gauge

COUNTS = ("created", "expired", "deleted", "steps", "repeated", "refused", "failed", "repaired")
CONNECTION_REFUSALS = (
    "large_headers",
    "slow",
    "too_many",
)  # Refused connections, see `common.http.serving`.


class HubMetrics(Collector):
    """The metrics of one hub. Counts are read from the session table at every scrape."""

    def __init__(self, sessions: Sessions, refusals: Refusals) -> None:
        self._sessions = sessions
        self._refusals = refusals
        self._process = psutil.Process()
        self._page = MetricsPage(self)
        # The histogram is built per environment, since each prometheus_client counter takes a lock.

    def text(self) -> bytes:
        return self._page.text()

    def collect(self) -> Iterator[Metric]:
        """Yield the current values of the session table and the workers."""
        sessions = self._sessions
        live = [((env_name,), num) for env_name, num in sessions.num_live.items()]
        yield gauge("envhub_sessions_live", "Open sessions.", ["env"], live)
        steps = HistogramMetricFamily(
            "envhub_step_seconds", "Duration of one executed step in seconds.", labels=["env"]
        )
        bounds = [*map(str, STEP_BUCKETS_S), "+Inf"]
        for env_name, (steps_s, *nums) in sessions.steps.items():
            buckets = list(zip(bounds, accumulate(nums), strict=True))
            steps.add_metric([env_name], buckets, steps_s)
        yield steps
        for name in (*COUNTS, *CONNECTION_REFUSALS):
            num = sessions.num_steps if name == "steps" else sessions.counts[name]
            text = f"Number of sessions or steps since the start: {name}."
            yield counter(f"envhub_{name}", text, [], [((), num)])
        yield counter(
            "envhub_refused_requests",
            "Number of refused requests since the start.",
            ["address", "reason"],
            [(who.rsplit("/", 1), num) for who, num in self._refusals.report().items()],
        )
        services = sessions.services
        yield gauge(
            "envhub_paused",
            "1 for an environment that waits for a service, such as a judge.",
            ["env"],
            [((name,), float(name in services.paused)) for name in services.names],
        )
        placement = sessions.placement
        yield counter(
            "envhub_worker_restarts",
            "Number of lost worker processes since the start.",
            ["env", "cause"],
            [(list(labels), num) for labels, num in placement.num_lost.items()],
        )
        memory = [(("hub",), float(self._process.memory_info().rss))]
        memory += [((str(worker),), float(worker.rss_bytes)) for worker in placement.workers()]
        text = "Resident memory of the hub and its workers in bytes."
        yield gauge("envhub_resident_bytes", text, ["process"], memory)
