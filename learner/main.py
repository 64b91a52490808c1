"""The learner's main loop: wait for a batch, train on it, publish the weights, repeat."""

import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import psutil

from common.config.learner import PartialEpisodes
from common.config.live import changed_values, followed, last_number
from common.config.run import OnStall
from common.config.run_config import RunConfig, published_version
from common.config.train import TrainMode
from common.cpu import cpu_metrics, family_cpu_s
from common.errors import LongstrideError
from common.host.lock import hold_role
from common.memory import trim_heap
from common.stall.beacon import Beacon, beacon_of
from common.store.disk import POLL_S, DiskFull, if_room
from common.store.run_dir import RunDir
from common.wire.messages import EpisodeOutcome, Outcome, Trajectory
from learner.build import Learner, build
from learner.ingest.buffer import Group
from learner.ingest.episode_stats import horizon_mix
from learner.ingest.journal_index import save_replay_point
from learner.journal.journal import load_pruned
from learner.journal.metrics import copy_metrics
from learner.objective.advantages import samples_of
from learner.objective.description import log_summary
from learner.recovery.checksums import Start
from learner.recovery.step_log import LoggedStep, PartName
from learner.training.rank_processes import LOAD_S
from learner.training.trainer import TrainResult
from learner.weights.canary import Prompts, prompts_of
from learner.weights.publisher import EngineWatch
from learner.weights.source import PublishedWeights, copied

logger = logging.getLogger(__name__)

# Steps between two selections of canary sequences; the policy soon makes old ones improbable.
CANARY_EVERY_STEPS = 10
# Metrics in the report to the scheduler, with their keys there.
SIGNALS = {"policy/entropy": "entropy", "offpolicy/ess_frac": "ess_frac"}
# Seconds between two heap trims on CPU. Untrimmed, the heap grew from 1 to 5.5 GB in 350 steps.
TRIM_EVERY_S = 15.0
FINISH_S = 900.0  # Time limit of the evaluation after the last step, in seconds.
MOST_INVALID_FRAC = 0.9  # A larger share of invalid actions is a warning.


class StopRequested(Exception):
    """SIGTERM or SIGINT arrived: save a checkpoint and exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The groups that one step trains on."""

    groups: list[Group]
    stale: list[EpisodeOutcome]  # Episodes that became stale since the last step.
    waited_s: float
    taken_at: float = field(default_factory=time.monotonic)

    @property
    def members(self) -> list[Trajectory]:
        """The members of the groups, without early parts."""
        return [member for group in self.groups if not group.is_early for member in group.members]

    @property
    def early_parts(self) -> list[Trajectory]:
        """The parts that are trained before their groups."""
        return [member for group in self.groups if group.is_early for member in group.members]

    def outcomes(self, outcome: Outcome, cause: str = "") -> list[EpisodeOutcome]:
        """Return the same outcome for every member of a group, without early parts."""
        return [each for group in self.groups for each in group.outcomes(outcome, cause)]


