"""The arithmetic of the hub's measurements, and the client and the load that make them."""

import io

import pytest
import uvloop

from benchmarks.envhub import suite as bench
from benchmarks.envhub.hub import Client, HubAnswer, ServiceTarget, hub_process
from benchmarks.envhub.load import Job, Measured, measure
from benchmarks.suite import Suite
from common.host.child_process import ChildFailed


def test_percentile_bounds_its_share_of_latencies() -> None:
    hundred = Measured(duration_s=2.0, latencies_ms=[float(n) for n in range(100)])
    assert hundred.per_s == 50.0
    assert hundred.percentile_ms(0.5) == 49.0
    assert hundred.percentile_ms(0.99) == 98.0
    assert hundred.percentile_ms(1.0) == 99.0


@pytest.mark.parametrize(
    ("num_steps", "slowest_ms", "exit_code"), [(6000, 250.0, 0), (5999, 250.0, 1), (6000, 250.1, 1)]
)
def test_promise_covers_speed_and_p99(num_steps: int, slowest_ms: float, exit_code: int) -> None:
    latencies_ms = [1.0] * (num_steps - 120) + [slowest_ms] * 120
    suite = Suite(out=io.StringIO())
    bench.judge(suite, "steps", Measured(duration_s=4.0, latencies_ms=latencies_ms))
    assert suite.finish() == exit_code


@pytest.mark.long
@pytest.mark.slow
def test_load_counts_steps_on_both_kinds_of_routes() -> None:
    with hub_process(["textcraft"]) as hub:
        for base in ("/agentgym/textcraft", None):
            job = Job(target=hub.target, env="textcraft", base=base, num_clients=4, duration_s=0.3)
            assert len(measure(job).latencies_ms) > 10
        status = uvloop.run(_status_without_token(hub.target))
    assert status == 401


async def _status_without_token(target: ServiceTarget) -> int:
    async with Client(ServiceTarget(url=target.url)) as client:
        with pytest.raises(HubAnswer) as caught:
            await client.want(200, "GET", "/v1/envs")
    return caught.value.status


@pytest.mark.long
@pytest.mark.slow
def test_failed_hub_start_reports_last_output() -> None:
    with pytest.raises(ChildFailed, match="no environment 'nosuch'"), hub_process(["nosuch"]):
        pass
