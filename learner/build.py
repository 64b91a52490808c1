"""Builds a learner and restores the state of its predecessor."""

import json
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedModel

from common.config.learner import Layout, PartialEpisodes
from common.config.run_config import RunConfig, trains_early
from common.config.train import TrainMode
from common.errors import LongstrideError
from common.host.cgroups import num_cores
from common.repository import code_name
from common.segments import RoutingShape
from common.store.run_dir import RunDir, remove_partial_files
from common.user_code import load_function
from common.wire.access.lease_mac import lease_key
from common.wire.addresses import bracketed
from common.wire.messages import Hello, Progress, Trajectory
from common.wire.security import RunKeys, load_keys
from common.wire.sockets import Router
from learner.algorithms.user_functions import user_filter
from learner.batch.batching import Sample
from learner.ingest.buffer import GroupAssembly, TrajectoryBuffer
from learner.ingest.group_rewards import GroupRewarder, MemberTexts, load_group_rewards
from learner.ingest.intake import Admission, Intake
from learner.ingest.journal_index import JournalIndex, load_replay_point
from learner.ingest.reports import ReportClient, ReportLog
from learner.journal.journal import JournalWriter
from learner.journal.metrics import MetricsWriter
from learner.journal.upkeep import Upkeep
from learner.objective.advantages import group_has_signal
from learner.policy.model import pick_device, vocabulary_size
from learner.policy.timing import choose_compute
from learner.recovery.checksums import ChecksumLog, start_of
from learner.recovery.resume import (
    last_logged,
    num_last_skipped,
    readopt,
    repeat_steps,
    steps_since,
)
from learner.recovery.reward_log import RewardLog, read_group_rewards
from learner.recovery.step_log import LoggedStep, PartLog, StepLog
from learner.teacher.scorer import TeacherScorer, start_teacher
from learner.trackers import open_trackers, user_trackers
from learner.training.build import load_start, make_trainer
from learner.training.checkpoint import Checkpoints, newest_checkpoint
from learner.training.rank_workers import RankWorkers
from learner.training.trainer import Trainer
from learner.weights.lock import WeightsLock
from learner.weights.publisher import Publisher
from learner.weights.transfer import PublishSettings

logger = logging.getLogger(__name__)

PROFILE_FOLDER = "profile"  # Below the run directory.
KEPT = 5  # Largest number of stored batches: a run that keeps failing must not fill the disk.


