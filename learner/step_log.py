"""Which episodes each step consumed: with the journal, enough to redo steps after a checkpoint.

A step is written here after it is computed and before anybody sees its weights. A learner that dies
restores its checkpoint, repeats the logged steps from the journal, and is where it was: no episode
is lost, none is trained twice.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from common.messages import EpisodeOutcome, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """One step's batch and everything decided with it."""

    version: int  # after the step
    groups: list[list[str]]  # episode ids, in the order they were trained on
    outcomes: list[EpisodeOutcome]


class StepLog:
    """JSON lines, one per step, synced to disk. A torn last line is cut off on opening."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")
        self.steps, num_bytes = _read(path)
        self._file.truncate(num_bytes)

    def append(self, step: LoggedStep) -> None:
        """Write a step and return when it is on disk."""
        self.steps.append(step)
        self._file.write(_line(step))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _line(step: LoggedStep) -> str:
    outcomes = [[o.episode_id, o.outcome.value, o.cause] for o in step.outcomes]
    plain = {"version": step.version, "groups": step.groups, "outcomes": outcomes}
    return json.dumps(plain, separators=(",", ":")) + "\n"


def _read(path: Path) -> tuple[list[LoggedStep], int]:
    """Return the steps, and how many bytes of the file they take."""
    steps: list[LoggedStep] = []
    num_bytes = 0
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        num_bytes += len(line)
        plain = json.loads(line)
        outcomes = [
            EpisodeOutcome(episode_id=name, outcome=Outcome(outcome), cause=cause)
            for name, outcome, cause in plain["outcomes"]
        ]
        step = LoggedStep(version=plain["version"], groups=plain["groups"], outcomes=outcomes)
        steps.append(step)
    return steps, num_bytes
