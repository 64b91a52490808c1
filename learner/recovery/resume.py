"""Restores a learner to the state of the previous process, from the step log and the journal."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from common.config.algorithm import AlgorithmSection
from common.errors import ConfigError, LongstrideError
from common.ids import is_below, split_episode_id
from common.segments import part_of
from common.store.run_dir import RunDir
from common.wire.messages import EpisodeKind, Trajectory
from learner.ingest.buffer import Group, TrajectoryBuffer
from learner.ingest.journal_index import ReplayPoint
from learner.journal.journal import read_journal
from learner.journal.metrics import BEFORE_FIRST_STEP, MetricsWriter, iter_metrics
from learner.objective.advantages import samples_of
from learner.recovery.checksums import ChecksumLog
from learner.recovery.reward_log import GroupReward, rewarded
from learner.recovery.step_log import REMEDY, LoggedStep, PartName, each_part, read_steps
from learner.teacher.scores import TeacherScores
from learner.training.trainer import Trainer, TrainResult

logger = logging.getLogger(__name__)

ScoreMembers = Callable[[Sequence[Trajectory]], list[TeacherScores]]


def last_logged(run_dir: RunDir, stands_at: int) -> int:
    """Return the last step whose metrics are valid. `stands_at`: the version after resuming."""
    steps = (
        step for line, _ in iter_metrics(run_dir.metrics) if (step := line["step"]) is not None
    )
    return max((int(step) for step in steps if step <= stands_at), default=BEFORE_FIRST_STEP)


def steps_since(
    run_dir: RunDir, *, start: ReplayPoint, version: int, num_batches: int
) -> list[LoggedStep]:
    """Return the logged batches that the checkpoint does not contain, trained or skipped, in order.

    Args:
        version: of the checkpoint, 0 for none.
        num_batches: before the checkpoint; 0: the checkpoint is from a release that did not count
            them.

    Raises: ConfigError: the log is damaged, or lacks steps that the checkpoint has; names the file.
    """
    logged = list(read_steps(run_dir.steps, start=start.steps_offset))
    last = max((step.version for step in logged), default=0)
    if start.steps_offset == 0 and last < version:
        raise ConfigError(
            f"{run_dir.steps}: damaged, its last step is {last}, but the newest checkpoint is of"
            f" step {version}; {REMEDY}"
        )
    if num_batches and all(step.number for step in logged if step.version > version):
        return [step for step in logged if step.number > num_batches]
    return [step for step in logged if step.consumed_by > version]


def num_last_skipped(run_dir: RunDir, *, start: ReplayPoint) -> int:
    """Return the number of batches that were skipped after the last logged step."""
    num_skipped = 0
    for step in read_steps(run_dir.steps, start=start.steps_offset):
        num_skipped = num_skipped + 1 if step.is_skipped else 0
    return num_skipped


def _episodes_of(
    steps: list[LoggedStep], run_dir: RunDir, start: ReplayPoint
) -> dict[str, Trajectory]:
    """Return the episodes and parts that these steps trained on or skipped, by logged name."""
    wanted = {name: step.version for step in steps for ids in step.groups for name in ids}
    if not wanted:
        return {}
    ids = {PartName.parse(name).episode_id for name in wanted}
    journal = read_journal(run_dir.journal, start=start.position)
    episodes = {t.episode_id: t for _, t in journal if t.episode_id in ids}
    logged = with_parts(episodes, wanted, run_dir)
    for name, version in wanted.items():
        if name not in logged:
            raise LongstrideError(
                f"{run_dir.journal}: episode {name} is missing after {start.position}, but step"
                f" {version} trained on it. Restore the journal from a backup."
            )
    return logged


def with_parts(
    episodes: Mapping[str, Trajectory], names: Collection[str], run_dir: RunDir
) -> dict[str, Trajectory]:
    """Return the episodes and parts with these names in the step log, as far as they exist.

    Args:
        episodes: whole episodes by id.

    Raises: ConfigError: the log of parts is damaged.
    """
    parts = {name: PartName.parse(name) for name in names}
    early = [name for name, part in parts.items() if part.is_early]
    trained = dict(each_part(run_dir.parts, early))
    for name, part in parts.items():
        if not part.is_early and part.episode_id in episodes:
            trained[name] = part_of(episodes[part.episode_id], part.first_turn)
    return trained


def repeat_steps(
    algorithm: AlgorithmSection,
    run_dir: RunDir,
    trainer: Trainer,
    steps: list[LoggedStep],
    *,
    start: ReplayPoint,
    metrics: MetricsWriter,
    checksums: ChecksumLog | None = None,
    rewards: Mapping[str, GroupReward],
    score: ScoreMembers | None = None,
    after_step: Callable[[int], None] | None = None,
) -> None:
    """Train again on the logged batches that no checkpoint contains.

    Skipped batches are skipped again.

    A step without a metrics line gets one with the training metrics alone. `checksums`, if given,
    logs a warning if a repeated batch differs from its first computation. `rewards` are the logged
    rewards over groups, which replace those of the environment. `score` returns the
    scores of a teacher, which are not kept: they are asked for again. `after_step`, if given,
    receives the version of a repeated step; it may save a checkpoint.

    Raises:
        LongstrideError: the journal does not hold an episode that is needed.
    """
    episodes = _episodes_of(steps, run_dir, start)
    for step in steps:
        groups = groups_of(step, episodes, rewards)
        if score is not None:
            groups = [_scored(group, score) for group in groups]
        result = redo(trainer, step, groups, algorithm)
        if checksums is not None and trainer.digests is not None:
            checksums.log(step, trainer.digests, is_repeated=True)
        if step.is_skipped:
            continue
        if step.version > metrics.last_step:
            metrics.log(step.version, result.metrics)
        logger.info("repeated step=%d groups=%d", step.version, len(step.groups))
        if after_step is not None:
            after_step(step.version)


def _scored(group: Group, score: ScoreMembers) -> Group:
    ids = [each.episode_id for each in group.members]
    return replace(group, scores=dict(zip(ids, score(group.members), strict=True)))


def groups_of(
    step: LoggedStep, episodes: Mapping[str, Trajectory], rewards: Mapping[str, GroupReward]
) -> list[Group]:
    """Return the groups of a logged batch, in its order, with the rewards that it trained on."""
    return [
        Group(
            group_id=split_episode_id(PartName.parse(ids[0]).episode_id)[0],
            members=[rewarded(episodes[name], rewards) for name in ids],
        )
        for ids in step.groups
    ]


def redo(
    trainer: Trainer, step: LoggedStep, groups: list[Group], algorithm: AlgorithmSection
) -> TrainResult:
    """Train on a logged batch with the recorded decision: a skipped batch is skipped again."""
    samples = samples_of(groups, algorithm, trainer.baseline)
    if step.is_skipped:
        return trainer.train_on(samples, version=step.version, must_skip=True)
    return trainer.train_on(samples, version=step.version - 1, must_train=True)


def readopt(buffer: TrajectoryBuffer, run_dir: RunDir, start: ReplayPoint) -> None:
    """Report the journal's episodes again, and add those that no step consumed to their groups.

    Episodes before the replay point are settled. So are those of groups that were closed by then.
    """
    consumed: dict[str, int] = {}
    for step in read_steps(run_dir.steps, start=start.steps_offset):
        is_in_checkpoints = step.consumed_by <= start.version
        outcomes = [o for o in step.outcomes if not is_below(o.episode_id, start.closed_below)]
        consumed |= {
            o.episode_id: step.consumed_by
            for o in (outcomes if is_in_checkpoints else step.outcomes)
        }
        buffer.report(outcomes)
        if not step.is_skipped:
            buffer.adopt_parts(step.groups)
    num_episodes = num_open = 0
    for position, trajectory in read_journal(run_dir.journal, start=start.position):
        step = consumed.get(trajectory.episode_id)
        is_closed = buffer.adopt(trajectory, position, step=step)
        num_episodes += 1
        num_open += trajectory.kind is EpisodeKind.TRAIN and step is None and not is_closed
    if num_episodes:
        logger.info(
            "read journal from=%s episodes=%d not_consumed=%d",
            start.position,
            num_episodes,
            num_open,
        )
