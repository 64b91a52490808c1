"""Parts of episodes: consecutive turns that are trained without the rest of their episode.

With `learner.partial_episodes=turns` staleness is decided turn by turn. Turns of an episode that
were trained before, or are stale, become context, as the shared turns of a fork are
(`common.segments`). A part is therefore a fork of its own episode.

A part that is trained before its group is logged as it was trained: the journal does not have it.
The log is synced before the step is logged.
"""

import base64
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from common.errors import ConfigError, WireError
from common.segments import from_turn, token_digest
from common.store.disk import AppendFile, with_room
from common.store.run_dir import cut_head
from common.wire.codec import pack_record, unpack_record
from common.wire.messages import Trajectory
from learner.recovery.step_log import read_steps, whole_bytes

PRUNE_FROM_BYTES = 64 << 20
_NAME = re.compile(
    r"(?P<episode>[^@]+)@(?P<first>\d+)(?:-(?P<end>\d+)-(?P<num>\d+)-(?P<digest>[0-9a-f]{1,16}))?"
)


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


def part_of(trajectory: Trajectory, first_turn: int) -> Trajectory:
    """Return an episode whose turns before `first_turn` are context; itself if there are none."""
    if not first_turn:
        return trajectory
    part = from_turn(trajectory, first_turn)
    return replace(part, trunk=trajectory.member, num_shared_turns=first_turn)


def first_fresh_turn(trajectory: Trajectory, *, least_version: int) -> int:
    """Return the turn after the last one that has a token of a version below `least_version`."""
    is_stale = trajectory.loss_mask & (trajectory.versions < least_version)
    return int(trajectory.turn_ids[is_stale].max()) + 1 if is_stale.any() else 0


class PartLog:
    """The parts that were trained before their groups, as JSON lines.

    Opening it removes a torn last line. The main thread appends and prunes.
    """

    def __init__(self, path: Path, *, prune_from_bytes: int = PRUNE_FROM_BYTES) -> None:
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
        lines = [_line(part) for part in parts]

        def write() -> None:
            size = self._file.size
            self._file.append(lines)
            try:
                self._file.sync()
            except OSError:
                self._file.truncate(size)
                raise

        with_room(write, self._file.path, check=check)

    def prune(self, steps: Path) -> None:
        """Remove the first parts, which no step of the step log has, if the log is large enough.

        Raises: OSError: the log could not be rewritten; it is unchanged.
        """
        if self._file.size < self._prune_bytes:
            return
        needed = {name for step in read_steps(steps) for ids in step.groups for name in ids}
        path = self._file.path
        num_gone = 0
        for name, line in _lines(path):
            if name in needed:
                break
            num_gone += len(line)
        if num_gone:
            cut_head(path, num_gone)
            self._file.close()
            self._file = AppendFile(path)
        self._prune_bytes = max(self._prune_from_bytes, int(self._file.size * 1.25))

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
    for number, (name, line) in enumerate(_lines(path), 1):
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


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the line of each part; a torn last line is left out."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                head = line[: line.find(b'","record"')]
                yield head.removeprefix(b'{"part":"').decode(errors="replace"), line


def _line(part: Trajectory) -> bytes:
    name = PartName.of(part, is_early=True).text
    record = base64.b64encode(pack_record(part)).decode()
    plain = {"part": name, "record": record}
    return json.dumps(plain, separators=(",", ":")).encode() + b"\n"
