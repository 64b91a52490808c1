"""Laws of the host's work beside a device: it seldom waits, and never within a microbatch."""

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from common.repository import ROOT
from learner.batch.packing import placed
from learner.training.digests import _of_tensors

pytestmark = pytest.mark.timeout(1000)  # The counts take a minute, and more beside other tests.

# Metrics, overlap, digests of gradient and weights, gradient norm, and the scores before the step.
STEP_WAITS = 6
EXTRA_WAITS = {
    "second moment": 1,  # The mask depends on the scores of the whole batch.
    "critic": 4,  # Values, values of the last states, scores and a second gradient norm.
    "with information": 1,
    "padded": 1,
}
# Each microbatch of the padded layout waits once: transformers looks at its positions for a mask.
# Pairs of prompts and answers make their own microbatches, four here.
ADDED_WAITS = {"padded": 5, "with information": 3}


USUAL = ("grpo", "critic")  # The others run with `make test-long`.


@pytest.fixture(scope="module", params=[USUAL, pytest.param((), marks=pytest.mark.long, id="all")])
def counts(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the counts of `waits_of_a_step`; torch cannot forget a device, so it has a process."""
    command = [sys.executable, "-m", "tests.learner.training.waits_of_a_step", *request.param]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def steps(counts: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in counts.items() if isinstance(each, list)}


@pytest.mark.slow
def test_step_waits_for_its_device_a_few_times(steps: dict[str, Any]) -> None:
    for name, (single, _) in steps.items():
        assert single["num_microbatches"] == 1
        assert single["num_waits"] <= STEP_WAITS + EXTRA_WAITS.get(name, 0), (name, single)


@pytest.mark.slow
def test_more_microbatches_add_at_most_one_wait_each(steps: dict[str, Any]) -> None:
    for name, (single, several) in steps.items():
        added = several["num_waits"] - single["num_waits"]
        assert several["num_microbatches"] == 6
        assert added == ADDED_WAITS.get(name, 0), (name, several)


@pytest.mark.slow
def test_host_never_waits_for_an_upload(steps: dict[str, Any]) -> None:
    for name, both in steps.items():
        assert [each["blocking_uploads"] for each in both] == [0, 0], name


@pytest.mark.slow
def test_part_of_a_version_leaves_its_device_in_one_copy(counts: dict[str, Any]) -> None:
    # One copy has the check of all forty tensors, the other one has their bytes.
    assert counts["a part of a version"] == {"copy to the host": 2}


def test_placed_arrays_keep_numbers_types_and_shapes() -> None:
    arrays = {
        "ids": np.arange(6).reshape(2, 3),
        "none": np.zeros(0, dtype=np.float32),
        "scores": np.array([0.5, -1.0], dtype=np.float32),
        "bounds": np.array([0, 3, 7], dtype=np.int32),
        "marks": np.array([True, False, True]),
    }
    for device in ("cpu", "meta"):
        moved = placed(arrays, device)
        assert {name: each.shape for name, each in moved.items()} == {
            name: array.shape for name, array in arrays.items()
        }
        assert moved["bounds"].dtype == torch.int32
        assert moved["marks"].dtype == torch.bool
        assert {each.device.type for each in moved.values()} == {device}
    for name, each in placed(arrays, "cpu").items():
        np.testing.assert_array_equal(each.numpy(), arrays[name])


def test_digest_depends_on_each_tensor_and_its_order() -> None:
    first, second = torch.arange(5.0), torch.arange(7.0)
    own = _of_tensors([first, second])
    assert own.equal(_of_tensors([first, second]))
    assert not own.equal(_of_tensors([second, first]))
    assert not own.equal(_of_tensors([first + 1, second]))
