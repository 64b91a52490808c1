"""Which episodes each step consumed: with the journal, enough to redo steps after a checkpoint.

A step is written here after it is computed and before anybody sees its weights. A learner that dies
restores its checkpoint, repeats the logged steps from the journal, and is where it was: no episode
is lost, none is trained twice.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.wire.messages import EpisodeOutcome, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """One step's batch and everything decided with it."""

    version: int  # after the step
    groups: list[list[str]]  # episode ids, in the order they were trained on
    outcomes: list[EpisodeOutcome]


class StepLog:
    """JSON lines, one per step, synced to disk. A torn last line is cut off on opening."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")
        self._file.truncate(sum(len(line) for line in _whole_lines(path)))

    def append(self, step: LoggedStep) -> None:
        """Write a step and return when it is on disk."""
        self._file.write(_line(step))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _line(step: LoggedStep) -> str:
    outcomes = [[o.episode_id, o.outcome.value, o.cause] for o in step.outcomes]
    plain = {"version": step.version, "groups": step.groups, "outcomes": outcomes}
    return json.dumps(plain, separators=(",", ":")) + "\n"


def read_steps(path: Path) -> Iterator[LoggedStep]:
    """Yield the steps of a log in order."""
    for line in _whole_lines(path):
        plain = json.loads(line)
        outcomes = [
            EpisodeOutcome(episode_id=name, outcome=Outcome(outcome), cause=cause)
            for name, outcome, cause in plain["outcomes"]
        ]
        yield LoggedStep(version=plain["version"], groups=plain["groups"], outcomes=outcomes)


def _whole_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as handle:
        for line in handle:
            if line.endswith(b"\n"):
                yield line
