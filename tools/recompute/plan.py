"""Determines the logged batches to recompute, and the checkpoint to start from."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError
from common.store.run_dir import RunDir
from common.wire.messages import Trajectory
from learner.ingest.journal_index import load_replay_point
from learner.journal.journal import JournalPosition, journal_files, load_pruned, read_around_damage
from learner.recovery.checksums import ChecksumRecord, Start, read_checksums
from learner.recovery.resume import with_parts
from learner.recovery.step_log import LoggedStep, PartName, each_part, load_pruned_steps, read_steps
from learner.training.checkpoint import complete_checkpoints, load_values


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The batches to recompute, and the data that this needs."""

    run_dir: RunDir
    record: ChecksumRecord
    checkpoint: Path | None  # The checkpoint to start from; None: the initial weights of the run.
    version: int  # Version of the weights to start from.
    first: int  # First requested step. Earlier ones are computed only to reach it.
    steps: list[LoggedStep]  # In order, with skipped batches.

    @property
    def last(self) -> int:
        return max(step.version for step in self.steps)

    @property
    def origin(self) -> str:
        """Return a description of the starting weights."""
        return "the initial weights" if self.checkpoint is None else str(self.checkpoint)

    def start_of(self, step: LoggedStep) -> Start:
        """Return the start of the learner that last computed a batch.

        For a batch without a checksum it is the last start before the batch.
        """
        line = self.record.lines.get((step.version, step.number))
        if line is not None:
            return self.record.starts[line.start]
        return next(each for each in reversed(self.record.starts) if each.number < step.number)


def make_plan(run_dir: RunDir, steps: str | None) -> Plan:
    """Return the plan for a range of steps "a:b", both included; None is all.

    Raises: ConfigError: the range does not exist, or its data was pruned; names the available
        steps.
    """
    if not run_dir.steps.is_file():
        raise ConfigError(f"{run_dir.root}: the run has no step log ({run_dir.steps})")
    logged = list(read_steps(run_dir.steps))
    record = read_checksums(run_dir.checksums)
    last_logged = max((step.version for step in logged), default=0)
    if not last_logged:
        raise ConfigError(f"{run_dir.root}: the run has not logged a step yet")
    first, last = _range(steps, last_logged)
    begins = [(0, None), *complete_checkpoints(run_dir.checkpoints)]
    version, folder = [each for each in begins if each[0] < first][-1]
    following = _following(logged, version, folder)
    plan = Plan(
        run_dir=run_dir,
        record=record,
        checkpoint=folder,
        version=version,
        first=first,
        steps=[step for step in following if step.consumed_by <= last or last == last_logged],
    )
    _check_recorded(plan)
    _check_kept(plan, [version for version, _ in begins if version < last_logged], last_logged)
    return plan


def _range(steps: str | None, last_logged: int) -> tuple[int, int]:
    """Return the first and the last step of an option. Raises: ConfigError."""
    match = re.fullmatch(r"(\d*):(\d*)|(\d+)", steps or ":")
    if match is None:
        raise ConfigError(f"--steps={steps}: expects a:b, the first and the last step")
    only = match[3]
    first = int(only or match[1] or 1)
    last = int(only or match[2] or last_logged)
    if not 1 <= first <= last <= last_logged:
        raise ConfigError(f"--steps={steps}: the run has steps 1 to {last_logged} so far")
    return first, last


def _following(logged: list[LoggedStep], version: int, folder: Path | None) -> list[LoggedStep]:
    """Return the batches that are not in a checkpoint."""
    number = 0 if folder is None else load_values(folder).get("num_batches", 0)
    if number and all(step.number for step in logged if step.version > version):
        return [step for step in logged if step.number > number]
    return [step for step in logged if step.consumed_by > version]


def _check_recorded(plan: Plan) -> None:
    """Check that the settings of all batches are recorded. Raises: ConfigError: they are not."""
    starts = plan.record.starts
    run_dir = plan.run_dir
    if not starts:
        raise ConfigError(
            f"{run_dir.root}: {run_dir.checksums.name} is missing, so the settings of its steps"
            " are unknown. An older version of the product made the run, or it has not finished a"
            " step yet."
        )
    first = min(start.version for start in starts)
    if plan.version < first:
        raise ConfigError(
            f"{run_dir.root}: an older version of the product computed steps 1 to {first} and did"
            f" not record their settings. If the checkpoint of step {first} still exists, use"
            f" --steps={first + 1}:."
        )


