"""Laws of the text format of metrics."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from envhub.http.exposition import MetricsPage, counter, gauge


class TwoMetrics:
    """A collector whose values change with each scrape."""

    def __init__(self) -> None:
        self._num = 0

    def collect(self) -> Iterator[Metric]:
        self._num += 1
        yield gauge("x_bytes", "Size.", ["env"], [(("maze",), 2.5), (('a"b',), 0.0)])
        yield counter("x_scrapes_total", "Scrapes.", [], [((), self._num)])


def test_page_has_current_values_with_labels() -> None:
    page = MetricsPage(TwoMetrics())
    first = page.text()
    families = list(text_string_to_metric_families(page.text().decode()))
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }
    assert found == {("x_bytes", "maze"): 2.5, ("x_bytes", 'a"b'): 0.0, ("x_scrapes_total",): 2.0}
    assert [family.type for family in families] == ["gauge", "counter"]
    assert b"x_scrapes_total 1.0" in first
