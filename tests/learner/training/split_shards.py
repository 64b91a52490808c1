"""Checkpoints of one rank whose files are written as those of a further node."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import nn

from common.config.learner import LearnerSection
from learner.policy.weight_files import WeightFiles
from learner.training.checkpoint import Checkpoints
from learner.training.ranks import Ranks
from learner.training.shard_home import ShardHome
from learner.training.state import StateWriter, live_tensors


class FilesElsewhere(WeightFiles):
    """Files of another node, whose disk is in fact this one."""

    is_remote = True


def home_at(folder: Path, *, start: str = "a1") -> ShardHome:
    return ShardHome(node=1, host="gpu-b", address="10.0.0.2", folder=folder, start=start)


class SplitTrainer:
    """A trainer of a model. Its tensors are written to the folder of a node."""

    def __init__(self, model: nn.Module, home: ShardHome) -> None:
        self._model = model
        self.ranks = Ranks(files=FilesElsewhere(), home=home, writes_home=True)
        self._writer = StateWriter(self.ranks)

    def values(self) -> dict[str, Any]:
        return {}

    def save(self, folder: Path) -> Future[Any]:
        folder.mkdir()  # Ranks of rank 0's node do so.
        return self._writer.start(live_tensors({"model": self._model}, []), folder)


def save_split(
    root: Path, version: int, model: Any, tokenizer: Any, home: ShardHome, *, keep: int = 2
) -> Path:
    """Write a checkpoint below `root`, and its tensors to `home`; return its folder."""
    checkpoints = Checkpoints(root, LearnerSection(checkpoint_every_steps=1, keep_checkpoints=keep))
    trainer = SplitTrainer(model, home)
    folder = checkpoints.save(version, model=model, tokenizer=tokenizer, trainer=trainer)
    checkpoints.wait()
    checkpoints.poll()
    return folder
