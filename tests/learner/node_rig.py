"""A learner on two nodes for tests: rank 0 in this process, the other node as a real process."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.tensor import DTensor

from common.config.envhub import EnvhubSection
from common.config.run_config import RunConfig
from common.host.child_process import ChildProcess
from common.repository import ROOT
from common.store.run_dir import RunDir
from common.wire.security import create_keys
from learner.training.build import load_start, make_trainer
from learner.training.rank_workers import RankWorkers
from learner.training.trainer import Trainer
from scheduler.main import serve
from tests.scheduler.builders import make_config

WAIT_S = 300.0
HUB_S = 3_600.0  # Longest test: the scheduler ends if no hub connects within this time.
CPU = torch.device("cpu")


@dataclass(kw_only=True)
class TwoNodes:
    """A run whose learner has two nodes."""

    cfg: RunConfig
    run_dir: RunDir
    node: ChildProcess  # The second node.

    @contextmanager
    def rank_0(
        self, checkpoint: Path | None = None, *, is_shared: bool = False, **links: Any
    ) -> Iterator[tuple[Trainer, RankWorkers]]:
        """Yield the trainer of rank 0. If not shared, the node does not find the run directory."""
        workers = RankWorkers(self.cfg, checkpoint, run_dir=self.run_dir)
        try:
            if not is_shared:
                self.run_dir.forget_address("ranks")
            model, _ = load_start(self.cfg, checkpoint, CPU)
            workers.wait_loaded()
            links |= {"ranks": workers.join(self.cfg.learner), "announce": workers.announce}
            trainer, _ = make_trainer(self.cfg, model, checkpoint, **links)
            yield trainer, workers
        finally:
            workers.stop()

    def restart_node(self, *overrides: str) -> None:
        """Kill the second node with its ranks, and start it again with other keys of its own."""
        ranks = psutil.Process(self.node.pid).children(recursive=True)
        for each in [*ranks, psutil.Process(self.node.pid)]:
            each.kill()
        psutil.wait_procs(ranks, timeout=WAIT_S)
        self.node.clear_away()
        self.node = start_node(self.run_dir, *overrides)

    @property
    def log(self) -> str:
        """Output of the second node."""
        return (self.run_dir.logs / "node.txt").read_text(encoding="utf-8")


@contextmanager
def scheduler_of(cfg: RunConfig, folder: Path) -> Iterator[tuple[RunConfig, RunDir]]:
    """Run the scheduler of a learner without hubs; yield its configuration and run directory."""
    base = make_config(num_steps=1, per_step=1)
    cfg = replace(
        base,
        actor=replace(base.actor, start_timeout_s=HUB_S),
        model=cfg.model,
        learner=cfg.learner,
        algorithm=cfg.algorithm,
        envhub=EnvhubSection(is_started=False),
    )
    run_dir = RunDir(root=folder / "run")
    create_keys(run_dir.keys)
    run_dir.logs.mkdir(parents=True)
    stop = threading.Event()
    thread = threading.Thread(target=serve, args=(cfg, run_dir, stop))
    thread.start()
    try:
        run_dir.wait_for_address("scheduler", timeout_s=WAIT_S)
        yield cfg, run_dir
    finally:
        stop.set()
        thread.join(WAIT_S)


def join_argv(run_dir: RunDir, *overrides: str, key: str = "ranks-1.key") -> list[str]:
    """Return the command of a further node of the learner."""
    address = run_dir.wait_for_address("scheduler", timeout_s=WAIT_S).removeprefix("tcp://")
    path = str(run_dir.keys / key)
    command = [sys.executable, str(ROOT / "run.py"), "learner"]
    return [*command, "--join", address, "--key", path, *overrides]


def start_node(run_dir: RunDir, *overrides: str, number: int = 1) -> ChildProcess:
    """Start a further node of the learner."""
    log = run_dir.logs / ("node.txt" if number == 1 else f"node-{number}.txt")
    argv = join_argv(run_dir, *overrides, key=f"ranks-{number}.key")
    return ChildProcess("node", argv, log_path=log, cwd=ROOT)


@contextmanager
def two_nodes(cfg: RunConfig, folder: Path, *overrides: str) -> Iterator[TwoNodes]:
    """Yield a learner on two nodes; end the second node afterwards.

    Args:
        overrides: keys of the second node alone.
    """
    with scheduler_of(cfg, folder) as (cfg, run_dir):
        run = TwoNodes(cfg=cfg, run_dir=run_dir, node=start_node(run_dir, *overrides))
        try:
            yield run
        finally:
            run.node.stop(timeout_s=30.0)
            run.node.clear_away()


def rows_of_rank_0(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return the rows of a tensor that rank 0 holds, if `part` is sharded."""
    if not isinstance(part, DTensor):
        return whole
    return whole[: len(part.to_local())]