def run(cfg: RunConfig, run_dir: RunDir) -> None:
    """Train for `cfg.train.num_steps` optimizer steps. Any exception ends the role.

    The version counts optimizer steps: version v is the policy after step v.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    log_summary(cfg.algorithm, cfg.learner)
    start_s = LOAD_S + cfg.learner.join_timeout_s * (cfg.learner.num_nodes > 1)
    with (
        hold_role(run_dir.root, "learner"),
        beacon_of(run_dir, "learner", start_s=start_s) as beacon,
    ):
        learner = build(
            cfg,
            run_dir,
            is_stopping=stop.is_set,
            on_round=partial(beacon.note, "intake", "serving"),
        )
        _train(cfg, learner, stop, beacon)


def _train(cfg: RunConfig, learner: Learner, stop: threading.Event, beacon: Beacon) -> None:
    """Run a built learner until the last step, a stop request or an error."""
    loop = Loop(cfg, learner, stop, note=partial(beacon.note, "main"))
    learner.trainer.report_progress(partial(beacon.renew, "main"))
    try:
        learner.intake.start()
        learner.publisher.start()
        learner.upkeep.start()
        loop.publish()
        learner.trainer.measure_rate()
        learner.trainer.warm_up()  # This overlaps with the first episodes.
        loop.train()
        learner.rank_workers.is_over = True
    except StopRequested:
        learner.rank_workers.is_over = True
        logger.info("stopping version=%d", loop.version)
        loop.saving.save(loop.version)
        loop.saving.settle(must_wait=True)
    finally:
        learner.shut_down()


class Loop:
    """The training loop.

    The loop consumes batches from the buffer. A step waits for enough fresh groups, and until the
    engines have the previous version. In sync mode it also waits until they have the new version.
    In async mode a version is broadcast while the next step computes its gradient. A stop request
    ends every wait at once.
    """

    def __init__(
        self,
        cfg: RunConfig,
        learner: Learner,
        stop: threading.Event,
        *,
        note: Callable[..., None] = lambda *_, **__: None,
    ) -> None:
        """Start at the version of `learner`; `note` records progress, as `Beacon.note` does."""
        self._note = note
        self._cfg = cfg
        self._learner = learner
        self._stop = stop
        self._process = psutil.Process()
        self._is_on_cpu = learner.model.device.type == "cpu"
        self._trimmed_at = time.monotonic()
        self._canary = Prompts([], [])
        self._watch = EngineWatch(
            learner.publisher, learner.buffer.recent, learner.trainer.score, cfg
        )
        self._num_skipped = learner.num_skipped
        self._num_stale = 0  # Episodes that became stale since the last step.
        self._is_first_batch = True
        self._wait = ""  # Role or resource that this thread waits for; "" while it computes.
        # Metrics of the last step, for the curriculum and the dispatch gate.
        self._signals: dict[str, float] = {}
        self._held_back: list[PublishedWeights] = []  # Unpublished weights, oldest first.
        self._last_published = -1
        self._reported_version = -1
        # Number of the last change of live keys.
        self._config_number = last_number(learner.run_dir.config_changes)
        is_async = cfg.train.mode is TrainMode.ASYNC
        self._is_overlapping = is_async and cfg.learner.hold_back_steps == 0
        self._weights = learner.trainer.live_weights(ask=learner.rank_workers.ask_for_part)
        self.saving = Saving(learner, set_status=self._set_status, check=self._check)
        self.version = learner.version

    def train(self) -> None:
        """Train to the last step, then wait for the scheduler's last evaluation."""
        while self._follow_config() and self.version < self._cfg.train.num_steps:
            batch = self._wait_for_batch()
            self._follow_config()
            self._put_engines_to_sleep()
            samples = samples_of(batch.groups, self._cfg.algorithm, self._learner.trainer.baseline)
            result = self._learner.trainer.train_on(samples, version=self.version)
            if result.decision.is_skipped:
                self._report_skipped(batch)
                if self._cfg.actor.sleep:  # Only a version wakes the engines up.
                    self._send(self._current_weights(), lambda: None)
                continue
            self._log_consumed(batch)
            self._log_metrics(batch, result)
            self._note_signals(batch, result)
            self.publish(batch.outcomes(Outcome.TRAINED))
            if self._is_on_cpu and time.monotonic() - self._trimmed_at >= TRIM_EVERY_S:
                trim_heap()
                self._trimmed_at = time.monotonic()
            self.saving.settle()
            if self._learner.checkpoints.is_due(self.version):
                self.saving.save(self.version)
        self.saving.save_last(self.version)
        self._finish()

    def _follow_config(self) -> RunConfig:
        """Use the values of live keys that the scheduler has sent; return the configuration."""
        learner = self._learner
        self._cfg = follow(self._cfg, learner, version=self.version, save=self._save_if_new)
        if learner.intake.live_config is not None:
            self._config_number = learner.intake.live_config.number
        return self._cfg

    def _save_if_new(self) -> None:
        """Save a checkpoint, unless the newest one has these weights."""
        if self.version > self._learner.checkpoints.newest_version:
            self.saving.save(self.version)

    def _put_engines_to_sleep(self) -> None:
        """With `actor.sleep`, wait until the engines have given their memory back."""
        if not self._cfg.actor.sleep:
            return
        self._set_status(waiting_for="actors: memory of their engines")
        publisher = self._learner.publisher
        timeout_s = self._cfg.actor.turn_timeout_s
        if not publisher.put_to_sleep(timeout_s=timeout_s, is_stopping=self._stop.is_set):
            raise StopRequested
        self._set_status(waiting_for="")

    # --- 1. Waiting for a batch --------------------------------------------------------------

    def _wait_for_batch(self) -> TrainBatch:
        """Return the next batch. A timeout is logged, or raised with `run.on_stall=stop`."""
        started = time.monotonic()
        cfg = self._cfg.learner
        is_after_skip = self._num_skipped > 0
        self._set_status(waiting_for="actors: a batch")
        while True:
            try:
                groups, stale = self._learner.buffer.next_batch(
                    self.version,
                    # After a skipped batch the step accepts only the freshest groups.
                    max_lag_steps=cfg.hold_back_steps if is_after_skip else cfg.max_lag_steps,
                    in_order=self._cfg.train.mode is TrainMode.SYNC,
                    timeout_s=cfg.batch_timeout_s,
                    is_after_skip=is_after_skip,
                    check=self._check,
                )
                break
            except TimeoutError as error:  # The actors are late; this process does not hang.
                is_paused = self._learner.intake.has_no_room or bool(self._missing_teacher())
                if self._cfg.run.on_stall is OnStall.STOP and not is_paused:
                    raise
                waited_s = time.monotonic() - started
                logger.error("still waiting for a batch waited_s=%.0f: %s", waited_s, error)
        self._set_status(waiting_for="")
        return TrainBatch(groups=groups, stale=stale, waited_s=time.monotonic() - started)

    def _check(self) -> None:
        """End a wait by an exception. Raises: StopRequested; LongstrideError: a rank ended."""
        if self._stop.is_set():
            raise StopRequested
        self._learner.rank_workers.check()
        self._learner.publisher.check()
        missing = self._watch.missing_engines(self._learner.buffer.num_slots)
        self._note_wait(missing or self._missing_teacher())
        if self._last_published == self.version:
            self._watch.check_if_due(self.version)

    def _missing_teacher(self) -> str:
        """Return the teacher that batches wait for; "" if it answers, or if there is none.

        Raises: ConfigError, Refused: the teacher cannot score the episodes.
        """
        teacher = self._learner.teacher
        if teacher is None:
            return ""
        teacher.check()
        return teacher.waiting_for

    def _note_wait(self, missing: str) -> None:
        """Report the resource that a wait lacks, and the wait itself once it is there again."""
        shown = missing or self._wait
        if shown != self._learner.intake.status.waiting_for:
            self._show_status(waiting_for=shown)

    def _report_skipped(self, batch: TrainBatch) -> None:
        """Report the episodes of a skipped batch as stale; the next batch must be fresh.

        The step log records the skip before the scheduler receives it, so a restart skips the batch
        again.
        """
        dropped = batch.outcomes(Outcome.STALE, "controller")
        self._log_batch(batch, dropped, is_skipped=True)
        self._learner.buffer.report(dropped)
        # Otherwise the version is reported once the engines have it.
        if self._reported_version == self.version:
            self._report_version(self.version, self._signals)

    # --- 2. Logging the batch -------------------------------------------------------------------

    def _log_consumed(self, batch: TrainBatch) -> None:
        """Log the batch before its weights are published."""
        self._log_batch(batch, batch.outcomes(Outcome.TRAINED), is_skipped=False)
        if not self._canary.token_ids or self.version % CANARY_EVERY_STEPS == 0:
            self._canary = prompts_of(group.members[0] for group in batch.groups)

    def _log_batch(
        self, batch: TrainBatch, outcomes: list[EpisodeOutcome], *, is_skipped: bool
    ) -> None:
        """Log a batch. From here on it is consumed, even if this process ends."""
        learner = self._learner
        step = LoggedStep(
            version=self.version + (not is_skipped),
            groups=[group.names for group in batch.groups],
            outcomes=[*outcomes, *batch.stale],
            is_skipped=is_skipped,
            number=learner.trainer.num_batches,
            journal_file=learner.journal.position.file,
        )
        learner.log_batch(step, parts=batch.early_parts, check=self._check_disk)
        self.version = step.version
        self._num_skipped += is_skipped
        self._num_stale += sum(each.outcome is Outcome.STALE for each in step.outcomes)
        learner.buffer.mark_trained(batch.groups, step=step.consumed_by, is_skipped=is_skipped)

    def _check_disk(self) -> None:
        """Report a full disk; raise after a stop request.

        The next start repeats the step that was not logged.

        Raises: DiskFull: stopped while the disk is full.
        """
        self._set_status(waiting_for="disk: room for the step log or the metrics")
        if self._stop.is_set():
            raise DiskFull(f"stopped while the disk is full, after step {self.version}")

    def _log_metrics(self, batch: TrainBatch, result: TrainResult) -> None:
        """Write the metrics of a step."""
        learner = self._learner
        rss = self._process.memory_info().rss
        metrics = result.metrics | learner.buffer.drain_stats() | learner.admission.counts()
        metrics |= horizon_mix(batch.members) | learner.publisher.drain_metrics()
        metrics |= learner.intake.refused()
        metrics |= learner.teacher.drain_metrics() if learner.teacher is not None else {}
        metrics |= learner.rewarder.drain_metrics() if learner.rewarder is not None else {}
        metrics |= {
            "groups/trained": float(sum(not group.is_early for group in batch.groups)),
            "groups/stale_episodes": float(self._num_stale),
            "controller/skipped": float(self._num_skipped),
            "wait/batch_s": batch.waited_s,
            "memory/learner_rss_bytes": float(rss),
        }
        if self._cfg.learner.partial_episodes is PartialEpisodes.TURNS:
            metrics |= part_metrics(batch)
        if self._config_number:
            metrics["config/number"] = float(self._config_number)
        metrics |= cpu_metrics(learner.run_dir) | self.saving.metrics
        metrics |= copy_metrics(learner.run_dir)
        rate = metrics.get("train/tokens_per_s", 0.0)
        self._set_status(rss_bytes=rss, tokens_per_s=rate, cpu_s=family_cpu_s())
        learner.metrics.log(self.version, metrics, check=self._check_disk)
        self._num_skipped = self._num_stale = 0
        if self._is_first_batch:
            warn_of_invalid_actions(metrics.get("episodes/invalid_frac", 0.0), self._cfg)
            warn_of_cuts(metrics.get("episodes/cut_observations_mean", 0.0), self._cfg)
            self._is_first_batch = False
        nan = float("nan")
        logger.info(
            "step=%d success=%.3f lag=%.2f loss=%.4f took_s=%.2f waited_s=%.2f",
            self.version,
            metrics.get("reward/success", nan),
            metrics.get("offpolicy/lag_mean", nan),
            metrics.get("loss/policy", nan),
            metrics.get("train/step_s", nan),
            batch.waited_s,
        )
        self._watch.check()

    # --- 3. Publishing the weights --------------------------------------------------------------

    def publish(self, trained: Sequence[EpisodeOutcome] = ()) -> None:
        """Send the due weights to every engine, and report the step once the engines have them.

        The current weights are due unless `learner.hold_back_steps` delays them. A resumed run has
        no older weights: it sends the current ones, and sends again when the next version is due.
        In async mode this method returns during the broadcast: the next step's first update waits
        for the last bucket.
        """
        current = self._current_weights()
        report = partial(self._report_step, self.version, self._signals, trained)
        if self._is_overlapping:
            self._send(current, report)
            return
        self._held_back.append(current)
        due = published_version(self._cfg, self.version)
        if due > self._last_published:
            while len(self._held_back) > 1 and self._held_back[0].version < due:
                self._held_back.pop(0)
            self._send(self._held_back.pop(0), report)
        else:
            report()

    def _send(self, weights: PublishedWeights, report: Callable[[], None]) -> None:
        """Send weights to the engines. Raises: StopRequested."""
        publisher = self._learner.publisher
        if self._cfg.actor.sleep:  # The engines need the memory of the step's activations.
            self._learner.trainer.free_memory()
        self._set_status(waiting_for="actors: weights")
        send = publisher.begin if self._is_overlapping else publisher.publish
        if not send(weights, on_done=report, is_stopping=self._stop.is_set):
            raise StopRequested
        self._last_published = weights.version
        self._watch.postpone()
        self._set_status(waiting_for="")

    def _current_weights(self) -> PublishedWeights:
        """Return the current weights with the learner's scores of the canary sequences."""
        canary = self._canary
        trainer = self._learner.trainer
        return PublishedWeights(
            version=self.version,
            source=copied(self._weights) if self._cfg.learner.hold_back_steps else self._weights,
            canary_token_ids=canary.token_ids,
            canary_logprobs=trainer.score(canary.token_ids) if canary.token_ids else [],
            canary_masks=canary.masks,
        )

    # --- 4. Reports to the scheduler ------------------------------------------------------------

    def _note_signals(self, batch: TrainBatch, result: TrainResult) -> None:
        """Store the metrics that the scheduler receives with the report of this step."""
        metrics = result.metrics
        self._signals = {key: metrics[name] for name, key in SIGNALS.items() if name in metrics}
        self._signals["busy_s"] = time.monotonic() - batch.taken_at
        self._signals["wait_s"] = batch.waited_s

    def _report_step(
        self, version: int, signals: dict[str, float], trained: Sequence[EpisodeOutcome]
    ) -> None:
        """Report a step once its weights are published, so that new groups use these weights.

        The publisher's thread or the main thread calls this method.
        """
        self._learner.buffer.report(trained)
        self._report_version(version, signals)

    def _report_version(self, version: int, signals: dict[str, float]) -> None:
        """Report the version of the engines, and how many steps ahead groups may be."""
        self._reported_version = version
        self._learner.buffer.step_done(
            version,
            is_last=version >= self._cfg.train.num_steps,
            max_ahead_steps=self._learner.trainer.max_ahead_steps,
            signals=signals,
        )

    def _set_status(self, **changes: str | float) -> None:
        """Change the state that the heartbeats and the supervisor receive."""
        self._wait = str(changes.get("waiting_for", self._wait))
        self._show_status(**changes)

    def _show_status(self, **changes: str | float) -> None:
        """Change the state that is reported, also to a resource that the present wait lacks."""
        intake = self._learner.intake
        now = time.monotonic()
        intake.status = replace(intake.status, changed_at=now, **changes)  # pyright: ignore[reportArgumentType]
        if "waiting_for" in changes:
            waits_for = str(changes["waiting_for"])
            self._note("" if waits_for else f"step {self.version + 1}", waits_for=waits_for)

    # --- 5. The last evaluation -----------------------------------------------------------------

    def _finish(self) -> None:
        """Keep serving trajectories until the scheduler's last evaluation is complete."""
        self._set_status(waiting_for="actors: evaluation")
        if not self._learner.buffer.wait_finished(timeout_s=FINISH_S, check=self._check):
            raise LongstrideError(f"The last evaluation did not finish within {FINISH_S:g} s.")


