"""The step log: the episodes that each step consumed, to repeat the steps after a checkpoint.

A step is logged after it is computed and before its weights are published. A batch that the
controller skipped is logged before it is reported. A restarted learner restores its checkpoint and
repeats the logged steps with episodes from the journal. It then has the same weights as before: no
episode is lost, and none is trained on twice.

With `learner.partial_episodes=turns` a step may train a part of an episode before its group
(`common.segments`). The journal does not have such a part, so the log of parts holds it as it was
trained. That log is synced before the step is logged.
"""

import base64
import json
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import ConfigError, WireError
from common.ids import training_number
from common.segments import token_digest
from common.store.disk import AppendFile, with_room
from common.store.run_dir import cut_head
from common.wire.codec import pack_record, unpack_record
from common.wire.messages import EpisodeOutcome, Outcome, Trajectory

PRUNE_FROM_BYTES = 16 << 20
PRUNE_PARTS_FROM_BYTES = 64 << 20
PRUNE_GROWTH = 1.25  # A pruned log must grow by this factor before it is examined again.
PRUNED = b'{"pruned":'
REMEDY = "restore it from a backup; only this file lists the batches that the run has trained on"
_NAME = re.compile(
    r"(?P<episode>[^@]+)@(?P<first>\d+)(?:-(?P<end>\d+)-(?P<num>\d+)-(?P<digest>[0-9a-f]{1,16}))?"
)


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

        with_room(partial(self._file.append_synced, [line]), self._file.path, check=check)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PartName:
    """The turns of an episode that a step trained, as the step log names them.

    Example: "g0000012/3" is a whole episode. In "g0000012/3@4" the first four turns are context.
    "g0000012/3@4-9-70-1f" has turns 4 to 8 with 70 sampled tokens. It was trained before its group.
    """

    episode_id: str
    first_turn: int = 0  # Earlier turns are context.
    end_turn: int = 0  # The turn after the last one; 0: it was trained with its group.
    num_tokens: int = 0  # With an `end_turn`: the sampled tokens of these turns.
    digest: int = 0  # With an `end_turn`: the digest of these tokens.

    @classmethod
    def of(cls, trajectory: Trajectory, *, is_early: bool) -> "PartName":
        """Return the name of an episode or part as it is trained.

        Args:
            is_early: it is trained before its group.
        """
        first = trajectory.num_shared_turns if trajectory.trunk == trajectory.member else 0
        name = cls(episode_id=trajectory.episode_id, first_turn=first)
        if not is_early:
            return name
        tokens = _sampled_in(trajectory, first, trajectory.num_turns)
        return replace(
            name, end_turn=trajectory.num_turns, num_tokens=len(tokens), digest=token_digest(tokens)
        )

    @classmethod
    def parse(cls, text: str) -> "PartName":
        """Return the name of a text of the step log."""
        match = _NAME.fullmatch(text)
        if match is None:
            return cls(episode_id=text)
        return cls(
            episode_id=match["episode"],
            first_turn=int(match["first"]),
            end_turn=int(match["end"] or 0),
            num_tokens=int(match["num"] or 0),
            digest=int(match["digest"] or "0", base=16),
        )

    @property
    def is_early(self) -> bool:
        """Whether the part was trained before its group."""
        return self.end_turn > 0

    @property
    def text(self) -> str:
        """The name in the step log."""
        if self.is_early:
            turns = f"{self.first_turn}-{self.end_turn}"
            return f"{self.episode_id}@{turns}-{self.num_tokens}-{self.digest:x}"
        return f"{self.episode_id}@{self.first_turn}" if self.first_turn else self.episode_id

    def is_in(self, trajectory: Trajectory) -> bool:
        """Return whether an episode has the sampled tokens of this part.

        An episode that began anew has others. The last turn of an episode may have more tokens than
        its part: the call of a branch that the end of the episode cut off.
        """
        if trajectory.num_turns < self.end_turn:
            return False
        tokens = _sampled_in(trajectory, self.first_turn, self.end_turn)[: self.num_tokens]
        return token_digest(tokens) == self.digest


def _sampled_in(trajectory: Trajectory, first: int, end: int) -> np.ndarray:
    """Return the sampled tokens of the turns from `first` to before `end`, [num] int32."""
    turns = trajectory.turn_ids
    return trajectory.token_ids[trajectory.loss_mask & (turns >= first) & (turns < end)]


class PartLog:
    """The parts that were trained before their groups, as JSON lines.

    Opening it removes a torn last line. The main thread appends and prunes.
    """

    def __init__(self, path: Path, *, prune_from_bytes: int = PRUNE_PARTS_FROM_BYTES) -> None:
        """Open the log for appending."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = AppendFile(path)
        self._prune_from_bytes = self._prune_bytes = prune_from_bytes
        self._file.truncate(whole_bytes(path))

    def append(
        self, parts: Sequence[Trajectory], *, check: Callable[[], object] = lambda: None
    ) -> None:
        """Write parts as they are trained; return once they are on disk.

        Args:
            check: called during a wait for room on the disk; ends it by raising.
        """
        if not parts:
            return
        lines = [_part_line(part) for part in parts]
        with_room(partial(self._file.append_synced, lines), self._file.path, check=check)

    def prune(self, steps: Path) -> None:
        """Remove the first parts, which no step of the step log has, if the log is large enough.

        Raises: OSError: the log could not be rewritten; it is unchanged.
        """
        if self._file.size < self._prune_bytes:
            return
        needed = {name for step in read_steps(steps) for ids in step.groups for name in ids}
        path = self._file.path
        num_gone = 0
        for name, line in _part_lines(path):
            if name in needed:
                break
            num_gone += len(line)
        if num_gone:
            cut_head(path, num_gone)
            self._file.close()
            self._file = AppendFile(path)
        self._prune_bytes = max(self._prune_from_bytes, int(self._file.size * PRUNE_GROWTH))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def each_part(path: Path, names: Collection[str]) -> Iterator[tuple[str, Trajectory]]:
    """Yield the logged parts with these names in the step log, in order; none without a file.

    A part of a skipped batch may be logged again, with the same content.

    Raises: ConfigError: a line is damaged; names it.
    """
    if not names or not path.exists():
        return
    for number, (name, line) in enumerate(_part_lines(path), 1):
        if name not in names:
            continue
        try:
            record = base64.b64decode(json.loads(line)["record"], validate=True)
            part = unpack_record(record)
        except (ValueError, KeyError, WireError) as error:
            raise ConfigError(
                f"{path}: line {number} is damaged ({error!r}); restore it from a backup; only this"
                " file has the parts of episodes that the run has trained on"
            ) from error
        yield name, part


def _part_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the line of each part; a torn last line is left out."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                head = line[: line.find(b'","record"')]
                yield head.removeprefix(b'{"part":"').decode(errors="replace"), line


def _part_line(part: Trajectory) -> bytes:
    name = PartName.of(part, is_early=True).text
    record = base64.b64encode(pack_record(part)).decode()
    plain = {"part": name, "record": record}
    return json.dumps(plain, separators=(",", ":")).encode() + b"\n"
