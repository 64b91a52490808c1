"""Prometheus metrics of the hub: counts and step durations."""

from collections.abc import Iterator
from itertools import accumulate

import psutil
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from envhub.hosting.session import STEP_BUCKETS_S
from envhub.hosting.sessions import Sessions
from envhub.http.refusals import Refusals

COUNTS = ("created", "expired", "deleted", "steps", "repeated", "refused", "failed", "repaired")
CONNECTION_REFUSALS = (
    "large_headers",
    "slow",
    "too_many",
)  # Refused connections, see `envhub.http.limits`.


class HubMetrics(Collector):
    """The metrics of one hub, in a registry of their own.

    Counts are read from the session table at every scrape.
    """

    def __init__(self, sessions: Sessions, refusals: Refusals) -> None:
        self._sessions = sessions
        self._refusals = refusals
        self._process = psutil.Process()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        # The histogram is built per environment, since each prometheus_client counter takes a lock.

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the current values of the session table and the workers."""
        sessions = self._sessions
        live = GaugeMetricFamily("envhub_sessions_live", "Open sessions.", labels=["env"])
        for env_name, num in sessions.num_live.items():
            live.add_metric([env_name], num)
        yield live
        steps = HistogramMetricFamily(
            "envhub_step_seconds", "Duration of one executed step in seconds.", labels=["env"]
        )
        bounds = [*map(str, STEP_BUCKETS_S), "+Inf"]
        for env_name, (steps_s, *nums) in sessions.steps.items():
            buckets = list(zip(bounds, accumulate(nums), strict=True))
            steps.add_metric([env_name], buckets, steps_s)
        yield steps
        for name in (*COUNTS, *CONNECTION_REFUSALS):
            family = CounterMetricFamily(
                f"envhub_{name}", f"Number of sessions or steps since the start: {name}."
            )
            is_steps = name == "steps"
            family.add_metric([], sessions.num_steps if is_steps else sessions.counts[name])
            yield family
        refused = CounterMetricFamily(
            "envhub_refused_requests",
            "Number of refused requests since the start.",
            labels=["address", "reason"],
        )
        for who, num in self._refusals.report().items():
            refused.add_metric(who.rsplit("/", 1), num)
        yield refused
        paused = GaugeMetricFamily(
            "envhub_paused",
            "1 for an environment that waits for a service, such as a judge.",
            labels=["env"],
        )
        for env_name in sessions.services.names:
            paused.add_metric([env_name], float(env_name in sessions.services.paused))
        yield paused
        placement = sessions.placement
        restarts = CounterMetricFamily(
            "envhub_worker_restarts",
            "Number of lost worker processes since the start.",
            labels=["env", "cause"],
        )
        for labels, num in placement.num_lost.items():
            restarts.add_metric(list(labels), num)
        yield restarts
        memory = GaugeMetricFamily(
            "envhub_resident_bytes",
            "Resident memory of the hub and its workers in bytes.",
            labels=["process"],
        )
        memory.add_metric(["hub"], self._process.memory_info().rss)
        for worker in placement.workers():
            memory.add_metric([str(worker)], worker.rss_bytes)
        yield memory
