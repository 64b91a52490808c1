"""The plan of a study: arms of overrides over seeds, and the detection of identical runs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from common.config.evaluation import StudySection
from common.errors import ConfigError

CONFIG = "quickstart"  # The configuration of all studies.
WRITTEN = Path(__file__).with_name("studies.yaml")
OWN = ("study.", "run.dir=", "ray.")  # Overrides of the study itself, not of its runs.
CONTROLLER_OFF = tuple(
    f"learner.controller.{name}=false" for name in ("scale_lr", "tighten_gate", "skip_step")
)


class Does(StrEnum):
    """The type of an arm's runs.

    train: a whole run. in_process: the same loop in one process. commands: the arm's own commands.
    """

    TRAIN = "train"
    IN_PROCESS = "in_process"
    COMMANDS = "commands"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    name: str
    overrides: tuple[str, ...] = ()
    does: Does = Does.TRAIN
    commands: tuple[tuple[str, ...], ...] = ()
    chunk: str = ""  # Arms of a chunk run one after the other; "": the arm has its own chunk.
    # Name of the arm with the controller. If that controller never acted, this run is identical.
    twin: str = ""
    start: str = ""  # Key of the initial policy in the study's `starts`; "": the study's default.


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One arm with one seed."""

    arm: Arm
    seed: int
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.arm.name}-seed{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """All arms of a comparison. All runs share overrides and number of steps."""

    name: str
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    overrides: tuple[str, ...] = ()  # Overrides of every run.
    cpu_s: float = 0.0  # Approximate processor seconds of a run; 0: unknown.
    scaled: tuple[str, ...] = ()  # Keys that a larger study multiplies.
    size: float = 1.0
    # The user's overrides, which replace the study's and are replaced by an arm's.
    given: tuple[str, ...] = ()
    start: tuple[str, ...] = ()  # Command and overrides that make the initial policy of all runs.
    starts: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    def runs(self) -> list[Run]:
        """Return every run, seed by seed, so that a shortened study has all arms of some seeds."""
        return [self._run(arm, seed) for seed in self.seeds for arm in self.arms]

    def _run(self, arm: Arm, seed: int) -> Run:
        plain = merged(merged(self.overrides, self.given), arm.overrides)
        sized = [self._sized(each) for each in plain]
        return Run(arm=arm, seed=seed, overrides=(f"run.seed={seed}", *sized))

    def _sized(self, override: str) -> str:
        key, _, value = override.partition("=")
        if key not in self.scaled or self.size == 1:
            return override
        return f"{key}={max(1, round(int(value) * self.size))}"

    def firsts(self) -> dict[str, str]:
        """Return for each run the name of the first identical run, which is usually itself."""
        first: dict[tuple[object, ...], str] = {}
        found: dict[str, str] = {}
        for run in self.runs():
            same = (run.arm.does, run.arm.commands, run.arm.start, *sorted(run.overrides))
            found[run.name] = first.setdefault(same, run.name)
        return found

    def chunks(self, todo: Iterable[Run]) -> list[list[Run]]:
        """Return the runs in chunks. One worker executes a chunk in order."""
        parts: dict[tuple[str, int], list[Run]] = {}
        for run in todo:
            parts.setdefault((run.arm.chunk or run.arm.name, run.seed), []).append(run)
        return list(parts.values())


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
    written = _written()
    own = written[name]
    seeds = own["seeds"]
    num = section.num_seeds or len(seeds)
    study = Study(
        name=name,
        arms=tuple(_arms(own)),
        seeds=tuple(range(seeds[0], seeds[0] + num)),
        overrides=tuple(merged(written["all"]["overrides"], own.get("overrides", ()))),
        cpu_s=own.get("cpu_s", 0.0),
        scaled=tuple(written["all"]["scaled"]),
        size=section.size,
        given=tuple(each for each in given if not each.startswith(OWN)),
        start=tuple(own.get("start", ())),
        starts={each: tuple(_flat(words)) for each, words in own.get("starts", {}).items()},
    )
    _check_given(study)
    return study


def _flat(words: Iterable[Any]) -> Iterable[str]:
    """Yield the words of a nested list."""
    for each in words:
        yield from _flat(each) if isinstance(each, list) else (each,)


def _check_given(study: Study) -> None:
    fixed = {"run.name": "the study names its runs", "run.seed": "give study.num_seeds"}
    for each in study.given:
        key, _, value = each.partition("=")
        if key in fixed:
            raise ConfigError(f"{each}: {fixed[key]}")
        if key in study.scaled and not value.isdigit():
            raise ConfigError(f"{each}: expects a whole number")


def _written() -> dict[str, Any]:
    return yaml.safe_load(WRITTEN.read_text(encoding="utf-8"))


def _arms(own: dict[str, Any]) -> Iterable[Arm]:
    does = Does(own.get("does", Does.TRAIN))
    if "lags" in own:
        yield from lag_arms(own)
        return
    for name, each in own["arms"].items():
        written = each if isinstance(each, dict) else {"overrides": each}
        commands = tuple(map(tuple, written.get("commands", ())))
        yield Arm(
            name=name,
            overrides=tuple(written.get("overrides", ())),
            does=Does.COMMANDS if commands else does,
            commands=commands,
            chunk=own.get("chunk", ""),
            start=written.get("start", ""),
        )


@dataclass(frozen=True, slots=True)
class LagArm:
    """The parts of the name of an arm with forced lag."""

    rate: str
    lag: int
    kind: str
    is_controlled: bool

    @property
    def name(self) -> str:
        return f"{self.rate}-lag{self.lag}-{self.kind}-{'on' if self.is_controlled else 'off'}"

    @classmethod
    def of(cls, name: str) -> "LagArm":
        """Return the parts of a name; a kind may contain hyphens."""
        rate, lag, rest = name.split("-", 2)
        kind, _, state = rest.rpartition("-")
        return cls(rate, int(lag.removeprefix("lag")), kind, state == "on")


def lag_arms(own: dict[str, Any]) -> Iterable[Arm]:
    """Yield rate x lag x correction x controller.

    The arm with the controller comes first, because the arm without it may be identical. At lag 0 a
    batch of one update has ratios of 1, and the controller never acts. Every correction is then
    identical to the plain run, except those with several updates (`own_at_zero`).
    """
    for lag in own["lags"]:
        for rate, rates in own["rates"].items():
            for kind, correction in own["corrections"].items():
                is_plain = lag == 0 and kind not in own["own_at_zero"]
                overrides = [
                    f"learner.hold_back_steps={lag}",
                    f"learner.max_lag_steps={max(4, lag)}",
                    f"scheduler.max_ahead_steps={max(1, lag)}",
                    *rates,
                    *([] if is_plain else correction),
                ]
                on = Arm(
                    name=LagArm(rate, lag, kind, True).name,
                    overrides=tuple(overrides),
                    does=Does.IN_PROCESS,
                    chunk=f"{rate}-lag{lag}",
                )
                yield on
                off = replace(on, name=LagArm(rate, lag, kind, False).name)
                free = tuple(merged(overrides, CONTROLLER_OFF))
                yield off if lag == 0 else replace(off, overrides=free, twin=on.name)
