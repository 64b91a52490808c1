"""Functions of the user as parts of the curriculum: loading, checks and their saved state.

    horizon.kind     f(progress: HorizonProgress, cfg) -> horizon, from the first stage to the last
    curriculum.kind  f(draw: ItemDraw, cfg) -> (name of a task, index of its item)

The scheduler saves what a function writes to `state`, so a resumed run continues with it. After a
crash the scheduler repeats its last events, so a function must depend on its arguments alone.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from common.config.curriculum import CurriculumSection
from common.config.horizon import HorizonPolicy, HorizonSection
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.user_code import ImportedFunction, load_function
from scheduler.curriculum.sampling import hash_words
from scheduler.curriculum.success import StepSeen
from scheduler.state import FIXED

Choices = tuple[ImportedFunction, list[Any]]  # A function with its choices in a run.
EMPTY = "{}"
NUM_REPEATS = 3  # Runs of the check beyond the first one, with equal arguments.
CHECK_ITEMS = 1 << 30  # Items of a task in the check before the hub's catalogue is known.


@dataclass(frozen=True, slots=True, kw_only=True)
class HorizonProgress:
    """The progress of the run, for a function that chooses the horizon."""

    name: str  # The environment, or "environment/subset".
    version: int  # Number of trained steps.
    horizon: int  # Horizon in force, in the horizon's unit; 0 before the first call.
    stages: tuple[int, ...]  # Its bounds are the first and the last stage.
    steps: Sequence[StepSeen]  # The most recent steps, the newest last.
    state: dict[str, Any]  # Saved; JSON values only.


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskChoice:
    """A task from which an item can be drawn."""

    name: str  # "environment/subset".
    weight: float
    num_items: int  # Indices of items are below it.
    success: float | None  # Recent success of the policy; None: not known.


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemDraw:
    """The draw of one group's item, for a function that chooses items."""

    number: int  # Number of the group, from 0.
    version: int  # Number of trained steps.
    tasks: Sequence[TaskChoice]  # Tasks whose environments can be played.
    random: random.Random  # Its seed is that of the run and the group.
    state: dict[str, Any]  # Saved; JSON values only.
    success_of: Callable[[str, int], float | None] = field(repr=False)

    def success(self, task: str, index: int) -> float | None:
        """Return the recent success of an item of a task; None if it is not known."""
        return self.success_of(task, index)


