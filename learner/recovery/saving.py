"""Saves checkpoints during training, and prunes the logs that a restart no longer needs."""

import time
from collections.abc import Callable
from dataclasses import replace

from common.store.disk import POLL_S, if_room
from learner.build import Learner
from learner.ingest.replay_point import save_replay_point
from learner.journal.segments import load_pruned


class Saving:
    """Saves checkpoints in the background. Only the learner's main thread may use it.

    Example: save(50) copies the state and returns. Once the checkpoint is complete, settle() writes
    its replay point, and then prunes the journal and the step log before that point.
    """

    def __init__(
        self, learner: Learner, *, set_status: Callable[..., None], check: Callable[[], object]
    ) -> None:
        """`set_status` receives the reason of a wait.

        `check` ends a wait for disk space by raising.
        """
        self._learner = learner
        self._set_status = set_status
        self._check = check
        self.metrics: dict[str, float] = {}  # Metrics of the last checkpoint.

    def save(self, version: int) -> None:
        """Begin a checkpoint of a version, after the previous checkpoint is complete."""
        learner = self._learner
        started = time.monotonic()
        self.settle(must_wait=True)
        learner.checkpoints.save(
            version, model=learner.model, tokenizer=learner.tokenizer, trainer=learner.trainer
        )
        self.metrics["train/checkpoint_stall_s"] = time.monotonic() - started
        self._set_status(waiting_for="")

    def save_last(self, version: int) -> None:
        """Save the final checkpoint. If the disk is full, wait for room."""
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
        """If a checkpoint is complete, write its replay point and prune the logs."""
        learner = self._learner
        if must_wait:
            self._set_status(waiting_for="disk: a checkpoint")
            learner.checkpoints.wait()
        took_s = learner.checkpoints.poll()
        if took_s is None:
            return
        self.metrics["train/checkpoint_s"] = took_s
        version = learner.checkpoints.oldest_version
        path = learner.run_dir.replay_point
        point = learner.buffer.replay_point(version=version)
        needed = learner.step_log.first_needed(version=version, closed_below=point.closed_below)
        point = replace(point, steps_offset=needed)
        if if_room(lambda: save_replay_point(path, point), path):
            learner.upkeep.settled(point.position)
            steps = learner.run_dir.steps
            if_room(lambda: self._forget(needed), steps)

    def _forget(self, needed: int) -> None:
        """Prune the step log and the checksums to the segments that the journal still has."""
        learner = self._learner
        before = load_pruned(learner.run_dir.journal).before
        if learner.step_log.prune(before=before, needed=needed):
            learner.checksums.prune(learner.step_log.pruned.number)
