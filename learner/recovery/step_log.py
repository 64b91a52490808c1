"""The step log: the episodes that each step consumed, to repeat the steps after a checkpoint.

A step is logged after it is computed and before its weights are published. A batch that the
controller skipped is logged before it is reported. A restarted learner restores its checkpoint and
repeats the logged steps with episodes from the journal. It then has the same weights as before: no
episode is lost, and none is trained on twice.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.ids import training_number
from common.store.disk import AppendFile, with_room
from common.store.run_dir import cut_head
from common.wire.messages import EpisodeOutcome, Outcome

PRUNE_FROM_BYTES = 16 << 20
PRUNE_GROWTH = 1.25  # A pruned log must grow by this factor before it is examined again.
PRUNED = b'{"pruned":'
REMEDY = "restore it from a backup; only this file lists the batches that the run has trained on"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """The batch of one step and all decisions about it."""

    # Version after the step; for a skipped batch the version of the unchanged weights.
    version: int
    groups: list[list[str]]  # Episodes and parts as `PartName` writes them, in training order.
    outcomes: list[EpisodeOutcome]
    is_skipped: bool = False  # The controller skipped the batch; the weights did not change.
    # Number of batches so far, with this one; 0: logged by a release without numbers.
    number: int = 0
    journal_file: int = (
        -1
    )  # Number of the journal's newest file at the time of logging; -1: unknown.
    offset: int = field(default=0, compare=False)  # Byte offset of the line.

    @property
    def consumed_by(self) -> int:
        """The first version whose checkpoint certainly contains this batch."""
        return self.version + self.is_skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedSteps:
    """The pruned first lines of a log. Offsets still count their bytes."""

    num_bytes: int = 0
    version: int = 0  # Version of the last pruned line.
    number: int = 0  # Batch number of the last pruned line.


class StepLog:
    """A log of JSON lines, one per step, synced to disk. Opening it removes a torn last line.

    Example: once groups are closed and old checkpoints are deleted, `first_needed` increases, and a
    restart does not read the lines before it. Once the journal has pruned the episodes of these
    lines, `prune` removes the lines, and a new first line records this.
    """

    def __init__(
        self, path: Path, *, start: int = 0, prune_from_bytes: int = PRUNE_FROM_BYTES
    ) -> None:
        """Open a log for appending.

        Args:
            start: offset of the first line that may be needed.
            prune_from_bytes: `prune` ignores a log smaller than this.

        Raises: ConfigError: it is damaged; names file and line.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = AppendFile(path)
        # Tuples of offset, version and highest group number.
        self._lines: deque[tuple[int, int, int]] = deque()
        self._least_bytes = self._prune_bytes = prune_from_bytes
        try:
            self._file.truncate(whole_bytes(path))
            self.pruned, self._shift = _pruned_of(path)
            for step in read_steps(path, start=start):
                self._note(step, step.offset)
        except ConfigError:
            self._file.close()
            raise

    def append(self, step: LoggedStep, *, check: Callable[[], object] = lambda: None) -> None:
        """Write a step and return once it is synced to disk. If the disk is full, wait for room.

        Args:
            check: called during the wait; ends it by raising, and then the step is not logged.
        """
        line = _line(step)
        size = self._file.size

        def write() -> None:
            """Append the line and sync it; after a failure, remove it again."""
            self._file.append([line])
            try:
                self._file.sync()
            except OSError:
                self._file.truncate(size)
                raise

        with_room(write, self._file.path, check=check)
        self._note(step, size + self._shift)

    def first_needed(self, *, version: int, closed_below: int) -> int:
        """Return the offset of the first line that a restart needs. Drop earlier lines from memory.

        Args:
            version: of the oldest checkpoint that may be restored.
            closed_below: training groups with smaller numbers are settled for good.
        """
        while self._lines and self._lines[0][1] <= version and self._lines[0][2] < closed_below:
            self._lines.popleft()
        return self._lines[0][0] if self._lines else self._file.size + self._shift

    def prune(self, *, before: int, needed: int) -> bool:
        """Remove the first lines whose episodes the journal has pruned, if the log is large enough.

        Args:
            before: files of smaller numbers were pruned.
            needed: offset of the first line that a restart reads, as in the saved replay point.

        Returns: whether lines were removed.

        Raises: OSError: the log could not be rewritten; it is unchanged.
        """
        if not before or self._file.size < self._prune_bytes:
            return False
        path = self._file.path
        may_go = None
        gone = PrunedSteps()
        for step in read_steps(path):
            if may_go is not None:
                version = may_go.version
                number = may_go.number
                gone = PrunedSteps(num_bytes=step.offset, version=version, number=number)
            if step.offset >= needed or step.journal_file >= before:
                break
            may_go = step if step.journal_file >= 0 else None
        if gone.num_bytes:
            head = json.dumps({"pruned": asdict(gone)}).encode() + b"\n"
            cut_head(path, gone.num_bytes - self._shift, head=head)
            self._file.close()
            self._file = AppendFile(path)
            self.pruned, self._shift = _pruned_of(path)
        self._prune_bytes = max(self._least_bytes, int(self._file.size * PRUNE_GROWTH))
        return gone.num_bytes > 0

    def close(self) -> None:
        self._file.close()

    def _note(self, step: LoggedStep, offset: int) -> None:
        """Keep the position of a line, with the data that decides when it may be pruned."""
        names = [o.episode_id for o in step.outcomes]
        names += [name for ids in step.groups for name in ids]
        numbers = [training_number(name) or 0 for name in names]
        self._lines.append((offset, step.consumed_by, max(numbers, default=0)))


