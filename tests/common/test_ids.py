"""Laws of the names of groups."""

import pytest

from common.ids import is_below, training_number


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("g0000012", 12),
        ("g0000012/3", 12),
        ("g12345678/0", 12_345_678),
        ("eval-before-model/3", None),
        ("a", None),
        ("g", None),
        ("", None),
        ("g1x/2", None),
        ("g\u0661", None),  # a digit, and none of ours
    ],
)
def test_only_training_groups_have_a_number(name: str, number: int | None) -> None:
    assert training_number(name) == number


def test_earlier_training_groups_are_below_a_number() -> None:
    assert is_below("g0000004/1", 5)
    assert not is_below("g0000005", 5)
    assert not is_below("eval-before-model/0", 5)
