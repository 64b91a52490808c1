"""The arithmetic of the measurements, and the client and the load that they are made with."""

import io
from dataclasses import replace

import pytest
import uvloop

from benchmarks.envhub import suite as bench
from benchmarks.envhub.client import Client, HubAnswer, ServiceTarget
from benchmarks.envhub.hub import hub_process, module_process
from benchmarks.envhub.job import Job, Measured, measure
from benchmarks.table import BenchTable
from common.launch.process import ChildFailed


def measured(num_steps: int, *, slowest_ms: float) -> Measured:
    latencies_ms = [1.0] * (num_steps - num_steps // 50) + [slowest_ms] * (num_steps // 50)
    return Measured(num_done=num_steps, duration_s=4.0, latencies_ms=latencies_ms)


def test_percentile_bounds_its_share_of_latencies() -> None:
    hundred = Measured(num_done=100, duration_s=2.0, latencies_ms=[float(n) for n in range(100)])
    assert hundred.per_s == 50.0
    assert hundred.percentile_ms(0.5) == 50.0
    assert hundred.percentile_ms(0.99) == 99.0
    assert hundred.percentile_ms(1.0) == 99.0


@pytest.mark.parametrize(
    ("num_steps", "slowest_ms", "exit_code"), [(6000, 250.0, 0), (5999, 250.0, 1), (6000, 250.1, 1)]
)
def test_promise_covers_speed_and_p99(num_steps: int, slowest_ms: float, exit_code: int) -> None:
    out = io.StringIO()
    table = BenchTable(out=out)
    bench.judge(table, measured(num_steps, slowest_ms=slowest_ms))
    assert table.finish() == exit_code
    assert out.getvalue().endswith("every promise kept\n") == (exit_code == 0)


@pytest.mark.long
@pytest.mark.slow
def test_load_counts_steps_of_hub_and_reference_server() -> None:
    with (
        hub_process(["textcraft", "babyai"]) as hub,
        module_process("benchmarks.envhub.reference") as usual,
    ):
        brief = Job(target=hub.target, kind="raw", num_clients=4, warmup_s=0.1, duration_s=0.3)
        at_usual = replace(brief, target=usual.target, is_reference=True)
        for job in (
            replace(brief, base="/agentgym/textcraft"),
            replace(at_usual, base="/textcraft", reset_key="item_id"),
            *(
                replace(each, kind=kind, env=env)
                for kind in ("step", "open")
                for env in ("textcraft", "babyai")
                for each in (brief, at_usual)
            ),
        ):
            counted = measure(job)
            assert counted.num_done == len(counted.latencies_ms) > 10
        status = uvloop.run(_status_without_token(hub.target))
    assert status == 401


async def _status_without_token(target: ServiceTarget) -> int:
    async with Client(ServiceTarget(url=target.url)) as client:
        with pytest.raises(HubAnswer) as caught:
            await client.want(200, "GET", "/v1/envs")
    return caught.value.status


@pytest.mark.slow
def test_failed_hub_start_reports_last_output() -> None:
    with pytest.raises(ChildFailed, match="no environment 'nosuch'"), hub_process(["nosuch"]):
        pass