def part_metrics(batch: TrainBatch) -> dict[str, float]:
    """Return the numbers of parts of a batch, and of the stale tokens of its trained episodes."""
    decided = [*batch.outcomes(Outcome.TRAINED), *batch.stale]
    return {
        "parts/early": float(len(batch.early_parts)),
        "parts/late": float(sum(part.text != part.episode_id for part in _late_parts(batch))),
        "parts/stale_tokens": float(sum(each.num_stale_tokens for each in decided)),
    }


def _late_parts(batch: TrainBatch) -> list[PartName]:
    """Return the names of the members that are trained with their groups."""
    names = [name for group in batch.groups if not group.is_early for name in group.names]
    return [PartName.parse(name) for name in names]


def warn_of_cuts(num_cut: float, cfg: RunConfig) -> None:
    """Log a warning if observations of the first batch were cut, which may hide their end."""
    if num_cut:
        logger.warning(
            "%.2g observations of an episode in the first batch were cut to fit into the context"
            " (mark [cut here]); raise actor.max_model_len=%d",
            num_cut,
            cfg.actor.max_model_len,
        )


def warn_of_invalid_actions(invalid_frac: float, cfg: RunConfig) -> None:
    """Log a warning if almost all actions of the first batch are invalid."""
    if invalid_frac <= MOST_INVALID_FRAC:
        return
    remedy = (
        "envhub.style=compact explains no rules; set envhub.style=instructed"
        if cfg.envhub.style == "compact"
        else "check actor.format and actor.max_turn_tokens, or begin with `python run.py sft`"
    )
    logger.warning(
        "%.0f %% of the actions in the first batch are invalid, so almost nothing is learnt: %s. "
        "`python run.py show %s` prints episodes",
        100 * invalid_frac,
        remedy,
        cfg.run.name,
    )


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
            if learner.part_log is not None:
                parts = learner.part_log
                if_room(lambda: parts.prune(steps), learner.run_dir.parts)
            if learner.reward_log is not None:
                log = learner.reward_log
                closed_below = point.closed_below
                if_room(
                    lambda: log.prune(steps, closed_below=closed_below),
                    learner.run_dir.group_rewards,
                )

    def _forget(self, needed: int) -> None:
        """Prune the step log and the checksums to the files that the journal still has."""
        learner = self._learner
        before = load_pruned(learner.run_dir.journal).before
        if learner.step_log.prune(before=before, needed=needed):
            learner.checksums.prune(learner.step_log.pruned.number)