def dump_batch(run_root: Path, version: int, samples: Sequence[Sample]) -> Path | None:
    """Write a batch to `bad_batches/version-<v>/` of a run; None if there are `KEPT` already.

    `samples.jsonl` lists each episode with its reward; `<row>.npz` holds its arrays.
    """
    folder = run_root / "bad_batches" / f"version-{version}"
    if folder.exists() or len(list(folder.parent.glob("version-*"))) >= KEPT:
        return None
    folder.mkdir(parents=True)
    lines: list[str] = []
    for row, sample in enumerate(samples):
        t = sample.trajectory
        np.savez_compressed(
            folder / f"{row}.npz",
            token_ids=t.token_ids,
            loss_mask=t.loss_mask,
            logprobs=t.logprobs,
            versions=t.versions,
            turn_ids=t.turn_ids,
            advantages=sample.token_advantages(),
        )
        facts = {"row": row, "episode_id": t.episode_id, "item_id": t.item_id, "reward": t.reward}
        if sample.num_episode_tokens:
            facts["segment"] = sample.row
        lines.append(json.dumps(facts))
    (folder / "samples.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    logger.error("wrote bad batch version=%d folder=%s samples=%d", version, folder, len(lines))
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """The components of a learner."""

    run_dir: RunDir
    model: Any
    tokenizer: Any
    trainer: Trainer
    rank_workers: RankWorkers
    intake: Intake
    admission: Admission
    buffer: TrajectoryBuffer
    publisher: Publisher
    weights_lock: WeightsLock
    checkpoints: Checkpoints
    journal: JournalWriter
    upkeep: Upkeep
    step_log: StepLog
    checksums: ChecksumLog
    metrics: MetricsWriter
    version: int  # Version of the current weights.
    teacher: TeacherScorer | None = None  # None: the policy has no teacher.
    rewarder: GroupRewarder | None = None  # None: no function compares the members of a group.
    reward_log: RewardLog | None = None
    part_log: PartLog | None = None  # None: no episode is trained in parts.
    num_skipped: int = 0  # Batches skipped after the last step. The next one must be fresh.

    def log_batch(
        self, step: LoggedStep, *, parts: Sequence[Trajectory], check: Callable[[], object]
    ) -> None:
        """Log a batch whose outcome is decided, and the digests of its computation.

        Args:
            parts: the parts of the batch that the journal does not have.
            check: as in `StepLog.append`.
        """
        if self.part_log is not None:
            self.part_log.append(parts, check=check)
        self.step_log.append(step, check=check)
        assert self.trainer.digests is not None  # The digests are those of this batch.
        self.checksums.log(step, self.trainer.digests, check=check)

    def shut_down(self) -> None:
        """Stop the threads and ranks, then close the files. Each stop takes a bounded time."""
        self.intake.stop()
        if self.rewarder is not None:
            self.rewarder.stop()
        if self.teacher is not None:
            self.teacher.stop()
        self.publisher.stop()
        self.rank_workers.stop()
        self.upkeep.stop()
        if self.part_log is not None:
            self.part_log.close()
        self.step_log.close()
        self.checksums.close()
        self.journal.close()
        self.metrics.close()


def build(
    cfg: RunConfig,
    run_dir: RunDir,
    *,
    is_stopping: Callable[[], bool],
    on_round: Callable[[], None],
) -> Learner:
    """Return a learner at the current version of the run, 0 for a new run.

    It restores the newest checkpoint, then repeats the steps logged after it from the journal.
    `is_stopping` ends the waits for transfers; the intake calls `on_round` several times a second.
    """
    keys = load_keys(run_dir.keys)
    folder = newest_checkpoint(run_dir.checkpoints)
    check = _stop_check(is_stopping)
    rank_workers = RankWorkers(cfg, folder, run_dir=run_dir, check=check)
    model, tokenizer = _load(cfg, folder)
    lock = WeightsLock(timeout_s=cfg.learner.publish_timeout_s, is_stopping=is_stopping)
    settled = _settled(cfg, run_dir, model, rank_workers)
    may_pad = cfg.learner.layout is Layout.AUTO
    trainer, version = _trainer(settled, run_dir, model, folder, rank_workers, lock, may_pad)
    checksums = _checksums(_with_layout(settled, trainer), run_dir, trainer, version)
    journal = _journal(cfg, run_dir)
    start = load_replay_point(run_dir.replay_point, version=version)
    step_log = StepLog(run_dir.steps, start=start.steps_offset)
    steps = steps_since(run_dir, start=start, version=version, num_batches=trainer.num_batches)
    version = steps[-1].version if steps else version
    metrics = _metrics(cfg, run_dir, version=version)
    teacher = start_teacher(cfg, run_dir, tokenizer)
    reward_log = RewardLog(run_dir.group_rewards) if cfg.groups.reward else None
    rewarder = _rewarder(cfg, reward_log, tokenizer)
    is_by_turn = cfg.learner.partial_episodes is PartialEpisodes.TURNS
    checkpoints = Checkpoints(run_dir.checkpoints, cfg.learner)

    def save_if_due(version: int) -> None:
        """Save the checkpoint that a crash prevented."""
        if checkpoints.is_due(version):
            checkpoints.save(version, model=model, tokenizer=tokenizer, trainer=trainer)

    repeat_steps(
        cfg.algorithm,
        run_dir,
        trainer,
        steps,
        start=start,
        metrics=metrics,
        checksums=checksums,
        rewards=read_group_rewards(run_dir.group_rewards),
        # The teacher scores the episodes once more.
        score=None if teacher is None else partial(teacher.score, check=check),
        after_step=save_if_due,
    )
    index = JournalIndex(end=journal.position, closed_below=start.closed_below)
    reports = ReportLog()
    buffer = TrajectoryBuffer(
        _group_assembly(cfg),
        index,
        reports,
        version=version,
        score=None if teacher is None else teacher.begin,
        compare=None if rewarder is None else rewarder.begin,
    )
    readopt(buffer, run_dir, start)
    publisher = _publisher(cfg, keys, lock)
    admission = _admission(cfg, index, model, keys, trainer.routing)
    router = Router(keys, host=cfg.learner.host, port=cfg.learner.port)
    client = _scheduler_client(
        cfg, run_dir, keys, reports, buffer, publisher, intake_port=router.port
    )
    intake = Intake(
        router,
        journal,
        admission,
        buffer,
        client,
        heartbeat_s=cfg.scheduler.heartbeat_s,
        on_round=on_round,
        has_room=lambda: teacher is None or teacher.has_room,
    )
    return Learner(
        run_dir=run_dir,
        model=model,
        tokenizer=tokenizer,
        trainer=trainer,
        rank_workers=rank_workers,
        intake=intake,
        admission=admission,
        buffer=buffer,
        publisher=publisher,
        weights_lock=lock,
        checkpoints=checkpoints,
        journal=journal,
        upkeep=Upkeep(run_dir.journal, cfg.journal),
        step_log=step_log,
        checksums=checksums,
        metrics=metrics,
        version=version,
        teacher=teacher,
        rewarder=rewarder,
        reward_log=reward_log,
        part_log=PartLog(run_dir.parts) if is_by_turn else None,
        num_skipped=num_last_skipped(run_dir, start=start),
    )


def _load(cfg: RunConfig, checkpoint: Path | None) -> tuple[PreTrainedModel, Any]:
    """Return the policy to train and its tokenizer."""
    model, path = load_start(cfg, checkpoint, pick_device(cfg.learner.device))
    return model, AutoTokenizer.from_pretrained(path, local_files_only=True)


def _stop_check(is_stopping: Callable[[], bool]) -> Callable[[], None]:
    """Return a check that ends a wait of the start when the learner must stop."""

    def check() -> None:
        if is_stopping():
            raise LongstrideError("the learner was stopped during its start")

    return check


def _metrics(cfg: RunConfig, run_dir: RunDir, *, version: int) -> MetricsWriter:
    """Return the writer of metrics.jsonl and the trackers, behind the line of step `version`."""
    for user in user_trackers(cfg.log):
        logger.info("%s", user.note)
    last = last_logged(run_dir, version)
    sinks = open_trackers(run_dir, cfg, resumed_at_step=last)
    return MetricsWriter(run_dir, sinks, resumed_at_step=last)


def _rewarder(cfg: RunConfig, log: RewardLog | None, tokenizer: Any) -> GroupRewarder | None:
    """Return the running caller of `groups.reward`; None without it. Raises: ConfigError."""
    rewards = load_group_rewards(cfg.groups)
    if rewards is None or log is None:
        return None
    logger.info("objective: %s", rewards.formula)
    rewarder = GroupRewarder(rewards, log, MemberTexts(tokenizer))
    rewarder.start()
    return rewarder


def _group_assembly(cfg: RunConfig) -> GroupAssembly:
    """Return an empty group assembly."""
    if cfg.groups.filter:
        logger.info("%s", load_function("groups.filter", cfg.groups.filter).note)
    return GroupAssembly(
        cfg.groups,
        cfg.algorithm,
        has_signal=lambda members: group_has_signal(members, cfg.algorithm),
        keeps=user_filter(cfg.groups),
        is_lockstep=cfg.train.mode is TrainMode.SYNC,
        is_taught=cfg.algorithm.teacher.is_on,
        is_compared=bool(cfg.groups.reward),
        is_by_turn=cfg.learner.partial_episodes is PartialEpisodes.TURNS,
        trains_early=trains_early(cfg),
    )


def _checksums(cfg: RunConfig, run_dir: RunDir, trainer: Trainer, version: int) -> ChecksumLog:
    """Return the checksum log of this start; `cfg` contains the settled compute settings."""
    checksums = ChecksumLog(run_dir.checksums, version=version)
    checksums.begin(start_of(cfg, run_dir, trainer, version=version))
    return checksums


def _journal(cfg: RunConfig, run_dir: RunDir) -> JournalWriter:
    """Return the journal at its end; remove the partial files of ended writers."""
    for folder in (run_dir.root, run_dir.journal):
        remove_partial_files(folder)
    return JournalWriter(run_dir.journal, max_file_bytes=cfg.journal.segment_mb << 20)


def _admission(
    cfg: RunConfig,
    index: JournalIndex,
    model: PreTrainedModel,
    keys: RunKeys,
    routing: RoutingShape | None,
) -> Admission:
    """Return the admission of trajectories for this model and these keys."""
    return Admission(
        index,
        group_size=cfg.groups.size,
        vocab_size=vocabulary_size(model),
        max_tokens=cfg.learner.row_tokens,
        lease_key=lease_key(keys),
        routing=routing,
    )


def _settled(
    cfg: RunConfig, run_dir: RunDir, model: PreTrainedModel, rank_workers: RankWorkers
) -> RunConfig:
    """Return the configuration with settled compute settings, once all ranks have loaded."""
    rank_workers.wait_loaded()  # Loading would distort the timings.
    learner = choose_compute(
        cfg.learner,
        model,
        run_dir.precision,
        is_repeatable=cfg.train.mode is TrainMode.SYNC,
        max_seq_tokens=cfg.actor.max_model_len,
        # Each engine on this CPU has one thread; the ranks share the other cores.
        num_cores=(num_cores() - cfg.actor.num_engines) // cfg.learner.local_ranks,
        engine_dtype=cfg.model.dtype,
    )
    return replace(cfg, learner=learner)


def _trainer(
    cfg: RunConfig,
    run_dir: RunDir,
    model: PreTrainedModel,
    checkpoint: Path | None,
    rank_workers: RankWorkers,
    weights_lock: WeightsLock,
    may_pad: bool,
) -> tuple[Trainer, int]:
    """Return the trainer of all ranks and its version."""
    if pick_device(cfg.learner.device).type == "cpu":
        torch.set_num_threads(cfg.learner.num_threads)
    return make_trainer(
        cfg,
        model,
        checkpoint,
        may_pad=may_pad,
        ranks=rank_workers.join(cfg.learner),
        announce=rank_workers.announce,
        on_bad_batch=lambda version, samples: dump_batch(run_dir.root, version, samples),
        before_update=weights_lock.close,
        profile_folder=run_dir.root / PROFILE_FOLDER,
    )


def _with_layout(cfg: RunConfig, trainer: Trainer) -> RunConfig:
    """Return the configuration with the layout that the start check has settled."""
    layout = Layout.PACKED if trainer.is_packed else Layout.PADDED
    return replace(cfg, learner=replace(cfg.learner, layout=layout))


def _publisher(run: RunConfig, keys: RunKeys, weights_lock: WeightsLock) -> Publisher:
    """Return the publisher."""
    cfg = run.learner
    settings = PublishSettings(
        host=cfg.advertise or cfg.host,
        timeout_s=cfg.publish_timeout_s,
        silent_after_s=run.scheduler.silent_after_s,
        max_canary_delta=cfg.max_canary_delta,
        bucket_bytes=cfg.publish_bucket_mb << 20,
        transport=cfg.weights_transport,
        num_parts=cfg.publish_parts,
        keeps_versions=cfg.publish.keeps_versions(
            run.model.dtype, has_adapters=cfg.lora.rank > 0, is_sleeping=run.actor.sleep > 0
        ),
    )
    return Publisher(Router(keys, host=cfg.host, port=0), settings, weights_lock=weights_lock)


def _scheduler_client(
    cfg: RunConfig,
    run_dir: RunDir,
    keys: RunKeys,
    reports: ReportLog,
    buffer: TrajectoryBuffer,
    publisher: Publisher,
    *,
    intake_port: int,
) -> ReportClient:
    """Return the client that reports this learner's addresses to the scheduler."""
    ports = {"learner": intake_port, "weights": publisher.port}
    hello = Hello(
        role="learner",
        name=f"learner-{os.getpid()}",
        incarnation=uuid.uuid4().hex[:12],
        version=buffer.version,
        commit=code_name(),
        addresses={
            role: f"tcp://{bracketed(cfg.learner.advertise or cfg.learner.host)}:{port}"
            for role, port in ports.items()
        },
    )

    def on_progress(progress: Progress) -> None:
        buffer.apply(progress)
        publisher.mark_silent(progress.silent)

    return ReportClient(
        run_dir,
        keys,
        reports,
        hello=hello,
        silence_s=4 * cfg.scheduler.dead_after_s,
        on_progress=on_progress,
        others_refused=publisher.num_refused,
    )
