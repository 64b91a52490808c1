"""Wrapper that sums the step rewards of an episode into the score so far."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from inspect import isawaitable
from typing import Any

from msgspec import structs

from envhub.env import EnvSpec, Reward, StepResult, Style

DIGITS = 9  # Decimal digits of a sum, so that ten times 0.1 is 1.


def with_summed_rewards(spec: EnvSpec) -> EnvSpec:
    """Return the entry; with `Reward.SUM`, its episodes are wrapped in `SummedRewards`.

    Raises: ValueError: the environment has seats.
    """
    if spec.reward is Reward.LAST:
        return spec
    if spec.seats > 1:
        raise ValueError(f"{spec.name}: an environment with seats needs Reward.LAST, not SUM")
    make: Any = spec.make

    def make_summed(style: Style) -> Any:
        """Return an episode whose rewards are summed."""
        return SummedRewards(make(style))

    return replace(spec, make=make_summed)


class SummedRewards:
    """An `Env` or `AsyncEnv` whose reward is the sum of the inner environment's rewards so far.

    Example: inner rewards 0.25, 0 and 0.25 become 0.25, 0.25 and 0.5.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self._sum = 0.0

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._env, name)
        if name in ("save", "load"):  # Only an environment that has both can be saved.
            return partial(getattr(self, f"_{name}"), inner)
        return inner

    def reset(self, item_id: str, seed: int) -> Any:
        """Reset the inner environment and the sum."""
        self._sum = 0.0
        return self._env.reset(item_id, seed)

    def step(self, action: str) -> Any:
        """Step the inner environment; the result's reward is the sum so far."""
        result = self._env.step(action)
        return self._later(result) if isawaitable(result) else self._summed(result)

    async def _later(self, result: Awaitable[StepResult]) -> StepResult:
        """Await a result, and add it to the sum."""
        return self._summed(await result)

    def _save(self, save: Callable[[], Any]) -> Any:
        """Return the state of the inner environment with the sum."""
        state = save()
        return self._saved_later(state) if isawaitable(state) else [self._sum, state]

    async def _saved_later(self, state: Awaitable[Any]) -> Any:
        """Await a state, and add the sum to it."""
        return [self._sum, await state]

    def _load(self, load: Callable[[Any], Any], state: Any) -> Any:
        """Restore the sum and the inner environment."""
        self._sum, inner = state
        return load(inner)

    def _summed(self, result: StepResult) -> StepResult:
        """Return a result with the sum of the rewards so far."""
        self._sum = round(self._sum + result.reward, DIGITS)
        is_success = result.is_success if result.tells_success else None
        return structs.replace(result, reward=self._sum, is_success=is_success)
