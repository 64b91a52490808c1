"""Laws of the batches that are kept because their loss was not finite."""

import json
from pathlib import Path

import numpy as np

from learner.build import KEPT, dump_batch
from tests.learner.builders import make_samples


def test_bad_batch_is_dumped_completely(tmp_path: Path) -> None:
    samples = make_samples(num_groups=1, size=2)
    samples[1].trajectory.logprobs[-1] = np.nan
    folder = dump_batch(tmp_path, 7, samples)
    assert folder is not None
    assert folder == tmp_path / "bad_batches" / "version-7"
    lines = [
        json.loads(line)
        for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [line["episode_id"] for line in lines] == ["g0/0", "g0/1"]
    for line, sample in zip(lines, samples, strict=True):
        with np.load(folder / f"{line['row']}.npz") as arrays:
            for name in ("token_ids", "loss_mask", "logprobs", "versions", "turn_ids"):
                expected = getattr(sample.trajectory, name)
                np.testing.assert_array_equal(arrays[name], expected)
            assert arrays["advantages"].tolist() == sample.token_advantages().tolist()


def test_bad_batch_dumps_are_bounded(tmp_path: Path) -> None:
    samples = make_samples(num_groups=1)
    folders = [dump_batch(tmp_path, version, samples) for version in range(KEPT + 2)]
    assert folders[KEPT:] == [None, None]
    assert len(list((tmp_path / "bad_batches").iterdir())) == KEPT


def test_repeated_step_does_not_dump_its_batch_again(tmp_path: Path) -> None:
    assert dump_batch(tmp_path, 1, make_samples()) is not None
    assert dump_batch(tmp_path, 1, make_samples(seed=1)) is None
