"""Synchronous calls of environments from a command, for ordinary and asynchronous environments."""

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from common.config.load import load_config, override_value
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.text import counted
from envhub.catalogue.registry import Registry, is_reference, missing_requirements
from envhub.env import EnvSpec, StepResult, Style
from envhub.errors import EnvRaised, UnknownEnv
from envhub.hosting.env_calls import call_environment

Choose = Callable[["RecordedPlay"], str | None]


class Driver:
    """Calls an environment in this thread and waits for awaitable results."""

    def __init__(self, spec: EnvSpec, style: Style) -> None:
        """Create the driver without starting an episode."""
        self.spec = spec
        self.style = style
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.spec.stop is not None:
            self.call(self.spec.stop)
        self.close()

    def close(self) -> None:
        """End the calls of this driver. The environment's shared resources stay."""
        self._runner.close()

    def call(self, work: Callable[[], Any], *, place: str = "") -> Any:
        """Return the result of a call. Raises: UnknownItem; EnvRaised: any other exception.

        Args:
            place: the method and the item, for the error.
        """
        try:
            return self._runner.run(call_environment(self.spec.name, work))
        except EnvRaised as error:
            raise EnvRaised(f"{error} ({place})" if place else str(error)) from error

    def open(self, item_id: str, *, seed: int = 0) -> "RecordedPlay":
        """Begin an episode. Raises: UnknownItem, EnvRaised."""
        env: Any = self.call(lambda: self.spec.make(self.style))
        with contextlib.ExitStack() as stack:
            stack.callback(self.call, lambda: env.close())
            first = self.call(lambda: env.reset(item_id, seed), place=f"reset of {item_id}")
            stack.pop_all()
        return RecordedPlay(self, env, item_id, first)


@dataclass(slots=True)
class RecordedPlay:
    """One episode with its actions and results."""

    driver: Driver = field(repr=False)
    env: Any = field(repr=False)
    item_id: str
    first: str
    actions: list[str] = field(default_factory=list[str])
    results: list[StepResult] = field(default_factory=list[StepResult])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.call("close")

    def call(self, name: str, *arguments: object) -> Any:
        """Return the result of a method of the environment."""
        place = f"{name} of {self.item_id}, after {counted(len(self.results), 'turn')}"
        return self.driver.call(lambda: getattr(self.env, name)(*arguments), place=place)

    def step(self, action: str) -> StepResult:
        """Perform an action and record it."""
        result: StepResult = self.call("step", action)
        self.actions.append(action)
        self.results.append(result)
        return result

    @property
    def is_over(self) -> bool:
        """Whether the last step ended the episode."""
        return bool(self.results) and self.results[-1].done

    @property
    def is_solved(self) -> bool:
        """Whether the episode has ended solved."""
        return self.is_over and bool(self.results[-1].is_success)

    def texts(self) -> list[str]:
        """Return every observation."""
        return [self.first, *(result.observation for result in self.results)]

    def play(self, choose: Choose, *, max_turns: int) -> None:
        """Play until the episode ends, the turns are used up, or `choose` returns None."""
        while len(self.results) < max_turns and not self.is_over:
            action = choose(self)
            if action is None:
                return
            self.step(action)


def expert(episode: RecordedPlay) -> str | None:
    """Return the action of the environment's own expert; None if it has no plan."""
    return episode.call("expert_action")


def chance(seed: str) -> Choose:
    """Return a player that chooses random valid actions."""
    drawn = random.Random(seed)

    def choose(episode: RecordedPlay) -> str | None:
        actions = episode.call("valid_actions")
        return drawn.choice(actions) if actions else None

    return choose


def spec_of(name: str, overrides: list[str]) -> EnvSpec:
    """Return the entry of an environment, by its name or "file.py:function".

    Raises: ConfigError: no such environment, it cannot be loaded, or a requirement is missing.
    """
    has_model = override_value(overrides, "model.path") is not None
    unset = [] if has_model else ["model.path=unset"]
    cfg = load_config(None, [*unset, *overrides])
    if missing := missing_requirements([name], cfg.envs, cfg.env):
        raise ConfigError("; ".join(missing))
    passes = (UnknownEnv, ConfigError)  # Their texts name the cause: no traceback is logged.
    loading = call_environment(name, lambda: _load(name, cfg), passes=passes)
    try:
        return asyncio.run(loading)
    except (UnknownEnv, EnvRaised) as error:
        raise ConfigError(str(error)) from error


def _load(name: str, cfg: RunConfig) -> EnvSpec:
    """Return the entry of an environment by its name."""
    registry = Registry([name], cfg.envs, cfg.env)
    return registry.spec(registry.names[0] if is_reference(name) else name)
