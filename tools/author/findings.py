"""Findings of the environment checks, and the episodes that the checks share."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from tools.author.episodes import RecordedPlay


class Grade(StrEnum):
    """Severity of a finding; only FAIL prevents a run."""

    OK = "ok"
    NOTE = "note"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    grade: Grade
    name: str
    text: str


@dataclass(slots=True)
class Plays:
    """Episodes of the same items by different players, played once and shared by all checks."""

    by_expert: list[RecordedPlay] = field(default_factory=list[RecordedPlay])
    by_chance: list[RecordedPlay] = field(default_factory=list[RecordedPlay])
    step_s: list[float] = field(default_factory=list[float])

    @property
    def all(self) -> list[RecordedPlay]:
        """Return the episodes of both players."""
        return [*self.by_expert, *self.by_chance]


def graded(name: str, problems: list[str], text: str) -> Iterator[Finding]:
    """Yield a failure for each of the first problems, or one OK finding if there are none."""
    for problem in problems[:3]:
        yield Finding(Grade.FAIL, name, problem)
    if not problems:
        yield Finding(Grade.OK, name, text)