def _line(step: LoggedStep) -> bytes:
    """Return a step as a line of the log."""
    outcomes = [[o.episode_id, o.outcome.value, o.cause] for o in step.outcomes]
    plain = {"version": step.version, "groups": step.groups, "outcomes": outcomes}
    stale = {o.episode_id: o.num_stale_tokens for o in step.outcomes if o.num_stale_tokens}
    plain |= {"stale_tokens": stale} if stale else {}
    plain |= {"number": step.number} if step.number else {}
    plain |= {"skipped": True} if step.is_skipped else {}
    plain |= {"segment": step.journal_file} if step.journal_file >= 0 else {}
    return json.dumps(plain, separators=(",", ":")).encode() + b"\n"


def read_steps(path: Path, *, start: int = 0) -> Iterator[LoggedStep]:
    """Yield the steps of a log in order, from an offset on; 0: from the first line left.

    Raises: ConfigError: a line is damaged, was pruned, or the file ends before `start`; names file
        and line.
    """
    pruned, shift = _pruned_of(path)
    with path.open("rb") as handle:
        if path.stat().st_size + shift < start:
            raise ConfigError(f"{path}: damaged, the file ends before byte {start}; {REMEDY}")
        if 0 < start < pruned.num_bytes:
            raise ConfigError(
                f"{path}: steps up to {pruned.version} were pruned, but a restart from byte"
                f" {start} needs them; {REMEDY}"
            )
        offset = max(start, pruned.num_bytes)
        handle.seek(offset - shift)
        for number, line in enumerate(handle, 1):
            if line.endswith(b"\n"):
                try:
                    yield _parse(json.loads(line), offset)
                except (ValueError, TypeError, KeyError) as error:
                    where = f"line {number}" + (f" after byte {start}" if start else "")
                    raise ConfigError(
                        f"{path}: {where} is damaged ({error!r}); {REMEDY}"
                    ) from error
            offset += len(line)


def _parse(plain: dict[str, Any], offset: int) -> LoggedStep:
    """Return the step of a line. Raises: ValueError: the line is malformed."""
    groups = plain["groups"]
    version = plain["version"]
    is_right = isinstance(version, int) and isinstance(groups, list)
    if not is_right or not all(isinstance(name, str) for ids in groups for name in ids):
        raise ValueError("the line has no version or no episode ids")
    stale: dict[str, int] = plain.get("stale_tokens", {})
    return LoggedStep(
        version=version,
        groups=groups,
        outcomes=[
            EpisodeOutcome(
                episode_id=name,
                outcome=Outcome(outcome),
                cause=cause,
                num_stale_tokens=stale.get(name, 0),
            )
            for name, outcome, cause in plain["outcomes"]
        ],
        is_skipped=plain.get("skipped", False),
        number=plain.get("number", 0),
        journal_file=plain.get("segment", -1),
        offset=offset,
    )


def load_pruned_steps(path: Path) -> PrunedSteps:
    """Return the pruned part of a log. Raises: ConfigError: its first line is damaged."""
    return _pruned_of(path)[0]


def _pruned_of(path: Path) -> tuple[PrunedSteps, int]:
    """Return the pruned part, and the difference between an offset and the position in the file."""
    with path.open("rb") as handle:
        first = handle.readline()
    if not first.startswith(PRUNED) or not first.endswith(b"\n"):
        return PrunedSteps(), 0
    try:
        pruned = PrunedSteps(**json.loads(first)["pruned"])
        return pruned, pruned.num_bytes - len(first)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: line 1 is damaged ({error!r}); {REMEDY}") from error


def whole_bytes(path: Path) -> int:
    """Return the size of the file up to and including its last newline."""
    size = path.stat().st_size
    with path.open("rb") as handle:
        for end in range(size, 0, -4096):
            handle.seek(max(0, end - 4096))
            newline = handle.read(end - max(0, end - 4096)).rfind(b"\n")
            if newline >= 0:
                return max(0, end - 4096) + newline + 1
    return 0
