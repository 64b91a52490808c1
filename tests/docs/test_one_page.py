"""Laws of the example that shows the whole algorithm on one page."""

import re
import runpy

import pytest

from common.repository import ROOT

EXAMPLE = ROOT / "docs" / "examples" / "one_page.py"
MAX_LINES = 150


def test_one_page_example_fits_a_page() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@pytest.mark.slow
def test_one_page_example_samples_on_policy_and_trains(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out.splitlines()
    lines = [line for line in printed if line.startswith("version ")]
    ratios = [float(line.rpartition(" ")[2]) for line in lines]
    assert len(lines) >= 2
    assert ratios[0] == 1.0  # Version 0 has sampled the first batch.
    assert all(0.9 < ratio < 1.1 for ratio in ratios[1:])
    assert ratios[1:] != [1.0] * len(ratios[1:])  # The later ones are one step stale.


def test_named_files_of_the_system_exist() -> None:
    named = set(re.findall(r"\b[a-z_/]+\.py\b", EXAMPLE.read_text(encoding="utf-8")))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
