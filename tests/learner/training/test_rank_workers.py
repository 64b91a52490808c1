"""Laws of several learner ranks, with real processes over gloo."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

from common.config.compute import Offload
from common.config.learning import Advantage, AlgorithmSection, ControllerSection, LearnerSection
from common.config.run_config import RunConfig
from common.errors import LongstrideError
from common.wire.transfer.changes import apply_changes
from learner.policy.finite import WeightsNotFinite
from learner.training.build import load_start, make_trainer
from learner.training.checkpoint import Checkpoints
from learner.training.rank_workers import RankWorkers
from learner.training.ranks import deal
from learner.training.trainer import Trainer
from learner.weights.delta import VersionKeeper
from learner.weights.snapshot import PublishedWeights
from learner.weights.source import copied
from tests.learner.builders import make_samples, run_config_with_policy, tensors_of

SEQUENCES = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]


@pytest.fixture
def cfg(tmp_path: Path) -> RunConfig:
    return run_config_with_policy(
        tmp_path,
        lr=1e-3,
        num_ranks=2,
        rank_timeout_s=60.0,
        num_minibatches=2,
        max_tokens_per_microbatch=40,
        controller=ControllerSection(skip_step=False),  # the other reactions must be alike, too
    )


@contextmanager
def ranks_of(
    cfg: RunConfig, checkpoint: Path | None = None
) -> Iterator[tuple[Trainer, RankWorkers]]:
    """Yield the trainer of rank 0, and its workers; end them afterwards."""
    workers = RankWorkers(cfg, checkpoint)
    try:
        model, _ = load_start(cfg, checkpoint, torch.device("cpu"))
        workers.wait_loaded()
        ranks = workers.join(cfg.learner)
        trainer, _ = make_trainer(cfg, model, checkpoint, ranks=ranks, announce=workers.announce)
        yield trainer, workers
    finally:
        workers.stop()


def weights_after(trainer: Trainer, *, num_steps: int) -> torch.Tensor:
    """Return rank 0's half of the weights after steps on different samples, the last of few."""
    for step in range(num_steps):
        is_last = step == num_steps - 1
        trainer.train_on(make_samples(num_groups=1 if is_last else 4, seed=step), version=step)
    weights = [each for name, each in trainer.tensors().items() if not name.startswith("optimizer")]
    halves = [
        each.to_local() if isinstance(each, DTensor) else each[: (len(each) + 1) // 2]
        for each in weights
    ]
    return torch.cat([half.detach().flatten().clone() for half in halves])


def pid_of(workers: RankWorkers) -> int:
    (worker,) = workers._workers
    assert worker.process.pid is not None
    return worker.process.pid


@pytest.mark.slow
def test_two_ranks_train_to_equal_weights(cfg: RunConfig) -> None:
    cfg = replace(cfg, algorithm=AlgorithmSection(advantage=Advantage.PPO, entropy_coef=0.01))
    of_one = replace(cfg, learner=replace(cfg.learner, num_ranks=1))
    model, _ = load_start(of_one, None, torch.device("cpu"))
    single, _ = make_trainer(of_one, model, None)
    start = weights_after(single, num_steps=0)
    alone = weights_after(single, num_steps=3)
    with ranks_of(cfg) as (trainer, workers):
        together = weights_after(trainer, num_steps=3)
        process = workers._workers[0].process
        scores = trainer.score(SEQUENCES)
        live = trainer.live_weights(ask=workers.ask_for_part)
        published = tensors_of(live)
    for ours, theirs in zip(scores, single.score(SEQUENCES), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    expected = tensors_of(single.live_weights())
    assert expected.keys() == published.keys()
    for name, tensor in expected.items():
        assert (published[name] - tensor).abs().max() < 1e-6
    assert (alone - start).abs().max() > 1e-3
    assert (alone - together).abs().max() < 1e-6
    assert process.exitcode == 0


@pytest.mark.slow
def test_checkpoint_of_two_ranks_resumes_on_one_or_two(cfg: RunConfig, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(cfg.model.path, local_files_only=True)
    with ranks_of(cfg) as (trainer, _):
        weights_after(trainer, num_steps=2)
        checkpoints = Checkpoints(tmp_path / "checkpoints", cfg.learner)
        folder = checkpoints.save(2, model=trainer._model, tokenizer=tokenizer, trainer=trainer)
        expected = weights_after(trainer, num_steps=1)  # It trains during the write.
        checkpoints.wait()
        spoilt = next(each for each in trainer.tensors().values() if isinstance(each, DTensor))
        cast(DTensor, spoilt.detach()).to_local().view(-1)[0] = torch.inf
        with pytest.raises(WeightsNotFinite, match=r"model.* so the checkpoint is not written"):
            trainer.save(tmp_path / "bad")  # Both ranks fail, so that neither waits.
    for num_ranks, offload in ((1, Offload.NONE), (2, Offload.OPTIMIZER)):
        learner = replace(cfg.learner, num_ranks=num_ranks, offload=offload, device="auto")
        again = replace(cfg, learner=learner)
        with ranks_of(again, folder) as (trainer, _):
            assert (weights_after(trainer, num_steps=1) - expected).abs().max() < 1e-6


def test_samples_are_distributed_by_cost() -> None:
    assert deal([9, 1, 1, 7, 4, 4], 2) == [0, 1, 1, 1, 1, 0]  # 13 and 13
    assert deal([5, 5], 4) == [0, 1]
    assert deal([3, 1, 2], 1) == [0, 0, 0]


@pytest.mark.slow
def test_hanging_or_dead_rank_is_named_and_blocks_no_rank(cfg: RunConfig) -> None:
    cfg = replace(cfg, learner=replace(cfg.learner, rank_timeout_s=5.0))
    with ranks_of(cfg) as (trainer, workers):
        trainer.train_on(make_samples(), version=0)
        workers.check()
        os.kill(pid_of(workers), signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(
            LongstrideError, match="learner rank 0 of 2 lost the connection to another rank"
        ):
            trainer.train_on(make_samples(), version=1)
        assert time.monotonic() - started < 30.0
        os.kill(pid_of(workers), signal.SIGKILL)
        workers._workers[0].process.join(10)
        with pytest.raises(LongstrideError, match=r"learner rank 1 ended with exit code -9"):
            workers.check()
        with pytest.raises(LongstrideError, match="learner rank 1 ended"):
            trainer.train_on(make_samples(), version=1)


@pytest.mark.slow
def test_rank_with_failed_load_ends_start(cfg: RunConfig, tmp_path: Path) -> None:
    workers = RankWorkers(cfg, tmp_path / "no-such-checkpoint")
    try:
        with pytest.raises(
            LongstrideError, match=r"learner rank 1 (ended with exit code 1|closed its)"
        ):
            workers.wait_loaded()
    finally:
        workers.stop()


def test_single_rank_starts_no_worker(cfg: RunConfig) -> None:
    workers = RankWorkers(replace(cfg, learner=replace(cfg.learner, num_ranks=1)), None)
    workers.wait_loaded()
    assert workers.join(LearnerSection()).size == 1
    workers.check()
    workers.stop()


@pytest.mark.slow
def test_changes_are_gathered_from_all_ranks(cfg: RunConfig) -> None:
    learner = replace(cfg.learner, lr=1e-5)
    cfg = replace(cfg, learner=learner, model=replace(cfg.model, dtype="bfloat16"))
    with ranks_of(cfg) as (trainer, workers):
        live = trainer.live_weights(ask=workers.ask_for_part)
        keeper = VersionKeeper()
        received = copied(keeper.keep(PublishedWeights(version=0, source=live)).whole.source)
        weights_after(trainer, num_steps=1)
        changes = keeper.keep(PublishedWeights(version=1, source=live)).changes
        assert changes is not None
        apply_changes(received.buffer, copied(changes.source).buffer)
        assert torch.equal(received.buffer, copied(live).buffer)
        assert 0 < changes.source.total_bytes < received.total_bytes / 2
