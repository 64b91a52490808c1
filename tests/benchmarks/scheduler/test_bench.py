"""Laws of the scheduler's measurements, with few actors."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scheduler.peers import BenchLearner
from benchmarks.scheduler.suite import (
    PeerLoad,
    bench_config,
    measure_core,
    measure_floor,
    measure_peers,
)
from common.wire.messages import Outcomes, StepDone
from tests.learner.scheduler.builders import Table, make_config


def test_benchmark_learner_balances_books_with_scheduler() -> None:
    """Groups of 4, two a step: eight episodes are one step, the ninth is in flight."""
    table = Table(make_config(per_step=2, size=4))
    table.hello("learner-0")
    table.hello("actor-0")
    learner = BenchLearner(group_size=4, per_step=2)
    for lease in table.ask("actor-0", 9).leases:
        learner.arrive(lease, wall_s=1.0)
    said = learner.messages()
    assert [type(each) for each in said] == [Outcomes, Outcomes, StepDone]
    for message in said:
        table.core.handle("learner-0", message)
    counts = table.counts()
    assert (table.core.version, counts["trained"], counts["in_flight"]) == (1, 8, 4)
    assert learner.messages() == []


def test_core_is_measured_over_whole_steps() -> None:
    assert measure_core(num_actors=8, num_steps=1) > 0


@pytest.mark.slow
def test_scheduler_process_serves_peers_over_real_sockets(tmp_path: Path) -> None:
    cfg = bench_config(tmp_path)
    cfg = replace(cfg, groups=replace(cfg.groups, per_step=1))
    play = PeerLoad(num_peers=24, warm_up_s=5.0, measured_s=4.0)
    floor, served = measure_floor(cfg, replace(play, warm_up_s=0.5)), measure_peers(cfg, play)
    assert 0 < floor.episodes_per_s <= 24 / 4.0 * 1.5
    assert floor.cpu_s_per_episode > 0
    assert served.num_connected == 24
    assert 0 < served.episodes_per_s <= 24 / 4.0 * 1.5
    assert 0 < served.cpu_frac < 0.5
    assert served.answer_p99_s >= 0
