"""The learner's other ranks: processes that rank 0 starts and that make the same updates."""

import json
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh

from common.config.compute import Layout
from common.config.learning import LearnerSection
from common.config.run_config import RunConfig
from common.errors import ConfigError, LongstrideError
from common.host.loopback import loopback
from common.log import configure_logging
from common.quick_exit import leave
from common.stall.stacks import tell_stacks
from common.wire.collective import interface_of
from common.wire.weight_group import lower_priority
from learner.policy.model import pick_device
from learner.policy.timing import settled, with_settled
from learner.training.build import is_sharded, load_start, make_trainer
from learner.training.ranks import RankOperation, Ranks
from learner.weights.source import LiveWeights

logger = logging.getLogger(__name__)

READY = b"ready"
LOAD_S = 900.0  # Time limit for all ranks to load their models, in seconds.
STOP_S = 5.0  # Time limit for a process to exit by itself, in seconds.


class _RankWorker(NamedTuple):
    """One process of another rank, with its pipes."""

    rank: int
    process: BaseProcess
    pipe: Connection
    publish_pipe: Connection  # Carries the publisher's requests for parts of the weights.


class RankWorkers:
    """Rank 0's handles of ranks 1 and up; empty if `learner.num_ranks` is 1.

    Example (3 ranks): both processes load the model and send `READY` on their pipes. They receive
    the settled compute settings and join rank 0 in a process group. `announce` sends an order on
    every pipe and broadcasts its payload, such as a batch. All three ranks then make the same
    updates: each computes its share of the samples and updates its third of the weights.

    Between orders a process waits on its pipe, which closes when rank 0 ends for any reason. If a
    process ends, `check` or rank 0's next sum raises. The learner then ends, and the supervisor
    restarts it with new ranks from the checkpoint.
    """

    def __init__(self, cfg: RunConfig, checkpoint: Path | None) -> None:
        """Start the processes. They load `checkpoint` or `model.path`, like rank 0."""
        self._cfg = cfg
        self._ranks = Ranks()
        self._workers: list[_RankWorker] = []
        self._device = pick_device(cfg.learner.device)
        num_ranks = cfg.learner.num_ranks
        self._meeting: Path | None = None
        if not is_sharded(cfg.learner):
            return
        needed = (self._device.index or 0) + num_ranks
        if self._device.type == "cuda" and torch.cuda.device_count() < needed:
            has = torch.cuda.device_count()
            raise ConfigError(
                f"learner.num_ranks={num_ranks} from learner.device={cfg.learner.device}: {needed}"
                f" CUDA devices are needed, but {has} are visible; lower learner.num_ranks"
            )
        meeting = Path(tempfile.mkdtemp(prefix="learner-ranks-"))  # A private folder on this host.
        self._meeting = meeting
        context = multiprocessing.get_context("spawn")
        for rank in range(1, num_ranks):
            ours, theirs = context.Pipe()
            asked, asking = context.Pipe(duplex=False)
            process = context.Process(
                target=_serve_rank,
                args=(cfg, rank, checkpoint, meeting, theirs, asked),
                name=f"learner-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            asked.close()
            self._workers.append(_RankWorker(rank, process, ours, asking))

    def wait_loaded(self) -> None:
        """Wait until all ranks have loaded. Raises: LongstrideError: a rank ended or timed out."""
        deadline = time.monotonic() + LOAD_S
        for worker in self._workers:
            remaining_s = max(0.0, deadline - time.monotonic())
            found = wait([worker.pipe, worker.process.sentinel], remaining_s)
            if not found:
                raise LongstrideError(
                    f"learner rank {worker.rank} did not load its model within {LOAD_S:g} s"
                )
            if worker.pipe in found:
                self._read_ready(worker)
            else:  # An ending process has no exit code before it has ended.
                worker.process.join(STOP_S)
            self.check()

    def join(self, learner: LearnerSection) -> Ranks:
        """Return the ranks with this process as rank 0; all use its settled compute settings."""
        if self._meeting is None:
            return self._ranks
        for worker in self._workers:
            self._send_order(worker, json.dumps(settled(learner)).encode())
        self._ranks = _meet(self._cfg, 0, self._meeting, self._device)
        logger.info("ranks=%d pids=%s", self._ranks.size, [f.process.pid for f in self._workers])
        return self._ranks

    def announce(self, order: RankOperation) -> None:
        """Send an order to the other ranks. Raises: LongstrideError: a rank ended."""
        self.check()
        header = json.dumps([*order[:-1], len(order.payload)])
        for worker in self._workers:
            self._send_order(worker, header.encode())
        if order.payload:
            with self._ranks.in_touch("the broadcast of an order"):
                self._ranks.send(order.payload)

    def ask_for_part(self, request: bytes) -> None:
        """Request a part of the weights from the other ranks. For the publisher's thread.

        Raises: LongstrideError: a rank ended.
        """
        for worker in self._workers:
            try:
                worker.publish_pipe.send_bytes(request)
            except OSError as error:
                raise LongstrideError(f"learner rank {worker.rank} has ended: {error}") from error

    def _read_ready(self, worker: _RankWorker) -> None:
        try:
            worker.pipe.recv_bytes()
        except EOFError as error:
            worker.process.join(STOP_S)
            self.check()
            raise LongstrideError(
                f"learner rank {worker.rank} closed its pipe during its start"
            ) from error

    def _send_order(self, worker: _RankWorker, message: bytes) -> None:
        try:
            worker.pipe.send_bytes(message)
        except OSError as error:
            raise LongstrideError(f"learner rank {worker.rank} has ended: {error}") from error

    def check(self) -> None:
        """Check that all ranks are alive. Raises: LongstrideError: names the rank that ended."""
        for worker in self._workers:
            code = worker.process.exitcode
            if code is not None:
                raise LongstrideError(
                    f"learner rank {worker.rank} ended with exit code {code}. The lines of"
                    f" learner-{worker.rank} in this log have the cause."
                )

    def stop(self) -> None:
        """End all ranks: close their pipes, and kill each process that does not exit in time."""
        if self._meeting is None:
            return
        deadline = time.monotonic() + STOP_S
        for worker in self._workers:
            worker.pipe.close()
            worker.publish_pipe.close()
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.exitcode is None:
                logger.warning("killing rank=%d pid=%s", worker.rank, worker.process.pid)
                worker.process.kill()
                worker.process.join(STOP_S)
        self._workers = []
        if dist.is_initialized():
            dist.destroy_process_group()
        shutil.rmtree(self._meeting, ignore_errors=True)


def _meet(cfg: RunConfig, rank: int, meeting: Path, device: torch.device) -> Ranks:
    """Return the group of all ranks, which meet in a folder. Raises: LongstrideError."""
    num_ranks = cfg.learner.num_ranks
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(loopback())  # All ranks run on this host.
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=FileStore(str(meeting / "store"), num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=cfg.learner.rank_timeout_s),
        )
        mesh = init_device_mesh(device.type, (num_ranks,))
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)  # This rank is a member of the group.
        return Ranks(mesh, publish_group=group)
    except RuntimeError as error:
        raise LongstrideError(
            f"learner rank {rank} of {num_ranks} could not join the process group: {error}"
        ) from error


