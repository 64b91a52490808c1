"""Laws of the last line of a table of figures."""

import io
from collections.abc import Callable

import pytest

from benchmarks.table import BenchTable


@pytest.mark.parametrize(
    ("write", "code", "said"),
    [
        (lambda table: table.figure("a", 1.0, "s"), 0, "measured, nothing was promised"),
        (lambda table: table.at_most("a", 1.0, "s", 2.0), 0, "every promise kept"),
        (lambda table: table.at_most("a", 3.0, "s", 2.0), 1, "NOT KEPT: a"),
        (lambda table: table.at_least("a", float("nan"), "s", 2.0), 1, "NOT KEPT: a"),
        (lambda table: table.fail("a", "not measured"), 1, "NOT KEPT: a"),
    ],
)
def test_last_line_summarises_the_measured_promises(
    write: Callable[[BenchTable], None], code: int, said: str
) -> None:
    out = io.StringIO()
    table = BenchTable(out=out)
    write(table)
    assert table.finish() == code
    assert out.getvalue().splitlines()[-1] == said
