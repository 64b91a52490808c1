"""A learner without its neighbours: trains on made batches, and leaves a run directory behind."""

from collections.abc import Collection, Iterable
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from common.config.load import load_config
from common.config.run_config import RunConfig
from common.segments import part_of
from common.store.run_dir import RunDir
from common.store.run_start import save_config
from common.wire.messages import EpisodeOutcome, Outcome, Trajectory
from learner.ingest.buffer import Group
from learner.ingest.journal_index import ReplayPoint
from learner.journal.journal import JournalWriter
from learner.journal.metrics import MetricsWriter
from learner.objective.advantages import samples_of
from learner.recovery.checksums import ChecksumLog, start_of
from learner.recovery.resume import repeat_steps, steps_since
from learner.recovery.step_log import LoggedStep, PartLog, StepLog
from learner.training.checkpoint import newest_checkpoint
from tests.learner.builders import make_episode, make_trajectory, so_far
from tools.recompute.command import Rebuilt

SETTINGS = [
    *["groups.size=2", "groups.min_size=2", "learner.lr=1e-3", "learner.precision=fp32"],
    *["learner.layout=padded", "learner.attention=products"],
    *["learner.num_threads=1", "learner.max_tokens_per_microbatch=64"],
    *["learner.controller.skip_step=false"],
]
FILE_BYTES = 1500  # some two episodes


def config(*overrides: str) -> RunConfig:
    """Return a configuration; overrides come before the settings."""
    given = [override.partition("=")[0] for override in overrides]
    settings = [each for each in SETTINGS if each.partition("=")[0] not in given]
    return load_config("smoke", [*settings, *overrides])


def batch_of(number: int, version: int, *, is_nan: bool = False) -> list[Group]:
    """Return a batch: of two groups, or one if its number is even, of ragged lengths."""
    rng = np.random.default_rng(number)
    groups: list[Group] = []
    for each in range(2 - number % 2):
        group_id = f"g{2 * number + each:07d}"
        members = [_episode(rng, group_id, member, version) for member in range(2)]
        if is_nan:
            members[0].logprobs[members[0].loss_mask] = float("nan")
        groups.append(Group(group_id=group_id, members=members))
    return groups


def _episode(rng: np.random.Generator, group_id: str, member: int, version: int) -> Trajectory:
    length = int(rng.integers(8, 20))
    return make_trajectory(
        rng.integers(4, 400, size=length).tolist(),
        [0, 0, *[1] * (length - 2)],
        logprobs=(-6.0 + 0.3 * rng.standard_normal(length - 2)).tolist(),
        version=version,
        group_id=group_id,
        member=member,
        reward=float(member),
    )


LONG = make_episode([0, 0, 1, 1], name="g0000900")


def part_of_episode(*, is_early: bool) -> Group:
    """Return the first two turns of an episode, or its other turns."""
    part = part_of(so_far(LONG, 2), 0) if is_early else part_of(LONG, 2)
    return Group(group_id=part.group_id, members=[part], is_early=is_early)


def live(
    root: Path,
    cfg: RunConfig,
    batches: Iterable[int],
    *,
    skipped: Collection[int] = (),
    nan: Collection[int] = (),
    saved: Collection[int] = (),
    early: Collection[int] = (),
    late: Collection[int] = (),
) -> RunDir:
    """Go on with a run, or begin it, as a learner does, and end without a word.

    Args:
        batches: numbers of those to be consumed.
        skipped: of them, those that are skipped.
        nan: of them, those that hold a number that is none.
        saved: after which of them there is a checkpoint.
        early: those that train the first turns of an episode that has not ended.
        late: those that train its other turns.
    """
    run_dir = RunDir(root=root)
    root.mkdir(exist_ok=True)
    save_config(cfg, run_dir.config)
    rebuilt = Rebuilt(cfg, newest_checkpoint(run_dir.checkpoints))
    trainer, version = rebuilt.trainer, rebuilt.version
    with (
        closing(rebuilt),
        closing(JournalWriter(run_dir.journal, max_file_bytes=FILE_BYTES)) as journal,
        closing(StepLog(run_dir.steps)) as step_log,
        closing(PartLog(run_dir.parts)) as part_log,
        closing(ChecksumLog(run_dir.checksums, version=version)) as checksums,
        closing(MetricsWriter(run_dir, [], resumed_at_step=version or -1)) as metrics,
    ):
        checksums.begin(start_of(cfg, run_dir, trainer, version=version))
        start = ReplayPoint()
        steps = steps_since(run_dir, start=start, version=version, num_batches=trainer.num_batches)
        repeat_steps(
            cfg.algorithm,
            run_dir,
            trainer,
            steps,
            start=start,
            metrics=metrics,
            checksums=checksums,
            rewards={},
        )
        version = steps[-1].version if steps else version
        for number in batches:
            groups = batch_of(number, version, is_nan=number in nan)
            members = [member for group in groups for member in group.members]
            for member in members:
                journal.append(member)
            if number in early:
                groups.append(part_of_episode(is_early=True))
                part_log.append(groups[-1].members)
            if number in late:
                journal.append(LONG)
                groups.append(part_of_episode(is_early=False))
            journal.sync()
            is_skipped = number in skipped
            samples = samples_of(groups, cfg.algorithm, trainer.baseline)
            trainer.train_on(samples, version=version, must_skip=is_skipped)
            version += not is_skipped
            outcome = Outcome.STALE if is_skipped else Outcome.TRAINED
            step = LoggedStep(
                version=version,
                groups=[group.names for group in groups],
                outcomes=[
                    EpisodeOutcome(episode_id=member.episode_id, outcome=outcome, cause="")
                    for member in members
                ],
                is_skipped=is_skipped,
                number=trainer.num_batches,
                journal_file=journal.position.file,
            )
            step_log.append(step)
            assert trainer.digests is not None
            checksums.log(step, trainer.digests)
            if number in saved:
                rebuilt.save(run_dir.checkpoints, version)
    torch.set_num_threads(1)
    return run_dir
