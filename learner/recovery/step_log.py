"""Which episodes each step consumed: with the journal, enough to redo steps after a checkpoint.

A step is written here after it is computed and before anybody sees its weights; so is a batch that
the controller skipped, before anybody is told. A learner that dies restores its checkpoint, repeats
what is logged since from the journal, and is where it was: no episode is lost, none is trained
twice, and the weights are the same.
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

LOOK_BYTES = 16 << 20
LOOK_FACTOR = 1.25  # by which a log grows from one look for what may go to the next
PRUNED = b'{"pruned":'
REMEDY = "restore it from a backup; without it the run cannot know what it has trained on"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """One step's batch and everything decided with it."""

    version: int  # after the step; of a skipped batch that of the weights, which stay
    groups: list[list[str]]  # episode ids, in the order they were trained on
    outcomes: list[EpisodeOutcome]
    is_skipped: bool = False  # by the controller: nothing was learnt
    number: int = 0  # of batches decided on, this one included; 0: from a version without numbers
    segment: int = -1  # of the journal, the newest when this was logged; -1: not told
    offset: int = field(default=0, compare=False)  # where its line begins, in bytes

    @property
    def consumed_by(self) -> int:
        """The first version whose checkpoint has this batch behind it for certain."""
        return self.version + self.is_skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedSteps:
    """The first lines of a log, that are gone; offsets count them still."""

    num_bytes: int = 0
    version: int = 0  # of the last of them
    number: int = 0  # as well