SECTIONS = ("learner", "train")
OF_TRAINING = ("learner.lr", "learner.muon_lr", "train.num_steps")  # They change the weights.


def follow(
    cfg: RunConfig, learner: Learner, *, version: int, save: Callable[[], object]
) -> RunConfig:
    """Return the configuration with the scheduler's live values, once the learner uses them.

    A change of the training begins a new section of the checksum log, so that `recompute` uses each
    step's own values. `save` then begins a checkpoint: a restart repeats the steps since the newest
    complete one, and should repeat no step of the earlier values.
    """
    live = learner.intake.live_config
    new = followed(cfg, live, SECTIONS)
    if new is cfg or live is None:
        return cfg
    learner.checkpoints.configure(new.learner)
    if any(key in OF_TRAINING for key in changed_values(cfg, live, SECTIONS)):
        learner.trainer.configure(
            lr=new.learner.lr, muon_lr=new.learner.muon_lr, num_steps=new.train.num_steps
        )
        learner.checksums.begin(_start_with(new, learner, version=version))
        save()
    return new


def _start_with(cfg: RunConfig, learner: Learner, *, version: int) -> Start:
    """Return the record of a start that continues the last one with other rates and another end."""
    last = learner.checksums.last_start
    assert last is not None  # The learner has begun the record at its own start.
    weights, frozen = learner.trainer.checksums()
    settings = last.settings | {
        "learner": last.settings["learner"]
        | {"lr": cfg.learner.lr, "muon_lr": cfg.learner.muon_lr},
        "train": {"num_steps": cfg.train.num_steps},
    }
    number = learner.trainer.num_batches
    return replace(
        last, version=version, number=number, weights=weights, frozen=frozen, settings=settings
    )
