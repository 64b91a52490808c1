"""The plan of a study: arms of overrides, each trained with several seeds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from common.errors import ConfigError
from tools.cli.bench import StudySection

CONFIG = "quickstart"  # The configuration of all studies.
WRITTEN = Path(__file__).with_name("studies.yaml")
OWN = ("study.", "run.dir=")  # Overrides of the study itself, not of its runs.


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One arm with one seed."""

    arm: str
    seed: int
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.arm}-seed{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """All arms of a comparison. All runs share overrides and number of steps."""

    name: str
    base: str  # The arm that the others are compared with.
    arms: dict[str, tuple[str, ...]]  # Overrides by arm.
    seeds: tuple[int, ...]
    overrides: tuple[str, ...]  # Overrides of every run.
    cpu_s: float  # Approximate processor seconds of a run.
    may_lose: dict[str, float]  # Points of success that an arm may lose against the base.
    scaled: tuple[str, ...] = ()  # Keys that a larger study multiplies.
    size: float = 1.0
    # The user's overrides, which replace the study's and are replaced by an arm's.
    given: tuple[str, ...] = ()
    start: tuple[str, ...] = ()  # Command and overrides that make the initial policy of all runs.

    def runs(self) -> list[PlannedRun]:
        """Return every run, seed by seed, so that a shortened study has all arms of some seeds."""
        return [self._run(arm, seed) for seed in self.seeds for arm in self.arms]

    def start_words(self) -> list[str]:
        """Return the command and the overrides that make the initial policy.

        The first override of the study names the policy to train, unless a new one is made.
        """
        command, *overrides = self.start
        named = () if "sft.from_scratch=true" in overrides else self.overrides[:1]
        return [command, *merged(named, overrides)]

    def _run(self, arm: str, seed: int) -> PlannedRun:
        """Return one run of an arm."""
        plain = merged(merged(self.overrides, self.given), self.arms[arm])
        sized = [self._sized(each) for each in plain]
        return PlannedRun(arm=arm, seed=seed, overrides=(f"run.seed={seed}", *sized))

    def _sized(self, override: str) -> str:
        """Return an override with its value scaled by the size of the study."""
        key, _, value = override.partition("=")
        if key not in self.scaled or self.size == 1:
            return override
        return f"{key}={max(1, round(int(value) * self.size))}"


def merged(overrides: Sequence[str], own: Sequence[str]) -> list[str]:
    """Return all overrides with each key once; later values replace earlier ones."""
    by_key = {each.partition("=")[0]: each for each in (*overrides, *own)}
    return list(by_key.values())


def names() -> list[str]:
    """Return the names of all studies."""
    return [name for name in _written() if name != "all"]


def read_study(name: str, section: StudySection | None = None, given: Sequence[str] = ()) -> Study:
    """Return a study from `studies.yaml`, in the requested size, with the user's overrides."""
    section = section or StudySection()
    shared = _written()["all"]
    own = _written()[name]
    study = Study(
        name=name,
        base=own["base"],
        arms={arm: tuple(_flat(words)) for arm, words in own["arms"].items()},
        seeds=tuple(range(section.num_seeds or own["num_seeds"])),
        overrides=tuple(merged(shared["overrides"], own["overrides"])),
        cpu_s=own["cpu_s"],
        may_lose=own.get("may_lose", {}),
        scaled=tuple(shared["scaled"]),
        size=section.size,
        given=tuple(each for each in given if not each.startswith(OWN)),
        start=tuple(own.get("start", ())),
    )
    _check_given(study)
    return study


def _flat(words: Iterable[Any]) -> Iterable[str]:
    """Yield the words of a nested list."""
    for word in words:
        yield from _flat(word) if isinstance(word, list) else (word,)


def _check_given(study: Study) -> None:
    """Check that the overrides contain no key that the study sets. Raises: ConfigError."""
    fixed = {"run.name": "the study names its runs", "run.seed": "give study.num_seeds"}
    for each in study.given:
        key, _, value = each.partition("=")
        if key in fixed:
            raise ConfigError(f"{each}: {fixed[key]}")
        if key in study.scaled and not value.isdigit():
            raise ConfigError(f"{each}: expects a whole number")


def _written() -> dict[str, Any]:
    """Return the studies of the table."""
    return yaml.safe_load(WRITTEN.read_text(encoding="utf-8"))