class StepLog:
    """JSON lines, one per step, synced to disk. A torn last line is cut off on opening.

    Example: closed groups, old checkpoints -> `first_needed` moves on, and a restart need not read
    the lines before it. The journal lost what they consumed -> `prune` removes them, and a first
    line says so.
    """

    def __init__(self, path: Path, *, start: int = 0, look_bytes: int = LOOK_BYTES) -> None:
        """Open a log at its end.

        Args:
            start: offset of the first line that may be needed.
            look_bytes: `prune` leaves a smaller log alone.

        Raises: ConfigError: it is damaged; names file and line.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = AppendFile(path)
        self._lines: deque[tuple[int, int, int]] = deque()  # offset, version, highest group number
        self._least_bytes = self._look_bytes = look_bytes
        try:
            self._file.truncate(whole_bytes(path))
            self.pruned, self._shift = _pruned_of(path)
            for step in read_steps(path, start=start):
                self._note(step, step.offset)
        except ConfigError:
            self._file.close()
            raise

    def append(self, step: LoggedStep, *, check: Callable[[], object] = lambda: None) -> None:
        """Write a step and return when it is on disk; wait while that is full.

        Args:
            check: called while it waits; ends that by raising, and the step is not logged.
        """
        line, size = _line(step), self._file.size

        def write() -> None:
            self._file.append([line])
            try:
                self._file.sync()
            except OSError:
                self._file.truncate(size)
                raise

        with_room(write, self._file.path, check=check)
        self._note(step, size + self._shift)

    def first_needed(self, *, version: int, closed_below: int) -> int:
        """Return the offset of the first line that a restart needs, and forget those before.

        Args:
            version: of the oldest checkpoint that may be restored.
            closed_below: training groups of smaller numbers are settled for good.
        """
        while self._lines and self._lines[0][1] <= version and self._lines[0][2] < closed_below:
            self._lines.popleft()
        return self._lines[0][0] if self._lines else self._file.size + self._shift

    def prune(self, *, before: int, needed: int) -> bool:
        """Remove the first lines whose episodes the journal has lost, once the log has grown.

        Args:
            before: segments of smaller numbers were pruned.
            needed: offset of the first line that a restart reads, as it is told on disk.

        Returns: whether any are gone.

        Raises: OSError: the log is as it was.
        """
        if not before or self._file.size < self._look_bytes:
            return False
        path, may_go, gone = self._file.path, None, PrunedSteps()
        for step in read_steps(path):
            if may_go is not None:
                version, number = may_go.version, may_go.number
                gone = PrunedSteps(num_bytes=step.offset, version=version, number=number)
            if step.offset >= needed or step.segment >= before:
                break
            may_go = step if step.segment >= 0 else None
        if gone.num_bytes:
            head = json.dumps({"pruned": asdict(gone)}).encode() + b"\n"
            cut_head(path, gone.num_bytes - self._shift, head=head)
            self._file.close()
            self._file = AppendFile(path)
            self.pruned, self._shift = _pruned_of(path)
        self._look_bytes = max(self._least_bytes, int(self._file.size * LOOK_FACTOR))
        return gone.num_bytes > 0

    def close(self) -> None:
        self._file.close()

    def _note(self, step: LoggedStep, offset: int) -> None:
        names = [o.episode_id for o in step.outcomes]
        numbers = [training_number(name) or 0 for name in names]
        self._lines.append((offset, step.consumed_by, max(numbers, default=0)))


def _line(step: LoggedStep) -> bytes:
    outcomes = [[o.episode_id, o.outcome.value, o.cause] for o in step.outcomes]
    plain = {"version": step.version, "groups": step.groups, "outcomes": outcomes}
    plain |= {"number": step.number} if step.number else {}
    plain |= {"skipped": True} if step.is_skipped else {}
    plain |= {"segment": step.segment} if step.segment >= 0 else {}
    return json.dumps(plain, separators=(",", ":")).encode() + b"\n"


def read_steps(path: Path, *, start: int = 0) -> Iterator[LoggedStep]:
    """Yield the steps of a log in order, from the line at an offset on; 0: the first that is left.

    Raises: ConfigError: a line is damaged, was pruned, or the file ends before `start`; names file
        and line.
    """
    pruned, shift = _pruned_of(path)
    with path.open("rb") as handle:
        if path.stat().st_size + shift < start:
            raise ConfigError(f"{path}: damaged, it ends before byte {start}; {REMEDY}")
        if 0 < start < pruned.num_bytes:
            raise ConfigError(f"{path}: steps up to {pruned.version} were pruned; {REMEDY}")
        offset = max(start, pruned.num_bytes)
        handle.seek(offset - shift)
        for number, line in enumerate(handle, 1):
            if line.endswith(b"\n"):
                try:
                    yield _parse(json.loads(line), offset)
                except (ValueError, TypeError, KeyError) as error:
                    where = f"line {number}" + (f" behind byte {start}" if start else "")
                    raise ConfigError(
                        f"{path}: {where} is damaged ({error!r}); {REMEDY}"
                    ) from error
            offset += len(line)


def _parse(plain: dict[str, Any], offset: int) -> LoggedStep:
    groups, version = plain["groups"], plain["version"]
    is_right = isinstance(version, int) and isinstance(groups, list)
    if not is_right or not all(isinstance(name, str) for ids in groups for name in ids):
        raise ValueError("no version and episode ids")
    return LoggedStep(
        version=version,
        groups=groups,
        outcomes=[
            EpisodeOutcome(episode_id=name, outcome=Outcome(outcome), cause=cause)
            for name, outcome, cause in plain["outcomes"]
        ],
        is_skipped=plain.get("skipped", False),
        number=plain.get("number", 0),
        segment=plain.get("segment", -1),
        offset=offset,
    )


def load_pruned_steps(path: Path) -> PrunedSteps:
    """Return which steps are gone from a log. Raises: ConfigError: its first line is damaged."""
    return _pruned_of(path)[0]


def _pruned_of(path: Path) -> tuple[PrunedSteps, int]:
    """Return what is gone, and what to add to a place in the file for its offset."""
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
    """Return how long the file is without what follows its last newline."""
    size = path.stat().st_size
    with path.open("rb") as handle:
        for end in range(size, 0, -4096):
            handle.seek(max(0, end - 4096))
            found = handle.read(end - max(0, end - 4096)).rfind(b"\n")
            if found >= 0:
                return max(0, end - 4096) + found + 1
    return 0
