"""The learner: wait for a batch, train on it, publish the weights. Repeat."""

import logging
import signal
import threading
import time

import psutil
import torch

from common.config.run_config import RunConfig, TrainMode, published_version
from common.errors import LongstrideError
from common.memory import trim_heap
from common.store.run_dir import RunDir
from common.wire.messages import EpisodeOutcome, Outcome
from learner.batch.credit import samples_of
from learner.build import Parts, build
from learner.ingest.episode_stats import horizon_mix
from learner.ingest.group_assembly import Group
from learner.ingest.replay_point import save_bookmark
from learner.objective.describe import dead_knobs, objective_text
from learner.policy.device import pick_device
from learner.policy.model import export_tensors
from learner.recovery.step_log import LoggedStep
from learner.weights.snapshot import PublishedWeights, snapshot

logger = logging.getLogger(__name__)

TRIM_EVERY_STEPS = 10  # on CPU; measured: without it the heap grew from 1 to 5.5 GB in 350 steps
NUM_CANARIES = 4
CANARY_EVERY_STEPS = 10  # new prompts: what an old policy sampled is rare under a new one
MAX_CANARY_TOKENS = 96
SIGNALS = {"policy/entropy": "entropy", "offpolicy/ess_frac": "ess_frac"}  # to the scheduler
FINISH_S = 900.0  # for the evaluation after the last step


class StopRequested(Exception):
    """SIGTERM or SIGINT: save and leave."""


