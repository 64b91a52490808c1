"""Laws of the metrics that are sent by OTLP."""

import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from common.host.lock import hold_run
from tests.tools.dashboard.runs import make_run
from tools.dashboard.prometheus.otlp import send_until_stopped
from tools.dashboard.prometheus.run_metrics import RunMetrics

Request = ExportMetricsServiceRequest


class Collector(ThreadingHTTPServer):
    """A collector: it keeps all requests, and may refuse them."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str, bytes]] = []
        self.status = 200
        self.arrived = threading.Condition()

    def wait_for(self, num: int) -> None:
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.requests) >= num, timeout=120)


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.arrived:
            key = self.headers.get("x-key", "")
            self.server.requests.append((self.path, key, body))
            self.server.arrived.notify_all()
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Generator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=swordfish")
        yield server
        server.shutdown()
        thread.join(60)


@pytest.mark.slow
def test_collector_receives_each_metric_with_its_labels(
    tmp_path: Path, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = make_run(tmp_path / "a", 0)
    stop = threading.Event()
    source = RunMetrics(lambda: [run_dir.root])
    collector.status = 400  # It refuses the first request, and no client repeats that.
    with hold_run(run_dir.root, name="a"):
        sender = threading.Thread(
            target=send_until_stopped, args=(source, stop), kwargs={"every_s": 0.05}
        )
        sender.start()
        collector.wait_for(1)
        collector.status = 200
        collector.wait_for(2)
        stop.set()
        sender.join(120)
    path, key, body = collector.requests[-1]
    assert (path, key) == ("/v1/metrics", "swordfish")
    (group,) = Request.FromString(body).resource_metrics
    attributes = {each.key: each.value.string_value for each in group.resource.attributes}
    assert attributes["service.name"] == "longstride"
    metrics = {each.name: each for each in group.scope_metrics[0].metrics}
    (step,) = metrics["longstride_run_step"].gauge.data_points
    assert (step.as_double, step.attributes[0].value.string_value) == (12.0, "a")
    issued = metrics["longstride_episodes_issued"].sum
    assert issued.is_monotonic
    assert issued.data_points[0].as_double == 1.0  # The run without episodes has one lost issue.
    assert "metrics not sent by OTLP" in caplog.text
    assert "metrics are sent by OTLP again" in caplog.text
