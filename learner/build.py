"""Puts a learner together, and back to where a previous one stopped."""

import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from common.config.run_config import RunConfig, TrainMode
from common.store.journal import JournalWriter
from common.store.metrics import MetricsWriter
from common.store.run_dir import RunDir
from common.store.wandb_sink import WandbSink
from common.wire.messages import Hello
from common.wire.security import RunKeys, load_keys
from common.wire.sockets import Router
from learner.batch.credit import group_has_signal
from learner.ingest.group_assembly import GroupAssembly
from learner.ingest.intake import Intake
from learner.ingest.replay_point import load_bookmark
from learner.policy.device import pick_device
from learner.policy.model import vocabulary_size
from learner.recovery.resume import last_logged, readopt, repeat_steps
from learner.recovery.step_log import StepLog, read_steps
from learner.training.bad_batch import dump_batch
from learner.training.build import load_start, make_trainer
from learner.training.checkpoint import Checkpoints, newest_checkpoint
from learner.training.rank_workers import Followers
from learner.training.trainer import Trainer
from learner.weights.publisher import Publisher


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
    bookmark: Path  # the file
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
    step_log = StepLog(run_dir.steps)
    bookmark = load_bookmark(run_dir.bookmark, version=version)
    steps = [step for step in read_steps(run_dir.steps) if step.version > version]
    version = steps[-1].version if steps else version
    metrics = MetricsWriter(
        run_dir, [WandbSink(run_dir, cfg)], resumed_at_step=last_logged(run_dir, version)
    )
    repeat_steps(cfg, run_dir, trainer, steps, bookmark=bookmark, metrics=metrics)
    intake = _intake(
        *(cfg, run_dir, keys, journal, version),
        vocab_size=vocabulary_size(model),
        closed_below=bookmark.closed_below,
    )
    readopt(intake, run_dir, bookmark)
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
        bookmark=run_dir.bookmark,
        version=version,
    )


def _intake(
    cfg: RunConfig,
    run_dir: RunDir,
    keys: RunKeys,
    journal: JournalWriter,
    version: int,
    *,
    vocab_size: int,
    closed_below: int,
) -> Intake:
    router = Router(keys, host=cfg.learner.host, port=cfg.learner.port)
    table = GroupAssembly(
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
        closed_below=closed_below,
    )
    return intake
