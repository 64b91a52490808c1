"""Laws of the suite that watches how large roles are: a leak is seen, a coming and going is not."""

import io
import math
import os

import psutil

from benchmarks.chaos.victims import Role
from benchmarks.runs.soak import RoleFootprint, add_role, floor_growth, growth_frac
from benchmarks.table import BenchTable


def judged(sizes: RoleFootprint) -> set[str]:
    table = BenchTable(out=io.StringIO())
    add_role(table, Role.LEARNER, sizes)
    return {row.name for row in table.rows if not row.kept}


def test_growing_memory_is_a_leak_and_filling_caches_are_not() -> None:
    assert growth_frac([100.0 + i for i in range(60)]) > 0.05
    assert abs(growth_frac([100.0 + min(i, 15) + i % 3 for i in range(60)])) < 0.05


def test_fluctuating_descriptors_are_no_leak() -> None:
    assert floor_growth([20.0 + 5 * (i % 4 == 3) for i in range(30)]) == 0
    assert floor_growth([20.0 + i // 10 for i in range(30)]) == 1


def test_restarted_leaking_or_unseen_role_breaks_its_promise() -> None:
    flat = [5.0] * 9
    assert judged(RoleFootprint({1}, flat, flat, flat)) == set()
    assert judged(RoleFootprint({1, 2}, flat, flat, flat)) == {"learner, restarts"}
    leaks = [float(i) for i in range(1, 10)]
    assert judged(RoleFootprint({1}, flat, leaks, flat)) == {"learner, more descriptors"}
    assert math.isnan(growth_frac([]))
    assert "learner, growth of memory" in judged(RoleFootprint())


def test_a_process_is_sampled_as_it_is() -> None:
    sizes = RoleFootprint()
    sizes.add(psutil.Process())
    read, write = os.pipe()
    sizes.add(psutil.Process())
    os.close(read)
    os.close(write)
    assert sizes.descriptors[1] - sizes.descriptors[0] == 2
    assert sizes.pids == {os.getpid()}
    assert sizes.rss_bytes[0] > 0
