"""Puts a learner together, and back to where a previous one stopped."""

import logging
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from common.config import RunConfig, TrainMode
from common.errors import LongstrideError
from common.ids import is_below
from common.journal import JournalWriter, read_journal
from common.messages import EpisodeKind, Hello, Trajectory
from common.metrics import BEFORE_FIRST_STEP as NOTHING_LOGGED
from common.metrics import MetricsWriter, iter_metrics
from common.run_dir import RunDir
from common.security import RunKeys, load_keys
from common.sockets import Router
from common.wandb_sink import WandbSink
from learner.bad_batch import dump_batch
from learner.batching import Sample
from learner.bookmark import Bookmark, load_bookmark
from learner.build_trainer import load_start, make_trainer
from learner.checkpoint import Checkpoints, newest_checkpoint
from learner.device import pick_device
from learner.followers import Followers
from learner.groups import Group, GroupTable
from learner.intake import Intake
from learner.model import vocabulary_size
from learner.publish import Publisher
from learner.samples import group_has_signal, samples_of
from learner.step_log import LoggedStep, StepLog, read_steps
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
    stands_at = steps[-1].version if steps else version
    metrics = MetricsWriter(
        run_dir, [WandbSink(run_dir, cfg)], resumed_at_step=_last_logged(run_dir, stands_at)
    )
    _repeat_steps(cfg, trainer, steps, _episodes_of(steps, run_dir, bookmark), metrics)
    version = stands_at
    intake = _intake(
        cfg,
        run_dir,
        keys,
        journal,
        version,
        vocab_size=vocabulary_size(model),
        closed_below=bookmark.closed_below,
    )
    _readopt(intake, run_dir, bookmark)
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


def _last_logged(run_dir: RunDir, stands_at: int) -> int:
    """Return the last step whose metrics are still true: all up to where the run will stand."""
    steps = (
        step for line, _ in iter_metrics(run_dir.metrics) if (step := line["step"]) is not None
    )
    return max((int(step) for step in steps if step <= stands_at), default=NOTHING_LOGGED)


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
        closed_below=closed_below,
    )
    return intake


def _episodes_of(
    steps: list[LoggedStep], run_dir: RunDir, bookmark: Bookmark
) -> dict[str, Trajectory]:
    """Return the episodes that these steps trained on, by id.

    Raises:
        LongstrideError: the journal does not hold one of them.
    """
    wanted = {name: step.version for step in steps for ids in step.groups for name in ids}
    if not wanted:
        return {}
    journal = read_journal(run_dir.journal, start=bookmark.position)
    found = {t.episode_id: t for _, t in journal if t.episode_id in wanted}
    for name, version in wanted.items():
        if name not in found:
            raise LongstrideError(
                f"{run_dir.journal} has no episode {name} from {bookmark.position} on, and step"
                f" {version} trained on it"
            )
    return found


def _repeat_steps(
    cfg: RunConfig,
    trainer: Trainer,
    steps: list[LoggedStep],
    episodes: dict[str, Trajectory],
    metrics: MetricsWriter,
) -> None:
    """Train again on the logged batches of steps that no checkpoint has.

    A step whose metrics were not written any more gets a line with what training alone tells.
    """
    for step in steps:
        groups = [
            Group(group_id=ids[0].rpartition("/")[0], members=[episodes[name] for name in ids])
            for ids in step.groups
        ]
        samples: list[Sample] = samples_of(groups, cfg.algorithm)
        measured = trainer.train_on(samples, version=step.version - 1, must_train=True)
        if step.version > metrics.last_step:
            metrics.log(step.version, measured)
        logger.info("repeated step=%d groups=%d", step.version, len(groups))


def _readopt(intake: Intake, run_dir: RunDir, bookmark: Bookmark) -> None:
    """Give the journal's episodes back: consumed ones to the books, the others to their groups.

    What lies before the bookmark is settled, and so is what belongs to groups closed by then.
    """
    consumed: dict[str, int] = {}
    for step in read_steps(run_dir.steps):
        is_in_checkpoints = step.version <= bookmark.version
        outcomes = [o for o in step.outcomes if not is_below(o.episode_id, bookmark.closed_below)]
        consumed |= {
            o.episode_id: step.version for o in (outcomes if is_in_checkpoints else step.outcomes)
        }
        intake.adopt_outcomes(outcomes)
    num_episodes = num_open = 0
    for position, trajectory in read_journal(run_dir.journal, start=bookmark.position):
        step = consumed.get(trajectory.episode_id)
        is_closed = intake.adopt(trajectory, position, step=step)
        num_episodes += 1
        num_open += trajectory.kind is EpisodeKind.TRAIN and step is None and not is_closed
    if num_episodes:
        logger.info(
            "journal from=%s episodes=%d not_consumed=%d",
            *(bookmark.position, num_episodes, num_open),
        )
