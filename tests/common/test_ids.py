"""Laws of the names of groups."""

import pytest

from common.ids import engine_names, is_below, process_of, training_number


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


def test_engines_of_a_process_have_names_of_their_own() -> None:
    assert engine_names("actor-0", 1) == ["actor-0"]
    assert engine_names("actor-0", 3) == ["actor-0", "actor-0~1", "actor-0~2"]
    assert [process_of(each) for each in engine_names("a~b", 3)] == ["a~b"] * 3


@pytest.mark.parametrize("name", ["actor-1", "a~", "a~0", "a~x", "a~01", "~1", "10.0.0.5"])
def test_other_names_are_those_of_processes(name: str) -> None:
    assert process_of(name) == name


def test_earlier_training_groups_are_below_a_number() -> None:
    assert is_below("g0000004/1", 5)
    assert not is_below("g0000005", 5)
    assert not is_below("eval-before-model/0", 5)
