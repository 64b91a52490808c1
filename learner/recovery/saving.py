"""Checkpoints of a learner that trains, and what may be forgotten behind them."""

import time
from collections.abc import Callable
from dataclasses import replace

from common.store.disk import POLL_S, if_room
from common.store.segments import load_pruned
from learner.build import Learner
from learner.ingest.replay_point import save_replay_point


class Saving:
    """Saves while training goes on. For the learner's main thread.

    Example: save(50) copies the state and returns; once the checkpoint is whole, settle() writes
    down where its reading begins, and lets journal and step log lose what nobody reads any more.
    """

    def __init__(
        self, learner: Learner, *, set_status: Callable[..., None], check: Callable[[], object]
    ) -> None:
        """`set_status` is told what is waited for; `check` ends a wait for room by raising."""
        self._learner = learner
        self._set_status = set_status
        self._check = check
        self.metrics: dict[str, float] = {}  # of the last checkpoint

    def save(self, version: int) -> None:
        """Begin a checkpoint of a version; what is being written is waited for first."""
        learner, started = self._learner, time.monotonic()
        self.settle(must_wait=True)
        learner.checkpoints.save(
            version, model=learner.model, tokenizer=learner.tokenizer, trainer=learner.trainer
        )
        self.metrics["train/checkpoint_stall_s"] = time.monotonic() - started
        self._set_status(waiting_for="")

    def save_last(self, version: int) -> None:
        """Save what the run ends with, and wait for room if the disk is full."""
        while True:
            self.save(version)
            self.settle(must_wait=True)
            if self._learner.checkpoints.has(version):
                return
            self._set_status(waiting_for="disk: room for the last checkpoint")
            while not self._learner.checkpoints.is_due(version):
                self._check()
                time.sleep(POLL_S)

    def settle(self, *, must_wait: bool = False) -> None:
        """Once a checkpoint is whole, write down where its reading begins."""
        learner = self._learner
        if must_wait:
            self._set_status(waiting_for="disk: a checkpoint")
            learner.checkpoints.wait()
        took_s = learner.checkpoints.poll()
        if took_s is None:
            return
        self.metrics["train/checkpoint_s"] = took_s
        version, path = learner.checkpoints.oldest_version, learner.run_dir.replay_point
        point = learner.buffer.replay_point(version=version)
        needed = learner.step_log.first_needed(version=version, closed_below=point.closed_below)
        point = replace(point, steps_offset=needed)
        if if_room(lambda: save_replay_point(path, point), path):
            learner.upkeep.settled(point.position)
            steps = learner.run_dir.steps
            if_room(lambda: self._forget(needed), steps)

    def _forget(self, needed: int) -> None:
        """Let the logs of steps lose what the journal has lost."""
        learner = self._learner
        before = load_pruned(learner.run_dir.journal).before
        if learner.step_log.prune(before=before, needed=needed):
            learner.checksums.prune(learner.step_log.pruned.number)
