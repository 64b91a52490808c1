"""Laws of a learner on two nodes: one gradient, files without a shared disk, lost nodes."""

import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

from common.config.algorithm import Advantage, AlgorithmSection
from common.config.learner import ControllerSection, CriticKind, CriticSection, LoraSection
from common.config.run_config import RunConfig
from common.errors import LongstrideError
from common.store.run_dir import RunDir
from learner.training.build import load_start, make_trainer
from learner.training.checkpoint import Checkpoints
from learner.training.trainer import Trainer
from tests.learner.builders import make_model, make_samples, run_config_with_policy, tensors_of
from tests.learner.node_rig import CPU, rows_of_rank_0, two_nodes

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]
NUM_RANKS = 4
STEPS = 2


def config_of(folder: Path, objective: str) -> RunConfig:
    """Return the configuration of two nodes with two ranks each, in fp32."""
    make_model(seed=5).save_pretrained(folder / "reference")
    tokenizer = AutoTokenizer.from_pretrained("configs/policies/tiny", local_files_only=True)
    cfg = run_config_with_policy(
        folder,
        host="127.0.0.2",
        lr=1e-3,
        num_ranks=NUM_RANKS,
        num_nodes=2,
        rank_timeout_s=120.0,
        num_minibatches=2,
        max_tokens_per_microbatch=40,
        controller=ControllerSection(skip_step=False),
    )
    tokenizer.save_pretrained(cfg.model.path)
    algorithm = AlgorithmSection()
    if objective == "critic":
        algorithm = AlgorithmSection(
            advantage=Advantage.PPO,
            entropy_coef=0.01,
            kl_coef=0.1,
            reference_path=str(folder / "reference"),
        )
    learner = cfg.learner
    if objective == "critic":
        learner = replace(learner, critic=CriticSection(kind=CriticKind.MODEL))
    if objective == "lora":
        learner = replace(learner, lora=LoraSection(rank=4))
    return replace(cfg, algorithm=algorithm, learner=learner)


def alone(cfg: RunConfig) -> RunConfig:
    learner = replace(cfg.learner, num_ranks=1, num_nodes=1, sequence_ranks=1)
    return replace(cfg, learner=learner)


class Gradients:
    """The gradients of each update as this rank holds them, by name."""

    def __init__(self) -> None:
        self.trainer: Trainer | None = None
        self.updates: list[dict[str, torch.Tensor]] = []

    def __call__(self) -> None:
        assert self.trainer is not None
        self.updates.append(
            {
                f"{kind}.{name}": each.grad.detach().clone()
                for kind, module in self.trainer._modules.items()
                for name, each in module.named_parameters()
                if each.grad is not None
            }
        )


def train(trainer: Trainer, *, first: int = 0) -> None:
    for step in range(first, first + STEPS):
        trainer.train_on(make_samples(num_groups=4, seed=step), version=step)


def train_alone(cfg: RunConfig, checkpoint: Path | None = None) -> tuple[Trainer, Gradients]:
    gradients = Gradients()
    model, _ = load_start(alone(cfg), checkpoint, CPU)
    trainer, _ = make_trainer(alone(cfg), model, checkpoint, before_update=gradients)
    gradients.trainer = trainer
    return trainer, gradients


def assert_same_gradients(ours: Gradients, theirs: Gradients) -> None:
    """Check the first gradient. Later ones start from weights that differ by rounding."""
    assert len(ours.updates) == len(theirs.updates) == 2 * STEPS
    mine = ours.updates[0]
    whole = theirs.updates[0]
    assert mine.keys() == whole.keys()
    assert max(each.abs().max() for each in whole.values()) > 1e-2
    for name, part in mine.items():
        rows = rows_of_rank_0(whole[name], part)
        local = part.to_local() if isinstance(part, DTensor) else part
        assert not rows.numel() or (local - rows).abs().max() < 1e-6, name


def assert_same_weights(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).abs().max() < 1e-6, name


@pytest.mark.parametrize(
    ("objective", "is_shared"),
    [("lora", True), ("critic", False), ("copies", False), ("copies, rows divided", False)],
)
def test_two_nodes_have_the_gradient_of_one_rank(
    tmp_path: Path, objective: str, is_shared: bool
) -> None:
    cfg = config_of(tmp_path, objective)
    if objective.startswith("copies"):
        ranks = 2 if "divided" in objective else 1
        cfg = replace(cfg, learner=replace(cfg.learner, shard_nodes=1, sequence_ranks=ranks))
    single, expected = train_alone(cfg)
    train(single)
    gradients = Gradients()
    with (
        two_nodes(cfg, tmp_path) as run,
        run.rank_0(is_shared=is_shared, before_update=gradients) as (trainer, workers),
    ):
        gradients.trainer = trainer
        train(trainer)
        published = tensors_of(trainer.live_weights(ask=workers.ask_for_part))
    assert_same_gradients(gradients, expected)
    assert_same_weights(published, tensors_of(single.live_weights()))


def test_killed_rank_of_a_node_restarts_from_its_checkpoint(tmp_path: Path) -> None:
    """The second node has no run directory, and its process serves both starts of rank 0."""
    cfg = config_of(tmp_path, "grpo")
    single, expected = train_alone(cfg)
    train(single)
    gradients = Gradients()
    with two_nodes(cfg, tmp_path) as run:
        with run.rank_0(before_update=gradients) as (trainer, _):
            gradients.trainer = trainer
            train(trainer)
            folder = save(trainer, run.run_dir, run.cfg)
            pids = [int(each) for each in re.findall(r"pids=\[(\d+), (\d+)\]", run.log)[0]]
            os.kill(pids[1], signal.SIGKILL)
            with pytest.raises(LongstrideError) as lost:
                trainer.train_on(make_samples(num_groups=4, seed=9), version=STEPS)
            text = r"learner node 1 \(.*, ranks 2 to 3\): learner rank 3 ended"
            assert re.search(text, str(lost.value))
        run.node.wait_until(lambda: not psutil.pid_exists(pids[0]), timeout_s=60.0)
        with run.rank_0(folder) as (trainer, workers):
            train(trainer, first=STEPS)
            onward = tensors_of(trainer.live_weights(ask=workers.ask_for_part))
            workers.is_over = True
        run.node.wait_until(lambda: run.node.poll() is not None, timeout_s=60.0)
        assert run.node.poll() == 0, run.log
    assert_same_gradients(gradients, expected)
    train(single, first=STEPS)
    assert_same_weights(onward, tensors_of(single.live_weights()))
    resumed, _ = train_alone(cfg, folder)
    train(resumed, first=STEPS)
    assert_same_weights(onward, tensors_of(resumed.live_weights()))


def save(trainer: Trainer, run_dir: RunDir, cfg: RunConfig) -> Path:
    """Write a checkpoint of all ranks."""
    tokenizer = AutoTokenizer.from_pretrained(cfg.model.path, local_files_only=True)
    checkpoints = Checkpoints(run_dir.checkpoints, cfg.learner)
    path = checkpoints.save(STEPS, model=trainer._model, tokenizer=tokenizer, trainer=trainer)
    checkpoints.wait()
    names = sorted(each.name for each in (path / "state").iterdir())
    assert names == [*(f"__{rank}_0.bin" for rank in range(NUM_RANKS)), "tensors.json"]
    return path
