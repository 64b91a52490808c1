"""BabyAI with half a character at the end of every observation, while a file exists.

It tests runs with faults. The key `envhub.envs=["benchmarks.envhub.halves:make_spec"]` names the
environment. The key `envs.plugins={halves: PATH}` names the file.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

from msgspec import structs

from common.config.envs import BabyaiOptions, EnvsSection
from envhub.env import EnvSpec, Isolation, StepResult, Style
from envhub.envs.babyai import env as babyai
from envhub.envs.babyai.episode import BabyAiEnv

# Half of a UTF-16 surrogate pair, as scripts that cut a text produce it. UTF-8 cannot encode it.
HALF = "\ud83d"
MAX_SESSIONS = 256


class HalvesEnv(BabyAiEnv):
    """One BabyAI episode whose observations end with half an emoji."""

    def __init__(self, style: Style, *, options: BabyaiOptions, flag: Path) -> None:
        super().__init__(style, options=options)
        self._flag = flag

    def reset(self, item_id: str, seed: int = 0) -> str:
        return self._cut(super().reset(item_id, seed))

    def step(self, action: str) -> StepResult:
        result = super().step(action)
        return structs.replace(result, observation=self._cut(result.observation))

    def _cut(self, text: str) -> str:
        return f"{text} {HALF}" if self._flag.exists() else text


def make_spec(options: EnvsSection) -> EnvSpec:
    """Return BabyAI's catalogue entry with such episodes. Raises: KeyError: no file is named."""
    flag = Path(options.plugins["halves"])
    return replace(
        babyai.make_spec(options),
        make=partial(HalvesEnv, options=options.babyai, flag=flag),
        isolation=Isolation.WORKER,
        sessions_per_worker=MAX_SESSIONS,
    )
