"""An environment whose turns only wait, for measurements of waiting in runs.

The key `envhub.envs=["benchmarks.envhub.slow:make_spec"]` names it.
"""

import asyncio
import hashlib
import math
from functools import partial
from random import Random

from common.config.envs import EnvsSection
from envhub.env import EnvSpec, Isolation, StepResult, Style, SubsetSpec, parse_item

NAME = "slow"
MAX_SESSIONS = 1024
SUBSETS = {"wait": SubsetSpec(num_train=100_000, num_test=100, max_turns=64)}


def turn_s(item_id: str, seed: int, *, options: dict[str, str]) -> float:
    """Return the seconds of every turn of an episode: log-normal, with some long episodes.

    They depend only on the item, the seed and the options. Runs in different modes therefore have
    the same waiting times.

    Args:
        options: `median_s` of a turn, `sigma` of its log, `tail_frac` of the episodes that take
            `tail_factor` times as long.
    """
    draw = Random(_digest(item_id, seed, "time"))
    seconds = float(options.get("median_s", "0.3"))
    seconds *= math.exp(float(options.get("sigma", "0.4")) * draw.gauss(0.0, 1.0))
    is_long = draw.random() < float(options.get("tail_frac", "0.02"))
    return seconds * (float(options.get("tail_factor", "10")) if is_long else 1.0)


def is_won(item_id: str, seed: int) -> bool:
    """Return whether the episode succeeds. Half of them do."""
    return _digest(item_id, seed, "worth") % 2 == 0


def _digest(item_id: str, seed: int, what: str) -> int:
    """Return a number that depends on the item, the seed and a word."""
    words = f"{item_id} {seed} {what}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "big")


def own_seed(item_id: str, seed: int, action: str) -> int:
    """Return the seed of the episode's delay and success.

    Members of a group share item and seed. The first action makes their episodes differ.
    """
    return _digest(item_id, seed, f"action {action}")


class SlowEnv:
    """`num_turns` turns of waiting, then a reward. A hash of the first action decides both."""

    def __init__(self, style: Style, *, options: dict[str, str]) -> None:
        self._options = options
        self._num_turns = int(options.get("num_turns", "4"))
        self._num_played = 0
        self._turn_s = 0.0
        self._is_won = False
        self._item_id = ""
        self._seed = 0

    async def reset(self, item_id: str, seed: int) -> str:
        parse_item(item_id, SUBSETS)
        self._item_id = item_id
        self._seed = seed
        return "wait"

    async def step(self, action: str) -> StepResult:
        """Wait for the time of a turn."""
        if self._num_played == 0:
            seed = own_seed(self._item_id, self._seed, action)
            self._turn_s = turn_s(self._item_id, seed, options=self._options)
            self._is_won = is_won(self._item_id, seed)
        await asyncio.sleep(self._turn_s)
        self._num_played += 1
        is_over = self._num_played >= self._num_turns
        reward = float(is_over and self._is_won)
        return StepResult(observation="wait", reward=reward, done=is_over, is_valid=True)

    async def valid_actions(self) -> list[str]:
        return ["wait"]

    async def expert_action(self) -> str | None:
        return "wait"

    async def render(self) -> str:
        return f"{self._num_played} of {self._num_turns} turns of {self._turn_s:.2f} s"

    async def fingerprint(self) -> str:
        return f"{self._item_id} {self._seed}"

    async def close(self) -> None:
        """Do nothing, because the environment holds no resources."""


def make_spec(options: EnvsSection) -> EnvSpec:
    """Return the specification, with the options of `envs.plugins`."""
    return EnvSpec(
        name=NAME,
        subsets=SUBSETS,
        instruction={Style.COMPACT: ""},
        make=partial(SlowEnv, options=dict(options.plugins)),
        isolation=Isolation.WORKER,
        sessions_per_worker=MAX_SESSIONS,
    )
