"""Laws of the scheduler's measurement, with few actors."""

import pytest

from benchmarks.scheduler import BenchLearner, measure_core
from common.wire.messages import Outcomes, StepDone
from tests.scheduler.builders import Table, make_config


def test_benchmark_learner_balances_books_with_scheduler() -> None:
    """Groups of 4, two a step: eight episodes are one step, the ninth is in flight."""
    table = Table(make_config(per_step=2, size=4))
    table.hello("learner-0")
    table.hello("actor-0")
    learner = BenchLearner(group_size=4, per_step=2)
    for lease in table.ask("actor-0", 9).leases:
        learner.arrive(lease)
    said = learner.messages()
    assert [type(each) for each in said] == [Outcomes, Outcomes, StepDone]
    for message in said:
        table.core.handle("learner-0", message)
    counts = table.counts()
    assert (table.core.version, counts["trained"], counts["in_flight"]) == (1, 8, 4)
    assert learner.messages() == []


@pytest.mark.slow
def test_core_is_measured_over_whole_steps() -> None:
    assert measure_core(num_actors=8, num_steps=1) > 0
