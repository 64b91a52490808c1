"""Laws of the report's table of dropped episodes."""

from typing import Any

from pydantic import TypeAdapter

from common.report.machine_cards import dropped_card
from common.report.model import Selection


def dropped_table(**selection: Any) -> str:
    return dropped_card(TypeAdapter(Selection).validate_python(selection))


def row(**changes: object) -> dict[str, object]:
    plain = {
        "env": "e",
        "subset": "a<b",
        "horizon": 8,
        "turns": "6-7",
        "num": 200,
        "stale": 0,
        "failed": 0,
        "dropped_frac": 0.0,
    }
    return plain | changes


def comparison(*, is_biased: bool) -> dict[str, object]:
    return {
        "env": "e",
        "horizon": 8,
        "num_short": 100,
        "num_short_dropped": 1,
        "num_long": 50,
        "num_long_dropped": 10,
        "z": 4.2,
        "is_biased": is_biased,
    }


def test_without_episodes_there_is_no_table() -> None:
    assert dropped_card(None) == ""
    assert dropped_table(rows=[row(num=0)], comparisons=[]) == ""


def test_nothing_dropped_is_one_sentence() -> None:
    got = dropped_table(rows=[row(), row()], comparisons=[comparison(is_biased=False)])
    assert '<p class="note">None of 400 episodes was dropped as stale or failed.</p>' in got
    assert "<table" not in got


def test_rows_come_worst_first_and_names_are_escaped() -> None:
    rows = [row(stale=2, dropped_frac=0.01), row(turns="8", failed=20, dropped_frac=0.1)]
    got = dropped_table(rows=rows, comparisons=[])
    assert got.index("10.0%") < got.index("1.0%")
    assert "a&lt;b" in got
    assert "a<b" not in got


def test_a_bias_against_long_episodes_is_said_in_words() -> None:
    rows = [row(stale=2, dropped_frac=0.01)]
    assert (
        "Long episodes of e at horizon 8 were dropped more often: 20.0% of 50, short ones 1.0% of "
        "100 (z = 4.2)."
    ) in dropped_table(rows=rows, comparisons=[comparison(is_biased=True)])
