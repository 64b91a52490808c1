"""Scores of two ranks that share a network's weights: this process and a second one, over gloo."""

import contextlib
import gc
import multiprocessing
import os
import tempfile
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.conformance.part_results import NETWORK_ERRORS
from common.config.learner import Layout, LearnerSection, Precision
from common.errors import LongstrideError
from common.host.loopback import loopback
from common.weights.rendezvous import interface_of
from learner.policy.forward import Networks, Passes
from learner.policy.loading import fill
from learner.policy.model import load_policy

NUM_RANKS = 2
TIMEOUT_S = 20.0
START_S = 120.0  # Time limit for the imports of rank 1.
STOP_S = 5.0
READY = "ready"

Sequences = list[list[int]]


class RankPair:
    """This process as rank 0, and a process that it starts as rank 1.

    Example:
        with RankPair() as pair:
            scores = pair.score("policy", [[5, 6, 7]])      # both ranks load, shard and score
    """

    def __init__(self, *, method: str = "spawn") -> None:
        """Start rank 1. `method` fork needs a process that has run no operation of torch."""
        self._folder = tempfile.TemporaryDirectory(prefix="conformance-ranks-")
        context = multiprocessing.get_context(method)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(  # pyright: ignore[reportAttributeAccessIssue]
            target=_serve, args=(self._folder.name, theirs, self._pipe), daemon=True
        )
        gc.collect()  # A fork must not inherit a dead process group: its end joins lost threads.
        gc.freeze()
        self._process.start()
        gc.unfreeze()
        theirs.close()
        self._mesh: DeviceMesh | None = None
        self._is_started = False

    def __enter__(self) -> "RankPair":
        self._wait_started()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def score(
        self, path: str, sequences: Sequences, precision: Precision = Precision.FP32
    ) -> list[list[float]]:
        """Return the scores of both ranks together. Raises: ConfigError: the network is refused."""
        self._wait_started()
        self._pipe.send((path, sequences, precision))
        self._mesh = self._mesh or _join_group(self._folder.name, 0)
        return _score(self._mesh, path, sequences, precision)

    def _wait_started(self) -> None:
        """Wait for the imports of rank 1. Raises: LongstrideError: they take too long."""
        if not self._is_started and not self._pipe.poll(START_S):
            raise LongstrideError(f"rank 1 did not start within {START_S:g} s")
        self._is_started = True

    def stop(self) -> None:
        """End rank 1 and the process group."""
        self._pipe.close()
        self._process.join(STOP_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join(STOP_S)
        if dist.is_initialized():
            dist.destroy_process_group()
        self._folder.cleanup()


def _serve(folder: str, pipe: Connection, of_rank_0: Connection) -> None:
    """Score sequences on request, as one of two ranks, until rank 0 closes its end."""
    of_rank_0.close()
    torch.set_num_threads(1)
    mesh: DeviceMesh | None = None
    pipe.send(READY)
    while True:
        try:
            path, sequences, precision = pipe.recv()
        except (EOFError, ConnectionResetError):  # Rank 0 has ended.
            os._exit(0)
        mesh = mesh or _join_group(folder, 1)
        with contextlib.suppress(*NETWORK_ERRORS):  # Rank 0 has the same error, and reports it.
            _score(mesh, path, sequences, precision)


def _join_group(folder: str, rank: int) -> DeviceMesh:
    """Join the process group of both ranks."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(loopback())
    dist.init_process_group(
        "gloo",
        store=FileStore(str(Path(folder) / "store"), NUM_RANKS),
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    return init_device_mesh("cpu", (NUM_RANKS,))


def _score(
    mesh: DeviceMesh, path: str, sequences: Sequences, precision: Precision
) -> list[list[float]]:
    """Load, shard, check and score as a rank of a learner does."""
    cfg = LearnerSection(
        device="cpu", precision=precision, num_ranks=NUM_RANKS, layout=Layout.PADDED
    )
    policy = load_policy(path, device="cpu", is_skeleton=True)
    passes = Passes(
        cfg, Networks(policy=policy), temperature=1.0, engine_dtype="float32", mesh=mesh
    )
    fill(policy, path)
    passes.check_start(may_pad=False)
    return passes.score_sequences(sequences)
