"""Laws of a step's samples as bytes."""

from dataclasses import fields, replace

import numpy as np

from learner.batch.rows import pack_samples, unpack_samples
from tests.learner.builders import make_samples


def test_samples_come_back_as_they_were() -> None:
    one, two, three = make_samples(num_groups=3, size=1)
    samples = [
        replace(one, advantage=0.1, turn_advantages=np.array([0.5, -0.5], dtype=np.float32)),
        replace(two, turn_advantages=np.zeros(0, dtype=np.float32)),
        replace(three, own_advantages=np.array([1.0, 2.0, 3.0], dtype=np.float32)),
    ]
    found = unpack_samples(pack_samples(samples))
    assert [s.advantage for s in found] == [0.1, 1.0, 1.0]
    for name in ("turn_advantages", "own_advantages"):
        for before, after in zip(samples, found, strict=True):
            assert _same(getattr(before, name), getattr(after, name))
    for before, after in zip(samples, found, strict=True):
        for field in fields(before.trajectory):
            name = field.name
            assert _same(getattr(before.trajectory, name), getattr(after.trajectory, name)), name


def test_numbers_that_are_not_finite_survive() -> None:
    (sample,) = make_samples(num_groups=1, size=1)
    sample.trajectory.logprobs[:] = np.nan
    (found,) = unpack_samples(pack_samples([sample]))
    assert np.isnan(found.trajectory.logprobs).all()


def _same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return one == other
