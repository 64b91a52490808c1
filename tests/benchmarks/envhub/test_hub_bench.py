"""The arithmetic of the measurements, and the client and the load that they are made with."""

import io
from dataclasses import replace

import pytest
import uvloop

from benchmarks.envhub import suite as bench
from benchmarks.envhub.client import Client, HubAnswer, ServiceTarget
from benchmarks.envhub.hub import hub_process, module_process
from benchmarks.envhub.job import Job, Measured, measure
from benchmarks.envhub.soak import Abandoned, Soak
from benchmarks.envhub.solve import NO_WAY, SolvedItem, Subset, SubsetResult, sample_items
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


def test_growth_compares_the_last_third_with_its_predecessor() -> None:
    soak = Soak(hub_bytes=[50, 60, 100, 100, 110, 120], worker_bytes=[0, 0, 100, 100, 110, 120])
    assert soak.growth_frac() == pytest.approx(230 / 200 - 1)


def test_abandoned_session_growth_is_memory_left_after_the_end() -> None:
    left = Abandoned(num_sessions=5, start_bytes=100, peak_bytes=300, end_bytes=109, took_s=1.0)
    assert left.growth_frac == pytest.approx(0.09)


def test_sample_is_half_test_items_distinct_and_deterministic() -> None:
    subset = Subset(env="e", name="s", num_train=1000, num_test=50, max_turns=5)
    items = sample_items(subset, 20)
    assert items == sample_items(subset, 20)
    assert len(set(items)) == 20
    assert sum("-test-" in item_id for item_id in items) == 10
    assert len(sample_items(subset, 200)) == 200  # 50 test items are all there are
    small = Subset(env="e", name="s", num_train=2, num_test=2, max_turns=5)
    assert sample_items(small, 200) == ["s-test-0", "s-test-1", "s-train-0", "s-train-1"]


def test_tally_counts_the_items_with_a_fault() -> None:
    subset = Subset(env="e", name="s", num_train=2, num_test=2, max_turns=5)
    outcomes = [
        SolvedItem(item_id="s-test-0", num_turns=3),
        SolvedItem(item_id="s-test-1", num_turns=5, fault="no end in 5 turns"),
    ]
    tally = SubsetResult(subset=subset, outcomes=outcomes, took_s=1.0, num_retried=0)
    assert tally.solved_frac == 0.5
    assert [each.item_id for each in tally.faults] == ["s-test-1"]
    assert tally.has_expert
    helpless = [SolvedItem(item_id="s-test-0", num_turns=0, fault=NO_WAY)]
    assert not SubsetResult(subset=subset, outcomes=helpless, took_s=1.0, num_retried=0).has_expert


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
        for kind in ("batch", "batch_open"):
            counted = measure(replace(brief, kind=kind, num_clients=8))
            assert counted.num_done == 8 * len(counted.latencies_ms) > 8
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
