"""Which episodes each step consumed: with the journal, enough to redo steps after a checkpoint.

A step is written here after it is computed and before anybody sees its weights; so is a batch that
the controller skipped, before anybody is told. A learner that dies restores its checkpoint, repeats
what is logged since from the journal, and is where it was: no episode is lost, none is trained
twice, and the weights are the same.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.store.disk import AppendFile, with_room
from common.wire.ids import training_number
from common.wire.messages import EpisodeOutcome, Outcome

REMEDY = "restore it from a backup; without it the run cannot know what it has trained on"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """One step's batch and everything decided with it."""

    version: int  # after the step; of a skipped batch that of the weights, which stay
    groups: list[list[str]]  # episode ids, in the order they were trained on
    outcomes: list[EpisodeOutcome]
    is_skipped: bool = False  # by the controller: nothing was learnt
    number: int = 0  # of batches decided on, this one included; 0: from a version without numbers
    offset: int = field(default=0, compare=False)  # where its line begins, in bytes

    @property
    def consumed_by(self) -> int:
        """The first version whose checkpoint has this batch behind it for certain."""
        return self.version + self.is_skipped


class StepLog:
    """JSON lines, one per step, synced to disk. A torn last line is cut off on opening.

    Example: closed groups, old checkpoints -> `first_needed` moves on, and a restart need not read
    the lines before it.
    """

    def __init__(self, path: Path, *, start: int = 0) -> None:
        """Open a log at its end.

        Args:
            start: offset of the first line that may be needed.

        Raises: ConfigError: it is damaged; names file and line.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = AppendFile(path)
        self._lines: deque[tuple[int, int, int]] = deque()  # offset, version, highest group number
        try:
            self._file.truncate(whole_bytes(path))
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
        line, offset = _line(step), self._file.size

        def write() -> None:
            self._file.append([line])
            try:
                self._file.sync()
            except OSError:
                self._file.truncate(offset)
                raise

        with_room(write, self._file.path, check=check)
        self._note(step, offset)

    def first_needed(self, *, version: int, closed_below: int) -> int:
        """Return the offset of the first line that a restart needs, and forget those before.

        Args:
            version: of the oldest checkpoint that may be restored.
            closed_below: training groups of smaller numbers are settled for good.
        """
        while self._lines and self._lines[0][1] <= version and self._lines[0][2] < closed_below:
            self._lines.popleft()
        return self._lines[0][0] if self._lines else self._file.size

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
    return json.dumps(plain, separators=(",", ":")).encode() + b"\n"


def read_steps(path: Path, *, start: int = 0) -> Iterator[LoggedStep]:
    """Yield the steps of a log in order, from the line at an offset on.

    Raises: ConfigError: a line is damaged, or the file ends before `start`; names file and line.
    """
    with path.open("rb") as handle:
        if path.stat().st_size < start:
            raise ConfigError(f"{path}: damaged, it ends before byte {start}; {REMEDY}")
        handle.seek(start)
        offset = start
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
        offset=offset,
    )


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
