"""The verdict of a real run, and the effect of following its advice."""

from pathlib import Path

import pytest

from tests.end_to_end.verdict_runs import CASES, MIN_RATIO, stage

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


def test_verdict_advice_speeds_up_a_slow_environment(tmp_path: Path) -> None:
    """It waits, so more at once are faster on a machine that has no free core, too."""
    case = CASES["slow environment"]
    found = stage("slow environment", case, folder=tmp_path, num_steps=20)
    assert found.verdict.bound is case.bound, found.verdict.sentence
    ratio = found.after_per_s / found.before_per_s
    assert ratio >= MIN_RATIO, found
    assert found.simulated is not None
    assert found.simulated >= MIN_RATIO
    assert ratio <= 1.3 * (1.0 + found.verdict.advice[0].gain)