def _serve_rank(
    cfg: RunConfig,
    rank: int,
    checkpoint: Path | None,
    meeting: Path,
    pipe: Connection,
    publish_pipe: Connection,
) -> None:
    """Run one rank: load, join the group, repeat rank 0's updates until its pipe closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # Rank 0 handles the signal, and saves before it exits.
        signal.signal(number, signal.SIG_IGN)
    configure_logging(f"learner-{rank}", cfg.log.level)
    tell_stacks()
    device = pick_device(cfg.learner.device)
    if device.type == "cuda":
        device = torch.device("cuda", (device.index or 0) + rank)
    try:
        model, _ = load_start(cfg, checkpoint, device)
        pipe.send_bytes(READY)
        may_pad = cfg.learner.layout is Layout.AUTO
        # Rank 0 may take longer to load than the group's timeout.
        cfg = replace(cfg, learner=with_settled(cfg.learner, json.loads(pipe.recv_bytes())))
        if device.type == "cpu":
            torch.set_num_threads(max(1, cfg.learner.num_threads))
        ranks = _meet(cfg, rank, meeting, device)
        trainer, _ = make_trainer(cfg, model, checkpoint, may_pad=may_pad, ranks=ranks)
        serving = (trainer.live_weights(), publish_pipe)
        threading.Thread(target=_serve_weights, args=serving, daemon=True).start()
        while True:
            kind, version, must_train, must_skip, num_bytes = json.loads(pipe.recv_bytes())
            payload = ranks.receive(num_bytes) if num_bytes else b""
            trainer.carry_out(RankOperation(kind, version, must_train, must_skip, payload))
    except (EOFError, BrokenPipeError):  # Rank 0 has ended.
        leave(0)
    finally:  # Only an error leads here.
        logger.error("this rank ended with an error", exc_info=True)
        leave(1)


def _serve_weights(weights: LiveWeights, pipe: Connection) -> None:
    """Send rank 0 this rank's shard of each requested part, in parallel with training."""
    lower_priority()
    try:
        while True:
            weights.serve(pipe.recv_bytes())
    except (EOFError, BrokenPipeError):  # Rank 0 has ended.
        return
    except LongstrideError:
        logger.error("this rank stopped serving weights", exc_info=True)
        leave(1)
