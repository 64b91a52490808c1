"""Laws of the suite that attacks every listener of a run."""

import io

import pytest

from benchmarks.hostile.suite import SMALL, measure, num_passed
from benchmarks.suite import Suite


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timed
def test_attacks_are_counted_and_block_no_listener() -> None:
    suite = Suite(out=io.StringIO())
    measure(suite, SMALL)
    why = "\n".join(f"{row.name}: {row.value} ({row.note})" for row in suite.rows if not row.kept)
    assert suite.failed == [], "\n".join([why, *(note["text"] for note in suite.notes)])
    promised = [row.name for row in suite.rows if row.bound]
    for listener in ("scheduler", "trajectories", "weights", "hub"):
        num = 4 if listener == "hub" else 3
        assert sum(name.startswith(f"{listener}, ") for name in promised) == num


def test_answered_attack_is_no_refused_attack() -> None:
    assert num_passed({"401": 5, "422": 7, "404": 1, "none": 1}) == 0
    assert num_passed({"401": 5, "200": 2, "500": 3}) == 5
