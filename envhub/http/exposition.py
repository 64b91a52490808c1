"""Metrics in the text format of Prometheus, for a hub and for the exporter of a run."""

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4"
Samples = Iterable[tuple[Sequence[str], float]]  # Values of the labels, value of the metric.


class MetricsPage:
    """The metrics of one collector, in a registry of their own. A scrape reads current values."""

    def __init__(self, collector: Collector) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(collector)

    def text(self) -> bytes:
        """Return the metrics in the text format."""
        return generate_latest(self._registry)


def gauge(name: str, text: str, labels: Sequence[str], samples: Samples) -> Metric:
    """Return a gauge with its samples."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def counter(name: str, text: str, labels: Sequence[str], samples: Samples) -> Metric:
    """Return a counter with its samples. The text format appends `_total` to its name."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family
