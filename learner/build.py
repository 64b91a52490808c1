"""Puts a learner together, and back to where a previous one stopped."""

import logging
import os
import uuid
from dataclasses import dataclass
from typing import Any

from transformers import AutoTokenizer

from common.config import RunConfig, TrainMode
from common.journal import JournalWriter, read_journal
from common.messages import EpisodeKind, Hello, Trajectory
from common.metrics import BEFORE_FIRST_STEP as NOTHING_LOGGED
from common.metrics import MetricsWriter, read_metrics
from common.run_dir import RunDir
from common.security import RunKeys, load_keys
from common.sockets import Router
from common.wandb_sink import WandbSink
from learner.bad_batch import dump_batch
from learner.batching import Sample
from learner.build_trainer import load_start, make_trainer
from learner.checkpoint import Checkpoints, newest_checkpoint
from learner.device import pick_device
from learner.followers import Followers
from learner.groups import Group, GroupTable
from learner.intake import Intake
from learner.model import vocabulary_size
from learner.publish import Publisher
from learner.samples import group_has_signal, samples_of
from learner.step_log import StepLog
from learner.trainer import Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything a learner is made of."""

    model: Any
    tokenizer: Any
    trainer: Trainer
    followers: Followers
    intake: Intake
    publisher: Publisher
    checkpoints: Checkpoints
    journal: JournalWriter
    step_log: StepLog
    metrics: MetricsWriter
    version: int


def build(cfg: RunConfig, run_dir: RunDir) -> Parts:
    """Return a learner at the version where the run stands, 0 for a new one.

    A checkpoint is restored, then the steps logged after it are repeated from the journal.
    """
    keys = load_keys(run_dir.keys)
    folder = newest_checkpoint(run_dir.checkpoints)
    followers = Followers(cfg, folder)
    model, model_path = load_start(cfg, folder, pick_device(cfg.learner.device))
    tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    trainer, version = make_trainer(
        cfg,
        model,
        folder,
        ranks=followers.join(),
        announce=followers.announce,
        on_bad_batch=lambda version, samples: dump_batch(run_dir.root, version, samples),
    )
    journal = JournalWriter(run_dir.journal)
    step_log = StepLog(run_dir.journal / "steps.jsonl")
    held = {t.episode_id: t for _, t in read_journal(run_dir.journal)}
    metrics = MetricsWriter(
        run_dir, [WandbSink(run_dir, cfg)], resumed_at_step=_last_logged(run_dir, step_log, version)
    )
    version = _repeat_steps(cfg, trainer, step_log, held, version, metrics)
    intake = _intake(cfg, run_dir, keys, journal, version, vocab_size=vocabulary_size(model))
    _readopt(intake, step_log, held)
    publisher = Publisher(
        Router(keys, host=cfg.learner.host, port=0),
        host=cfg.learner.host,
        timeout_s=cfg.learner.publish_timeout_s,
        max_canary_delta=cfg.learner.max_canary_delta,
    )
    return Parts(
        model=model,
        followers=followers,
        tokenizer=tokenizer,
        trainer=trainer,
        intake=intake,
        publisher=publisher,
        checkpoints=Checkpoints(
            run_dir.checkpoints,
            every_steps=cfg.learner.checkpoint_every_steps,
            every_s=cfg.learner.checkpoint_every_s,
            keep=cfg.learner.keep_checkpoints,
        ),
        journal=journal,
        step_log=step_log,
        metrics=metrics,
        version=version,
    )


def _last_logged(run_dir: RunDir, step_log: StepLog, version: int) -> int:
    """Return the last step whose metrics are still true: all up to where the run will stand."""
    stands_at = max([version, *(step.version for step in step_log.steps)])
    lines = read_metrics(run_dir.metrics) if run_dir.metrics.exists() else []
    steps = [int(step) for line in lines if (step := line["step"]) is not None]
    return max((step for step in steps if step <= stands_at), default=NOTHING_LOGGED)


def _intake(
    cfg: RunConfig,
    run_dir: RunDir,
    keys: RunKeys,
    journal: JournalWriter,
    version: int,
    *,
    vocab_size: int,
) -> Intake:
    router = Router(keys, host=cfg.learner.host, port=cfg.learner.port)
    table = GroupTable(
        cfg.groups,
        cfg.algorithm,
        has_signal=lambda m: group_has_signal(m, cfg.algorithm),
        is_lockstep=cfg.train.mode is TrainMode.SYNC,
    )
    hello = Hello(
        role="learner",
        name=f"learner-{os.getpid()}",
        incarnation=uuid.uuid4().hex[:12],
        version=version,
    )
    intake = Intake(
        run_dir,
        keys,
        router,
        journal,
        table,
        hello=hello,
        heartbeat_s=cfg.scheduler.heartbeat_s,
        group_size=cfg.groups.size,
        silence_s=4 * cfg.scheduler.dead_after_s,
        vocab_size=vocab_size,
    )
    return intake


def _repeat_steps(
    cfg: RunConfig,
    trainer: Trainer,
    step_log: StepLog,
    held: dict[str, Trajectory],
    version: int,
    metrics: MetricsWriter,
) -> int:
    """Train again on the logged batches after `version`; return the version reached.

    A step whose metrics were not written any more gets a line with what training alone tells.
    """
    for step in step_log.steps:
        if step.version <= version:
            continue
        groups = [
            Group(group_id=ids[0].rpartition("/")[0], members=[held[name] for name in ids])
            for ids in step.groups
        ]
        samples: list[Sample] = samples_of(groups, cfg.algorithm)
        measured = trainer.train_on(samples, version=step.version - 1, must_train=True)
        version = step.version
        if version > metrics.last_step:
            metrics.log(version, measured)
        logger.info("repeated step=%d groups=%d", version, len(groups))
    return version


def _readopt(intake: Intake, step_log: StepLog, held: dict[str, Trajectory]) -> None:
    """Give the journal's episodes back: consumed ones to the books, the others to their groups."""
    consumed = {o.episode_id for step in step_log.steps for o in step.outcomes}
    for step in step_log.steps:
        intake.adopt_outcomes(step.outcomes)
    for trajectory in held.values():
        is_consumed = trajectory.episode_id in consumed
        intake.adopt(trajectory, is_consumed=is_consumed)
    num_open = sum(
        t.kind is EpisodeKind.TRAIN and t.episode_id not in consumed for t in held.values()
    )
    if held:
        logger.info("journal episodes=%d not_consumed=%d", len(held), num_open)
