"""Laws of the suite that measures saved states."""

import io

from benchmarks.envhub.saved import run_suite
from benchmarks.suite import Suite


def test_suite_measures_step_save_load_and_size_of_each_turn() -> None:
    suite = Suite(out=io.StringIO())
    run_suite(suite, ["nim"])
    assert suite.failed == []
    values = {row.name.removeprefix("nim, turn 2: "): row.value for row in suite.rows}
    names = {"step", "save", "open", "load", "repeat the actions", "size of a state"}
    assert set(values) == names | {"save after each turn, sum"}
    assert all(value is not None and value > 0 for value in values.values())
    assert values["size of a state"] > 100  # bytes, of the piles and the checksum