def _check_kept(plan: Plan, versions: list[int], last_logged: int) -> None:
    """Check that the journal has the plan's episodes. Raises: ConfigError: they were pruned."""
    folder = plan.run_dir.journal
    pruned = load_pruned(folder)
    gone = load_pruned_steps(plan.run_dir.steps)
    if plan.version < gone.version:
        raise ConfigError(
            f"--steps={plan.first}:{plan.last}: steps {plan.version + 1} to {gone.version} are no"
            f" longer in {plan.run_dir.steps}, since {pruned.text(folder)}."
            f" {_later(versions, gone.version, last_logged)}"
        )
    if not pruned.before:
        return
    wanted = {name for step in plan.steps for ids in step.groups for name in ids}
    left = JournalEpisodes(plan.run_dir, wanted).names()
    left |= {name for name in wanted if PartName.parse(name).is_early}  # `take` reads their log.
    lost = [s for s in plan.steps if not left.issuperset(n for ids in s.groups for n in ids)]
    if not lost:
        return
    names = (name for ids in lost[-1].groups for name in ids if name not in left)
    hint = _later(versions, lost[-1].consumed_by, last_logged)
    raise ConfigError(
        f"--steps={plan.first}:{plan.last}: steps {lost[0].version} to {lost[-1].version} trained"
        f" on episodes that are no longer in the journal, such as {next(names)}:"
        f" {pruned.text(folder)}. {hint}"
    )


def _later(versions: list[int], gone: int, last_logged: int) -> str:
    """Return a hint with the steps that the remaining checkpoints can still recompute."""
    later = [version for version in versions if version >= gone]
    which = f"--steps={later[0] + 1}:{last_logged}" if later else "No later range"
    return f"{which} can be recomputed from the remaining checkpoints."


class EpisodesMissing(Exception):
    """A step consumed episodes that cannot be read."""

    def __init__(self, step: LoggedStep, names: list[str], damage: list[str]) -> None:
        """Name the episodes, and the damaged parts of the journal."""
        where = "; ".join(damage[:3]) or "not found in the journal"
        super().__init__(f"episode {', '.join(names[:3])}: {where}")
        self.step = step


class JournalEpisodes:
    """The episodes of logged batches. They are read from the journal on demand.

    Damaged records are skipped: they matter only to the step that consumed them.
    """

    def __init__(
        self, run_dir: RunDir, wanted: Collection[str], start: JournalPosition | None = None
    ) -> None:
        """Begin at a position; None is the first available record."""
        self._run_dir = run_dir
        self._folder = run_dir.journal
        self._names: dict[str, list[str]] = {}  # Episode id -> its names in the step log.
        for name in sorted(wanted):
            self._names.setdefault(PartName.parse(name).episode_id, []).append(name)
        self._start = start
        self._held: dict[str, Trajectory] = {}
        self.damage: list[str] = []  # Descriptions of the damage found so far.
        self._rest = self._read()
        early = {name for name in wanted if PartName.parse(name).is_early}
        self._parts = each_part(run_dir.parts, early)

    def take(self, step: LoggedStep) -> dict[str, Trajectory]:
        """Return the episodes of a batch by id, once. Raises: EpisodesMissing."""
        names = [name for ids in step.groups for name in ids]
        early = {name for name in names if PartName.parse(name).is_early}
        # Steps log their parts in order. Those of each are read once.
        while early - self._held.keys() and (part := next(self._parts, None)) is not None:
            self._held |= [part]
        missing = set(names) - self._held.keys()
        while missing - early and (record := next(self._rest, None)) is not None:
            episodes = with_parts(
                {record.episode_id: record},
                [n for n in self._names[record.episode_id] if not PartName.parse(n).is_early],
                self._run_dir,
            )
            self._held |= episodes
            missing -= episodes.keys()
        if missing:
            # The journal may have been pruned since the plan was made.
            pruned = load_pruned(self._folder)
            damage = [pruned.text(self._folder)] if pruned.before else self.damage
            raise EpisodesMissing(step, sorted(missing), damage)
        return {name: self._held.pop(name) for name in names}

    def names(self) -> set[str]:
        """Return the wanted ids that the journal holds. This reads all of the journal."""
        return {name for each in self._rest for name in self._names[each.episode_id]}

    def _read(self) -> Iterator[Trajectory]:
        """Yield the trajectories of the journal, and keep the texts of damaged parts."""
        numbers = list(journal_files(self._folder))
        start = self._start or JournalPosition()
        for number in numbers:
            if number < start.file:
                continue
            offset = start.offset if number == start.file else 0
            is_last = number == numbers[-1]
            for record in read_around_damage(self._folder, number, is_last=is_last, offset=offset):
                if isinstance(record, str):
                    self.damage.append(record)
                elif record.episode_id in self._names:
                    yield record


def episodes_of(plan: Plan) -> JournalEpisodes:
    """Return the reader of a plan's episodes, from the replay point of its checkpoint on."""
    start = None
    if plan.checkpoint is not None:
        start = load_replay_point(plan.run_dir.replay_point, version=plan.version).position
    wanted = {name for step in plan.steps for ids in step.groups for name in ids}
    return JournalEpisodes(plan.run_dir, wanted, start)