def _is_whole(value: Any) -> bool:
    """Return whether a value is a whole number, also one of numpy."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _saved(user: ImportedFunction, state: dict[str, Any]) -> str:
    """Return a state as JSON. Raises: ConfigError: the next call would get another value."""
    try:
        text = json.dumps(state, allow_nan=False)
        if json.loads(text) != state:
            raise TypeError("a tuple, or a key that is no text")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{user.where}: its state cannot be saved as JSON: {error}; use numbers, texts, lists"
            " and maps with texts as keys"
        ) from error
    return text


@dataclass(slots=True)
class HorizonFunction:
    """A function of the user that chooses the horizon, with its state."""

    reference: str = field(metadata=FIXED)
    section: HorizonSection = field(metadata=FIXED)
    state: str = EMPTY

    @property
    def user(self) -> ImportedFunction:
        """The function. Raises: ConfigError: it cannot be loaded or called."""
        user = load_function("horizon.kind", self.reference)
        user.check_arguments("progress", "cfg")
        return user

    def choose(
        self,
        name: str,
        policy: HorizonPolicy,
        *,
        version: int,
        horizon: int,
        steps: Sequence[StepSeen],
    ) -> int:
        """Return the horizon after step `version`. Raises: ConfigError: it is refused."""
        state: dict[str, Any] = json.loads(self.state)
        progress = HorizonProgress(
            name=name,
            version=version,
            horizon=horizon,
            stages=policy.stages,
            steps=tuple(steps),
            state=state,
        )
        user = self.user
        chosen = user.call(progress, self.section)
        first, last = policy.stages[0], policy.stages[-1]
        if not _is_whole(chosen) or not first <= chosen <= last:
            raise ConfigError(
                f"{user.where}: returned {chosen!r:.100} after step {version}; expected a whole"
                f" number from {first} to {last}, the first and the last of horizon.stages"
            )
        self.state = _saved(user, state)
        return int(chosen)


@dataclass(slots=True)
class ItemFunction:
    """A function of the user that chooses the items of training groups, with its state."""

    section: CurriculumSection = field(metadata=FIXED)
    seed: int = field(metadata=FIXED)  # Seed of the run.
    state: str = EMPTY

    @property
    def user(self) -> ImportedFunction:
        """The function. Raises: ConfigError: it cannot be loaded or called."""
        user = load_function("curriculum.kind", str(self.section.kind))
        user.check_arguments("draw", "cfg")
        return user

    def choose(
        self,
        number: int,
        tasks: Sequence[TaskChoice],
        success_of: Callable[[str, int], float | None],
        *,
        version: int,
    ) -> tuple[str, int]:
        """Return the task and the item of group `number`. Raises: ConfigError: it is refused."""
        state: dict[str, Any] = json.loads(self.state)
        draw = ItemDraw(
            number=number,
            version=version,
            tasks=tuple(tasks),
            random=random.Random(hash_words(self.seed, "draw", number)),
            state=state,
            success_of=success_of,
        )
        user = self.user
        chosen = user.call(draw, self.section)
        num_of = {task.name: task.num_items for task in tasks}
        if not (isinstance(chosen, tuple) and len(chosen) == 2 and chosen[0] in num_of):
            raise ConfigError(
                f"{user.where}: returned {chosen!r:.100} for group {number}; expected (task, index)"
                f" with one of the tasks {', '.join(num_of)}"
            )
        name, index = chosen
        if not _is_whole(index) or not 0 <= index < num_of[name]:
            raise ConfigError(
                f"{user.where}: returned the item {index!r:.100} of {name} for group {number};"
                f" expected a whole number from 0 to {num_of[name] - 1}"
            )
        self.state = _saved(user, state)
        return name, int(index)


def user_functions(cfg: RunConfig) -> list[ImportedFunction]:
    """Return the functions of the user in the curriculum. Raises: ConfigError."""
    horizon = [HorizonFunction(kind, cfg.horizon).user] if ":" in (kind := cfg.horizon.kind) else []
    items = [ItemFunction(cfg.curriculum, 0).user] if cfg.curriculum.is_of_user else []
    return [*horizon, *items]


def check_user_functions(cfg: RunConfig) -> None:
    """Call the functions of the user before a run, with a run at its start and a later one.

    Raises: ConfigError: one is missing, cannot be called, returns a wrong value, or returns
        unequal values for equal arguments.
    """
    later = [
        StepSeen(
            version=version,
            num_episodes=8,
            num_solved=4,
            num_truncated=2,
            entropy=1.0,
            ess_frac=0.9,
        )
        for version in (1, 2, 3)
    ]
    names = list(dict.fromkeys(cfg.horizon.name_of(task.env, task.subset) for task in cfg.tasks))
    for name in names:
        policy = cfg.horizon.policy(name)
        if policy.is_of_user:
            _check_repeated(lambda policy=policy, name=name: _horizons(cfg, policy, name, later))
    if cfg.curriculum.is_of_user:
        _check_repeated(lambda: _items(cfg))


def _check_repeated(choose: Callable[[], Choices]) -> None:
    """Raise ConfigError if a function chooses otherwise in another run with equal arguments."""
    user, choices = choose()
    for _ in range(NUM_REPEATS):
        user.check_equal(choices, choose()[1])


def _horizons(
    cfg: RunConfig, policy: HorizonPolicy, name: str, later: Sequence[StepSeen]
) -> Choices:
    """Return the horizons at the start of a run and after some steps, and the states."""
    function = HorizonFunction(policy.kind, cfg.horizon)
    horizon = function.choose(name, policy, version=0, horizon=0, steps=())
    state = function.state
    last = function.choose(name, policy, version=3, horizon=horizon, steps=later)
    return function.user, [horizon, state, last, function.state]


def _items(cfg: RunConfig) -> Choices:
    """Return the items of the first group and of a later one, and the states."""
    items = ItemFunction(cfg.curriculum, cfg.run.seed)
    choices: list[Any] = []
    for version, success in ((0, None), (3, 0.5)):
        tasks = [
            TaskChoice(
                name=f"{task.env}/{task.items()}",
                weight=task.weight,
                num_items=CHECK_ITEMS,
                success=success,
            )
            for task in cfg.tasks
            if task.weight > 0
        ]
        chosen = items.choose(
            version, tasks, lambda task, index, known=success: known, version=version
        )
        choices += [*chosen, items.state]
    return items.user, choices
