"""Laws of several learner ranks, with real processes over gloo."""

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

from common.config.algorithm import Advantage, AlgorithmSection
from common.config.learner import (
    ControllerSection,
    CriticKind,
    CriticSection,
    LearnerSection,
    Offload,
)
from common.config.run_config import RunConfig
from common.errors import LongstrideError
from common.weights.delta import apply_delta
from learner.policy.finite import WeightsNotFinite
from learner.training.build import load_start, make_trainer
from learner.training.checkpoint import Checkpoints
from learner.training.rank_processes import Meeting, meet
from learner.training.rank_workers import LossWatch, RankWorkers
from learner.training.ranks import deal
from learner.training.trainer import Trainer
from learner.weights.source import PublishedWeights, VersionKeeper, copied
from tests.bounds import at_most
from tests.learner.builders import make_model, make_samples, run_config_with_policy, tensors_of
from tests.learner.policy.test_loading import check_halves, weights_of

SEQUENCES = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]


@pytest.fixture(scope="module")
def cfg(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Return the configuration of two ranks with all three networks."""
    folder = tmp_path_factory.mktemp("networks")
    make_model(seed=5).save_pretrained(folder / "reference")
    cfg = run_config_with_policy(
        folder,
        lr=1e-3,
        num_ranks=2,
        rank_timeout_s=10.0,
        critic=CriticSection(kind=CriticKind.MODEL),
        num_minibatches=2,
        max_tokens_per_microbatch=40,
        controller=ControllerSection(skip_step=False),  # the other reactions must be alike, too
    )
    algorithm = AlgorithmSection(
        advantage=Advantage.PPO,
        entropy_coef=0.01,
        kl_coef=0.1,
        reference_path=str(folder / "reference"),
    )
    return replace(cfg, algorithm=algorithm)


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
        if step == 1:  # A change of live keys reaches all ranks before the same step.
            trainer.configure(lr=2e-3, muon_lr=4e-3, num_steps=20)
        trainer.train_on(make_samples(num_groups=1 if is_last else 4, seed=step), version=step)
    if num_steps > 1:  # Later steps use the values of the configuration again.
        trainer.configure(lr=1e-3, muon_lr=3e-3, num_steps=100)
    weights = [each for name, each in trainer.tensors().items() if not name.startswith("optimizer")]
    halves = [
        weight.to_local() if isinstance(weight, DTensor) else weight[: (len(weight) + 1) // 2]
        for weight in weights
    ]
    return torch.cat([half.detach().flatten().clone() for half in halves])


def pid_of(workers: RankWorkers) -> int:
    (worker,) = workers._workers
    assert worker.process.pid is not None
    return worker.process.pid


@dataclass(kw_only=True)
class Life:
    """Records of two ranks from their start to the death of one, beside a single learner."""

    loaded: dict[str, torch.Tensor]
    loaded_alone: dict[str, torch.Tensor]
    together: torch.Tensor
    start: torch.Tensor
    alone: torch.Tensor
    scores: list[list[float]]
    scores_alone: list[list[float]]
    published: dict[str, torch.Tensor]
    published_alone: dict[str, torch.Tensor]
    folder: Path
    onward: torch.Tensor
    hanging: str
    hung_for_s: float
    dead: list[str]


@pytest.fixture(scope="module")
def life(cfg: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Life:
    """Start one pair of ranks for all laws: each process takes seconds to import its packages."""
    found: dict[str, Any] = {}
    of_one = replace(cfg, learner=replace(cfg.learner, num_ranks=1))
    model, _ = load_start(of_one, None, torch.device("cpu"))
    single, _ = make_trainer(of_one, model, None)
    found["loaded_alone"] = {name: each.clone() for name, each in weights_of(single).items()}
    found["start"] = weights_after(single, num_steps=0)
    found["alone"] = weights_after(single, num_steps=3)
    found["scores_alone"] = single.score(SEQUENCES)
    found["published_alone"] = tensors_of(single.live_weights())
    with ranks_of(cfg) as (trainer, workers):
        found["loaded"] = {name: each.clone() for name, each in weights_of(trainer).items()}
        found["together"] = weights_after(trainer, num_steps=3)
        found["scores"] = trainer.score(SEQUENCES)
        found["published"] = tensors_of(trainer.live_weights(ask=workers.ask_for_part))
        folder = tmp_path_factory.mktemp("checkpoints")
        found |= saved(trainer, cfg, folder)
        found |= broken(trainer, workers)
    return Life(**found)


def saved(trainer: Trainer, cfg: RunConfig, folder: Path) -> dict[str, Any]:
    """Save a checkpoint, and train during its write."""
    tokenizer = AutoTokenizer.from_pretrained(cfg.model.path, local_files_only=True)
    checkpoints = Checkpoints(folder, cfg.learner)
    path = checkpoints.save(3, model=trainer._model, tokenizer=tokenizer, trainer=trainer)
    onward = weights_after(trainer, num_steps=1)
    checkpoints.wait()
    return {"folder": path, "onward": onward}


def broken(trainer: Trainer, workers: RankWorkers) -> dict[str, Any]:
    """Stop the other rank, and then kill it."""
    workers.check()
    os.kill(pid_of(workers), signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(LongstrideError) as hanging:
        trainer.train_on(make_samples(), version=4)
    hung_for_s = time.monotonic() - started
    os.kill(pid_of(workers), signal.SIGKILL)
    workers._workers[0].process.join(60)
    with pytest.raises(LongstrideError) as checked:
        workers.check()
    with pytest.raises(LongstrideError) as trained:
        trainer.train_on(make_samples(), version=4)
    dead = [str(checked.value), str(trained.value)]
    return {"hanging": str(hanging.value), "hung_for_s": hung_for_s, "dead": dead}


@pytest.mark.slow
def test_two_ranks_load_their_halves_of_all_networks(life: Life) -> None:
    check_halves(life.loaded, life.loaded_alone)


@pytest.mark.slow
def test_two_ranks_train_to_equal_weights(life: Life) -> None:
    for ours, theirs in zip(life.scores, life.scores_alone, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert life.published_alone.keys() == life.published.keys()
    for name, tensor in life.published_alone.items():
        assert (life.published[name] - tensor).abs().max() < 1e-6
    assert (life.alone - life.start).abs().max() > 1e-3
    assert (life.alone - life.together).abs().max() < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "offload"),
    [(1, Offload.NONE), pytest.param(2, Offload.OPTIMIZER, marks=pytest.mark.long)],
)
def test_checkpoint_of_two_ranks_resumes_on_one_or_two(
    life: Life, cfg: RunConfig, num_ranks: int, offload: Offload
) -> None:
    learner = replace(cfg.learner, num_ranks=num_ranks, offload=offload, device="auto")
    again = replace(cfg, learner=learner)
    with ranks_of(again, life.folder) as (trainer, workers):
        assert (weights_after(trainer, num_steps=1) - life.onward).abs().max() < 1e-6
        processes = [each.process for each in workers._workers]
    assert [process.exitcode for process in processes] == [0] * (num_ranks - 1)


@pytest.mark.slow
@pytest.mark.long
def test_ranks_write_no_checkpoint_of_infinite_weights(cfg: RunConfig, tmp_path: Path) -> None:
    """Both ranks fail, so that neither waits."""
    with ranks_of(cfg) as (trainer, _):
        spoilt = next(each for each in trainer.tensors().values() if isinstance(each, DTensor))
        cast(DTensor, spoilt.detach()).to_local().view(-1)[0] = torch.inf
        with pytest.raises(WeightsNotFinite, match=r"model.* so the checkpoint is not written"):
            trainer.save(tmp_path / "bad")


@pytest.mark.slow
def test_hanging_or_dead_rank_is_named_and_blocks_no_rank(life: Life) -> None:
    assert "learner rank 0 of 2 lost the connection to another rank" in life.hanging
    assert life.hung_for_s < at_most(30.0)
    assert "learner rank 1 ended with exit code -9" in life.dead[0]
    assert "learner rank 1 ended" in life.dead[1]


def meet_and_exchange(cfg: RunConfig, rank: int, meeting: Meeting, pipe: Connection) -> None:
    """Join the group of two ranks when asked; send what this rank has received, or its error."""
    pipe.send_bytes(b"ready")
    pipe.recv_bytes()
    try:
        ranks = meet(cfg, rank, meeting, torch.device("cpu"))
        pipe.send_bytes(json.dumps(ranks.exchange({"rank": rank})).encode())
    except LongstrideError as error:
        pipe.send_bytes(str(error).encode())


MANY_STRANGERS = 24  # Several rounds: gloo drops those that come before it waits for a rank.


def connect_strangers(pid: int, strangers: list[socket.socket]) -> None:
    """Connect to each port of a rank, like gloo's pairs: the first eight bytes name the pair."""
    for connection in psutil.Process(pid).net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN:
            for number in range(8):
                strangers.append(socket.create_connection(connection.laddr, timeout=5))
                strangers[-1].sendall(struct.pack("<q", number))


def read_all(connection: socket.socket) -> bytes:
    connection.settimeout(0.1)
    came = b""
    with connection, contextlib.suppress(OSError):
        while part := connection.recv(1 << 16):
            came += part
    return came


@pytest.mark.slow
def test_process_without_key_is_no_rank(tmp_path: Path) -> None:
    """gloo accepts the first process that connects to the port of rank 0."""
    cfg = replace(RunConfig(), learner=LearnerSection(num_ranks=2, rank_timeout_s=10.0))
    meeting = Meeting(folder=str(tmp_path))
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    strangers: list[socket.socket] = []
    processes = [
        context.Process(target=meet_and_exchange, args=(cfg, rank, meeting, pipes[rank][1]))
        for rank in range(2)
    ]
    try:
        for process, (ours, _) in zip(processes, pipes, strict=True):
            process.start()
            assert ours.poll(120.0)
            assert ours.recv_bytes() == b"ready"
        pipes[0][0].send_bytes(b"join")
        deadline = time.monotonic() + 120.0
        while len(strangers) < MANY_STRANGERS and time.monotonic() < deadline:
            assert processes[0].pid is not None
            with contextlib.suppress(OSError):  # The rank has given up.
                connect_strangers(processes[0].pid, strangers)
        pipes[1][0].send_bytes(b"join")
        results: list[bytes] = []
        for ours, _ in pipes:
            assert ours.poll(120.0)
            results.append(ours.recv_bytes())
        assert strangers
        assert b'"rank"' not in b"".join(map(read_all, strangers))
        if all(each == b'[{"rank": 0}, {"rank": 1}]' for each in results):
            return  # The strangers came before gloo waited for the rank, and were dropped.
        assert b"a rank has not proved its membership" in results[0], results
        assert b"could not join the process group" in results[1], results
    finally:
        for stranger in strangers:
            stranger.close()
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join(60)


def test_process_that_waits_for_a_dead_rank_ends() -> None:
    ended = threading.Event()
    reader, writer = os.pipe()
    watch = LossWatch([reader], abort_s=0.05, end_process=ended.set)
    os.close(writer)  # The sentinel of a process that ends.
    assert ended.wait(60.0)
    watch.stop()
    os.close(reader)


def test_process_that_ends_its_ranks_is_not_ended() -> None:
    ended = threading.Event()
    reader, writer = os.pipe()
    watch = LossWatch([reader], abort_s=60.0, end_process=ended.set)
    os.close(writer)
    watch.stop()
    assert not watch.is_alive()
    assert not ended.is_set()
    os.close(reader)


def test_samples_are_distributed_by_cost() -> None:
    assert deal([9, 1, 1, 7, 4, 4], 2) == [0, 1, 1, 1, 1, 0]  # 13 and 13
    assert deal([5, 5], 4) == [0, 1]
    assert deal([3, 1, 2], 1) == [0, 0, 0]


@pytest.mark.long
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
@pytest.mark.long
def test_changes_are_gathered_from_all_ranks(cfg: RunConfig) -> None:
    learner = replace(cfg.learner, lr=1e-5)
    cfg = replace(cfg, learner=learner, model=replace(cfg.model, dtype="bfloat16"))
    with ranks_of(cfg) as (trainer, workers):
        live = trainer.live_weights(ask=workers.ask_for_part)
        keeper = VersionKeeper()
        received = copied(keeper.keep(PublishedWeights(version=0, source=live)).whole.source)
        weights_after(trainer, num_steps=1)
        changes = keeper.keep(PublishedWeights(version=1, source=live)).delta
        assert changes is not None
        apply_delta(received.buffer, copied(changes.source).buffer)
        assert torch.equal(received.buffer, copied(live).buffer)
        assert 0 < changes.source.total_bytes < received.total_bytes / 2
