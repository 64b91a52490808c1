"""Marks for some values of a parametrized test."""

from collections.abc import Collection, Iterable

import pytest
from _pytest.mark import ParameterSet


def long_for(values: Iterable[str], costly: Collection[str]) -> list[ParameterSet]:
    """Return pytest parameters, one a value. Costly ones run with `make test-long` only."""
    return [
        pytest.param(value, marks=[pytest.mark.long] * (value in costly), id=value)
        for value in values
    ]


WITH_PROCESSES = ("code", "miniwob", "minisites", "sciworld", "terminal", "webarena")
"""The environments that start a browser, Java or sandboxes. Their own tests always run."""
