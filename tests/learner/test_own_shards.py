"""Laws of checkpoints whose files stay on the disks of a learner's nodes."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from common.config.learner import ShardPlace
from common.config.run_config import RunConfig
from common.errors import ConfigError
from learner.training.checkpoint import Checkpoints
from learner.training.shards import is_whole, read_manifest
from learner.training.trainer import Trainer
from tests.learner.builders import tensors_of
from tests.learner.node_rig import TwoNodes, start_node, two_nodes
from tests.learner.test_node import STEPS, config_of, train
from tools.offline.gather import gather_files, make_whole

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1500)]
Weights = dict[str, torch.Tensor]


def own_node(cfg: RunConfig) -> RunConfig:
    return replace(cfg, learner=replace(cfg.learner, checkpoint_shards=ShardPlace.OWN_NODE))


def save(trainer: Trainer, run: TwoNodes, version: int = STEPS) -> Path:
    """Write a checkpoint of all ranks."""
    tokenizer = AutoTokenizer.from_pretrained(run.cfg.model.path, local_files_only=True)
    checkpoints = Checkpoints(run.run_dir.checkpoints, run.cfg.learner)
    path = checkpoints.save(version, model=trainer._model, tokenizer=tokenizer, trainer=trainer)
    checkpoints.wait()
    checkpoints.poll()
    return path


def begin(run: TwoNodes) -> tuple[Path, Weights]:
    """Train four steps; return a checkpoint of the first two, and the last weights."""
    with run.rank_0() as (trainer, workers):
        train(trainer)
        folder = save(trainer, run)
        train(trainer, first=STEPS)
        return folder, tensors_of(trainer.live_weights(ask=workers.ask_for_part))


def resume(run: TwoNodes, folder: Path) -> Weights:
    """Train the next steps from a checkpoint; return the weights after them."""
    with run.rank_0(folder) as (trainer, workers):
        train(trainer, first=STEPS)
        return tensors_of(trainer.live_weights(ask=workers.ask_for_part))


def assert_equal(ours: Weights, theirs: Weights) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_own_files_of_nodes_resume_like_sent_ones(tmp_path: Path) -> None:
    """The second node is killed, loses its folder, and resumes after the files are gathered."""
    cfg = config_of(tmp_path, "grpo")
    with two_nodes(cfg, tmp_path / "sent") as run:
        whole, expected = begin(run)
    disk = tmp_path / "disk"
    key = f"learner.shard_folder={disk}"
    with two_nodes(own_node(cfg), tmp_path / "own", key) as run:
        folder, onward = begin(run)
        assert_equal(onward, expected)
        assert names(folder / "state") == ["__0_0.bin", "__1_0.bin", "tensors.json"]
        (ours,) = disk.glob("*/*")
        assert names(ours) == ["__2_0.bin", "__3_0.bin"]
        assert [each.node for each in read_manifest(folder)] == [1, 1]
        run.restart_node(key)
        assert_equal(resume(run, folder), expected)
        disk.rename(tmp_path / "lost")
        with pytest.raises(ConfigError, match=rf"{ours}/__2_0.bin.*run.py gather run.name=run"):
            resume(run, folder)
        assert len(gather_files(folder, read_manifest(folder), [])) == 2
        assert gather_files(folder, read_manifest(folder), [str(tmp_path / "lost")]) == []
        make_whole(run.cfg, folder)
        assert is_whole(folder)
        assert_equal(resume(run, folder), expected)
    file = "model.safetensors"
    assert_equal(load_file(folder / file), load_file(whole / file))


@contextlib.contextmanager
def third_node(run: TwoNodes, *overrides: str) -> Iterator[None]:
    """Run a third node."""
    node = start_node(run.run_dir, *overrides, number=2)
    try:
        yield
    finally:
        node.stop(timeout_s=30.0)
        node.clear_away()


def test_nodes_with_exchanged_keys_send_each_other_their_files(tmp_path: Path) -> None:
    cfg = own_node(config_of(tmp_path, "grpo"))
    cfg = replace(cfg, learner=replace(cfg.learner, num_nodes=3, num_ranks=3))
    disks = [tmp_path / "disk-1", tmp_path / "disk-2"]
    moved = [tmp_path / "moved-1", tmp_path / "moved-2"]
    keys: list[Any] = [f"learner.shard_folder={disk}" for disk in (*disks, *moved)]
    with two_nodes(cfg, tmp_path, keys[0]) as run:
        with third_node(run, keys[1]):
            folder, expected = begin(run)
        for disk, other in zip(disks, moved, strict=True):
            disk.rename(other)
        run.restart_node(keys[3])
        with third_node(run, keys[2]):
            assert_equal(resume(run, folder), expected)
    for other in moved:  # Each node keeps the file that it has received.
        (ours,) = other.glob("*/*")
        assert names(ours) == ["__1_0.bin", "__2_0.bin"]
