"""Sends the metrics of a run by OTLP, the protocol of OpenTelemetry.

The endpoint, its headers and its certificates come from the standard variables, such as
`OTEL_EXPORTER_OTLP_ENDPOINT` and `OTEL_EXPORTER_OTLP_HEADERS`.
"""

import logging
import threading
import time
from collections.abc import Iterable
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.core import Metric as Family

from tools.dashboard.prometheus.run_metrics import RunMetrics

logger = logging.getLogger(__name__)

SCOPE = "longstride"


def send_until_stopped(source: RunMetrics, stop: threading.Event, *, every_s: float) -> None:
    """Send all metrics every few seconds until `stop` is set, then once more.

    A failed request is logged when it is the first one, and when requests work again.
    """
    exporter: Any = OTLPMetricExporter()
    resource = Resource.create({"service.name": SCOPE})
    is_failing = False
    is_stopped = False
    while not is_stopped:
        is_stopped = stop.wait(every_s)
        found = exporter.export(metrics_data(source.collect(), resource, now=time.time()))
        was_failing, is_failing = is_failing, found is not MetricExportResult.SUCCESS
        if is_failing and not was_failing:
            logger.error("metrics not sent by OTLP, the next request is in_s=%g", every_s)
        elif was_failing and not is_failing:
            logger.warning("metrics are sent by OTLP again")
    exporter.shutdown()


def metrics_data(families: Iterable[Family], resource: Resource, *, now: float) -> MetricsData:
    """Return metrics in the form of OpenTelemetry. `now` is the Unix time of all values."""
    scope = ScopeMetrics(
        scope=InstrumentationScope(SCOPE),
        metrics=[_metric(each, time_ns=int(now * 1e9)) for each in families],
        schema_url="",
    )
    return MetricsData([ResourceMetrics(resource, [scope], schema_url="")])


def _metric(family: Family, *, time_ns: int) -> Metric:
    """Return one metric. The start of a counter is unknown, which 0 means."""
    points = [
        NumberDataPoint(
            attributes=dict(sample.labels),
            start_time_unix_nano=0,
            time_unix_nano=time_ns,
            value=sample.value,
        )
        for sample in family.samples
    ]
    is_counter = family.type == "counter"
    content = Sum(points, AggregationTemporality.CUMULATIVE, True) if is_counter else Gauge(points)
    return Metric(name=family.name, description=family.documentation, unit="", data=content)
