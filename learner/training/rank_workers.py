"""Rank 0's handles of the learner's other ranks, which make the same updates."""

import json
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

from common.config.learner import LearnerSection
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.join.shards import TENSORS
from common.quick_exit import leave
from common.store.run_dir import RunDir
from common.wire.rank_messages import RankChannel
from learner.policy.model import pick_device
from learner.policy.timing import settled
from learner.training.build import is_sharded
from learner.training.node_server import NodeServer
from learner.training.rank_processes import Meeting, RankProcesses, RankWorker, meet
from learner.training.ranks import RankOperation, Ranks
from learner.training.storage import convert_pickled_index

logger = logging.getLogger(__name__)

ABORT_S = 30.0  # Seconds for the main thread to end after a rank. It may wait in a collective.


class LossWatch(threading.Thread):
    """A thread that ends this process if it still waits for a rank that has ended.

    Not every broken connection ends a collective: NCCL, and gloo at times, wait for their timeout.

    Waits for: the end of a rank, then `ABORT_S`.
    Unblocked by: `stop`.
    """

    def __init__(
        self,
        sentinels: Sequence[int],
        *,
        abort_s: float = ABORT_S,
        end_process: Callable[[], object] = lambda: leave(1),
    ) -> None:
        """Watch the processes with these sentinels."""
        super().__init__(name="learner-ranks", daemon=True)
        self._sentinels = sentinels
        self._abort_s = abort_s
        self._end_process = end_process
        self._reader, self._writer = os.pipe()
        self.start()

    def run(self) -> None:
        """Watch until stopped."""
        ready = wait([*self._sentinels, self._reader])
        if self._reader not in ready and not wait([self._reader], self._abort_s):
            logger.error("ending this process, which waits for a rank that has ended")
            self._end_process()

    def stop(self) -> None:
        """End the watch. A second call has no effect."""
        if self._writer >= 0:
            os.close(self._writer)  # The other end of the pipe becomes readable.
            self._writer = -1
            self.join(self._abort_s)
            os.close(self._reader)


class RankWorkers:
    """Rank 0's handles of ranks 1 and up; empty if `learner.num_ranks` is 1.

    Example (3 ranks): both processes load the model and send `READY` on their pipes. They receive
    the settled compute settings and join rank 0 in a process group. `announce` sends an order on
    every pipe and broadcasts its payload, such as a batch. All three ranks then make the same
    updates: each computes its share of the samples and updates its third of the weights.

    With `learner.num_nodes` above 1 each further node starts its own ranks, and passes the orders
    of rank 0 to them (`learner/node.py`).

    Between orders a process waits on its pipe, which closes when rank 0 ends for any reason. If a
    process or a node ends, `check` or rank 0's next sum raises. The learner then ends, and the
    supervisor restarts it with new ranks from the checkpoint.
    """

    def __init__(
        self,
        cfg: RunConfig,
        checkpoint: Path | None,
        *,
        run_dir: RunDir | None = None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """Start the processes of this node. They load `checkpoint` or `model.path`, like rank 0.

        Args:
            run_dir: needed for several nodes, which find rank 0 by the run's scheduler.
            check: may end the wait for the other nodes by an exception.
        """
        self._cfg = cfg
        self._check_start = check
        self._ranks = Ranks()
        self._device = pick_device(cfg.learner.device)
        self._folder: Path | None = None
        self._server: NodeServer | None = None
        self._watch: LossWatch | None = None
        self._processes = RankProcesses(cfg, [], checkpoint, Meeting())
        self.is_over = False  # True: the run ends with this process, and so do the other nodes.
        if not is_sharded(cfg.learner):
            return
        self._check_devices()
        if cfg.learner.num_nodes > 1:
            assert run_dir is not None
            if checkpoint is not None:
                convert_pickled_index(checkpoint / TENSORS)
            self._server = NodeServer(cfg, run_dir, checkpoint)
            self._meeting = self._server.meeting
        else:
            self._folder = Path(tempfile.mkdtemp(prefix="learner-ranks-"))  # Private to this host.
            self._meeting = Meeting(folder=str(self._folder))
        ours = range(1, cfg.learner.local_ranks)
        self._processes = RankProcesses(cfg, ours, checkpoint, self._meeting)
        self._watch = LossWatch([each.process.sentinel for each in self._workers])

    def _check_devices(self) -> None:
        """Check that each rank here has a GPU of its own. Raises: ConfigError."""
        learner = self._cfg.learner
        needed = (self._device.index or 0) + learner.local_ranks
        if self._device.type == "cuda" and torch.cuda.device_count() < needed:
            has = torch.cuda.device_count()
            raise ConfigError(
                f"learner.num_ranks={learner.num_ranks} from learner.device={learner.device}:"
                f" {needed} CUDA devices are needed, but {has} are visible"
            )

    @property
    def _workers(self) -> list[RankWorker]:
        return self._processes.workers

    def wait_loaded(self) -> None:
        """Wait until all ranks have loaded. Raises: LongstrideError: a rank ended or timed out."""
        self._processes.wait_loaded()
        if self._server is not None:
            self._server.wait_loaded(self._check_loading)

    def _check_loading(self) -> None:
        self._check_start()
        self._processes.check()

    def join(self, learner: LearnerSection) -> Ranks:
        """Return the ranks with this process as rank 0; all use its settled compute settings."""
        if not is_sharded(self._cfg.learner):
            return self._ranks
        host = self._server.host if self._server is not None else ""
        start = json.dumps([settled(learner), host]).encode()
        self._send_to_all(start)
        self._ranks = meet(self._cfg, 0, replace(self._meeting, host=host), self._device)
        self._ranks.explain = self._lost_text
        logger.info("ranks=%d pids=%s", self._ranks.size, self._processes.pids)
        return self._ranks

    def announce(self, order: RankOperation) -> None:
        """Send an order to the other ranks. Raises: LongstrideError: a rank ended."""
        self.check()
        header = json.dumps([*order[:-1], len(order.payload)])
        self._send_to_all(header.encode())
        if order.payload:
            with self._ranks.in_touch("the broadcast of an order"):
                self._ranks.send(order.payload)

    def _send_to_all(self, message: bytes) -> None:
        """Send a message to the ranks of this node and of the other nodes."""
        self._processes.tell(message)
        if self._server is not None:
            self._server.send(RankChannel.TRAINING, message)

    def ask_for_part(self, request: bytes) -> None:
        """Request a part of the weights from the other ranks. For the publisher's thread.

        Raises: LongstrideError: a rank ended.
        """
        self._processes.ask(request)
        if self._server is not None:
            self._server.send(RankChannel.WEIGHTS, request)

    def check(self) -> None:
        """Check that all ranks are alive. Raises: LongstrideError: names the rank or the node."""
        self._processes.check()
        if self._server is not None:
            self._server.check()

    def _lost_text(self) -> str:
        """Return which rank or node is lost after a lost connection; "" if unknown."""
        lost = self._processes.lost_text()
        return lost or (self._server.explain() if self._server is not None else "")

    def stop(self) -> None:
        """End all ranks: close their pipes, and kill each process that does not exit in time."""
        if self._watch is not None:
            self._watch.stop()
        if self._server is not None:
            self._server.close(RankChannel.FINISH if self.is_over else RankChannel.STOP)
        self._processes.stop()
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