def run(cfg: RunConfig, run_dir: RunDir) -> None:
    """Train for `cfg.train.num_steps` optimizer steps. Any exception ends the role.

    Version counts optimizer steps: version v is the policy after step v.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    logger.info("objective: %s", objective_text(cfg.algorithm, cfg.learner))
    for line in dead_knobs(cfg.algorithm, cfg.learner):
        logger.warning("%s", line)
    parts = build(cfg, run_dir)
    loop = Loop(cfg, parts, stop)
    try:
        parts.intake.start()
        parts.publisher.start()
        loop.publish()
        run_dir.publish_address("weights", f"tcp://{cfg.learner.host}:{parts.publisher.port}")
        run_dir.publish_address("learner", f"tcp://{cfg.learner.host}:{parts.intake.port}")
        loop.train()
    except StopRequested:
        logger.info("stopping version=%d", loop.version)
        loop.save()
    finally:
        shut_down(parts)


class Loop:
    """The steps of training, each behind a name."""

    def __init__(self, cfg: RunConfig, parts: Parts, stop: threading.Event) -> None:
        self._cfg = cfg
        self._parts = parts
        self._stop = stop
        self._process = psutil.Process()
        self._device = pick_device(cfg.learner.device)
        self._canary: list[list[int]] = []  # [canary, seq] token ids
        self._canary_masks: list[list[bool]] = []  # [canary, seq-1] True on sampled tokens
        self._skipped: list[EpisodeOutcome] = []  # of batches the controller refused, since a step
        self._signals: dict[str, float] = {}  # of the last step, for curriculum and gate
        self._held_back: list[PublishedWeights] = []  # oldest first
        self._last_published = -1
        self.version = parts.version

    def train(self) -> None:
        """Run to the last step, then until the scheduler has its last evaluation."""
        cfg, parts = self._cfg, self._parts
        self._report_step()
        while self.version < cfg.train.num_steps:
            groups, stale, waited_s = self._next_batch()
            started_s = time.monotonic()
            result = parts.trainer.train_on(samples_of(groups, cfg.algorithm), version=self.version)
            metrics = result.metrics
            if result.decision.is_skipped:
                self._give_back(groups, stale)
                continue
            self._signals = {
                signal: metrics[name] for name, signal in SIGNALS.items() if name in metrics
            }
            stale = [*self._skipped, *stale]
            self._skipped = []
            self.version += 1
            trained = self._log_step(groups, stale)
            self._log_metrics(metrics, groups, stale, waited_s)
            self.publish()
            self._signals["busy_s"] = time.monotonic() - started_s
            self._signals["wait_s"] = waited_s
            # Only now: a report frees the gate, and new groups must not meet the old weights.
            parts.intake.report(trained)
            self._report_step()
            if self._device.type == "cpu" and self.version % TRIM_EVERY_STEPS == 0:
                trim_heap()
            if parts.checkpoints.is_due(self.version):
                self.save()
        self.save()
        self._finish()

    def _report_step(self) -> None:
        """Tell the scheduler where the learner stands and how far ahead of it groups may be."""
        self._parts.intake.step_done(
            self.version,
            is_last=self.version >= self._cfg.train.num_steps,
            max_ahead_steps=self._parts.trainer.max_ahead_steps,
            signals=self._signals,
        )

    def _give_back(self, groups: list[Group], stale: list[EpisodeOutcome]) -> None:
        """Account for a batch that was too far off to learn from; the next one must be fresh.

        The outcomes are written down with the next step: until then a restart decides anew.
        """
        dropped = [
            EpisodeOutcome(episode_id=t.episode_id, outcome=Outcome.STALE, cause="controller")
            for group in groups
            for t in group.members
        ]
        self._skipped += [*stale, *dropped]
        self._parts.intake.report(dropped)
        self._report_step()

    def _next_batch(self) -> tuple[list[Group], list[EpisodeOutcome], float]:
        started = time.monotonic()
        learner = self._cfg.learner
        freshest = learner.hold_back_steps  # what a batch after a skipped one must be
        self._parts.intake.waiting_for = "actors: a batch"
        deadline = started + learner.batch_timeout_s
        while True:
            if self._stop.is_set():
                raise StopRequested
            self._parts.followers.check()
            try:
                groups, stale = self._parts.intake.next_batch(
                    self.version,
                    max_lag_steps=freshest if self._skipped else learner.max_lag_steps,
                    in_order=self._cfg.train.mode is TrainMode.SYNC,
                    timeout_s=0.5,
                    may_stretch=not self._skipped,
                )
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise
                continue
            self._parts.intake.waiting_for = ""
            return groups, stale, time.monotonic() - started

    def _log_step(self, groups: list[Group], stale: list[EpisodeOutcome]) -> list[EpisodeOutcome]:
        """Write down what the step consumed before its weights are seen; return who trained."""
        trained = [
            EpisodeOutcome(episode_id=t.episode_id, outcome=Outcome.TRAINED, cause="")
            for group in groups
            for t in group.members
        ]
        self._parts.step_log.append(
            LoggedStep(
                version=self.version,
                groups=[[t.episode_id for t in group.members] for group in groups],
                outcomes=[*trained, *stale],
            )
        )
        self._parts.intake.index.trained([group.group_id for group in groups], step=self.version)
        if not self._canary or self.version % CANARY_EVERY_STEPS == 0:
            members = [group.members[0] for group in groups[:NUM_CANARIES]]
            self._canary = [t.token_ids[:MAX_CANARY_TOKENS].tolist() for t in members]
            self._canary_masks = [t.loss_mask[1:MAX_CANARY_TOKENS].tolist() for t in members]
        return trained

    def publish(self) -> None:
        """Send the weights that are due to every engine and wait until they are there.

        Those are the current ones, unless `learner.hold_back_steps` keeps them back. A resumed run
        has no older ones: it sends what it has, and goes on when the next one is due.
        """
        self._held_back.append(self._snapshot())
        due = published_version(self._cfg, self.version)
        if due <= self._last_published:
            return
        while len(self._held_back) > 1 and self._held_back[0].version < due:
            self._held_back.pop(0)
        weights = self._held_back.pop(0)
        self._parts.intake.waiting_for = "actors: weights"
        if not self._parts.publisher.publish(weights, is_stopping=self._stop.is_set):
            raise StopRequested
        self._last_published = weights.version
        self._parts.intake.waiting_for = ""

    def _snapshot(self) -> PublishedWeights:
        """Return a copy of the current weights, with our scores of the canaries."""
        parts = self._parts
        dtype = getattr(torch, self._cfg.model.dtype)
        scores = parts.trainer.score(self._canary) if self._canary else []
        return snapshot(
            self.version,
            export_tensors(parts.model, dtype),
            canary_token_ids=self._canary,
            canary_logprobs=scores,
            canary_masks=self._canary_masks,
        )

    def _log_metrics(
        self,
        metrics: dict[str, float],
        groups: list[Group],
        stale: list[EpisodeOutcome],
        waited_s: float,
    ) -> None:
        parts = self._parts
        rss = self._process.memory_info().rss
        parts.intake.rss_bytes = rss
        parts.intake.tokens_per_s = metrics.get("train/tokens_per_s", 0.0)
        metrics |= parts.intake.drain_stats()
        metrics |= horizon_mix([t for group in groups for t in group.members])
        metrics |= parts.publisher.drain_metrics()
        metrics |= {
            "groups/trained": float(len(groups)),
            "groups/stale_episodes": float(len(stale)),
            "wait/batch_s": waited_s,
            "memory/learner_rss_bytes": float(rss),
        }
        parts.metrics.log(self.version, metrics)
        logger.info(
            "step=%d success=%.3f lag=%.2f loss=%.4f took_s=%.2f waited_s=%.2f",
            self.version,
            metrics.get("reward/success", float("nan")),
            metrics.get("offpolicy/lag_mean", float("nan")),
            metrics.get("loss/policy", float("nan")),
            metrics.get("train/step_s", float("nan")),
            waited_s,
        )
        if parts.publisher.num_canary_alarms >= self._cfg.learner.max_canary_alarms:
            raise LongstrideError(
                f"engine and trainer disagree for {parts.publisher.num_canary_alarms} versions "
                f"in a row (learner.max_canary_delta={self._cfg.learner.max_canary_delta})"
            )

    def save(self) -> None:
        """Write a checkpoint of the current version, and where its reading begins."""
        parts = self._parts
        parts.checkpoints.save(
            self.version,
            model=parts.model,
            tokenizer=parts.tokenizer,
            state=parts.trainer.state_dict(),
        )
        save_bookmark(
            parts.bookmark, parts.intake.bookmark(version=parts.checkpoints.oldest_version)
        )

    def _finish(self) -> None:
        """Keep serving trajectories until the scheduler's last evaluation is in."""
        deadline = time.monotonic() + FINISH_S
        self._parts.intake.waiting_for = "actors: evaluation"
        while not self._parts.intake.wait_finished(timeout_s=0.5):
            if self._stop.is_set():
                raise StopRequested
            if time.monotonic() > deadline:
                raise LongstrideError(f"evaluation not finished within {FINISH_S:g}s")


def shut_down(parts: Parts) -> None:
    """Stop accepting, drain, close; each part in bounded time."""
    parts.intake.stop()
    parts.publisher.stop()
    parts.followers.stop()
    parts.step_log.close()
    parts.journal.close()
    parts.metrics.close()
